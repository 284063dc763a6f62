"""Prompts in one of few widths, and responses that do not depend on it."""

import numpy as np
import pytest

from rlhf_jax.rollout.prompt_batch import prompt_batch, prompt_width
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.rules import batch_sharding

VIEW = training_view({"data": 8, "fsdp": 1, "tensor": 1})


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (20, {20}),
        (64, {32, 64}),
        (100, {32, 64, 96, 100}),
        (512, {128, 256, 384, 512}),
        (4000, {1008, 2016, 3024, 4000}),
    ],
)
def test_the_widths_of_a_limit(limit, expected):
    """Each width compiles an iteration's programs again, so there are four at most."""
    widths = [prompt_width(longest, limit) for longest in range(limit + 1)]
    assert set(widths) == expected
    assert all(longest <= width for longest, width in enumerate(widths))


@pytest.mark.parametrize(("longest", "limit", "width"), [(3, 64, 32), (40, 64, 64), (8, 8, 8)])
def test_prompts_lie_at_the_right_edge(longest, limit, width):
    lengths = np.linspace(1, longest, 8).astype(int)
    rows = [[7 + b] * length for b, length in enumerate(lengths)]
    prompts = prompt_batch(rows.__getitem__, 10 + np.arange(8), limit=limit, view=VIEW)
    assert prompts.tokens_BP.shape == (8, width)
    for b, row in enumerate(rows):
        assert prompts.tokens_BP[b].tolist() == [0] * (width - len(row)) + row
        assert prompts.mask_BP[b].tolist() == [False] * (width - len(row)) + [True] * len(row)
    assert prompts.row_B.tolist() == list(range(10, 18))
    assert prompts.tokens_BP.sharding.is_equivalent_to(batch_sharding(VIEW), 2)

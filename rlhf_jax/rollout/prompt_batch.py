"""Prompts of a batch, padded to one of few widths and laid on the devices that generate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlhf_jax.data.batches import pad_rows, width_for
from rlhf_jax.rollout.token_rows import rendered_rows
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.processes import put
from rlhf_jax.sharding.rules import batch_sharding
from rlhf_jax.types import Prompts

NARROWEST = 32  # below it a width of its own saves less than its compilation costs


def prompt_width(longest: int, limit: int) -> int:
    """The width that prompts of at most `longest` tokens are padded to.

    One of four at most: about 1/4, 1/2, 3/4 and 1 of `limit`, no width but the limit below NARROWEST. Each
    width that occurs compiles the programs of an iteration once.
    """
    quarter = -(-limit // 4)
    step = max(NARROWEST, -(-quarter // 16) * 16)
    return width_for(max(longest, 1), min(step, limit), limit)


def prompt_batch(
    render: Callable[[int], list[int]], row_ids: np.ndarray, *, limit: int, view: View
) -> Prompts:
    """The prompts on the devices that generate, as wide as the longest needs it.

    Of several processes each renders its share; the width is that of all.

    Args:
      render: row of the batch -> token ids, at most `limit`.   row_ids: name each row's sampling stream.
    """
    rows = rendered_rows(render, len(row_ids), limit)
    tokens_BP, mask_BP = pad_rows(rows, prompt_width(max(map(len, rows)), limit), "left", 0)
    return Prompts(*put((tokens_BP, mask_BP, row_ids.astype(np.int32)), batch_sharding(view)))

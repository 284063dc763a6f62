"""Rectangles of rows, and batches as pure functions of the step."""

import numpy as np
import pytest

from rlhf_jax.data.batches import (
    batch_indices,
    epoch_order,
    pad_rows,
    sequential_batches,
    steps_per_epoch,
    width_for,
)
from rlhf_jax.errors import InputError


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad_id", [0, 2, 9])
def test_mask_comes_from_lengths_whatever_the_pad_id(side, pad_id):
    """Fault: the mask was id != pad, so that pad == EOS lost the EOS and pad id 0 lost real tokens."""
    rows = [[5, 0, 2], [2], [], [0, 0, 9, 2]]
    tokens, mask = pad_rows(rows, 5, side, pad_id)
    assert (tokens.dtype, mask.dtype, tokens.shape) == (np.int32, bool, (4, 5))
    assert mask.sum(1).tolist() == [3, 1, 0, 4]
    assert [tokens[n][mask[n]].tolist() for n in range(4)] == rows
    assert (tokens[~mask] == pad_id).all()
    assert mask[:3, 0 if side == "right" else -1].tolist() == [True, True, False]


def test_pad_rows_refuses_what_does_not_fit():
    assert pad_rows([], 3, "left", 0)[0].shape == (0, 3)
    with pytest.raises(ValueError, match="a row of 4 tokens does not fit a width of 3"):
        pad_rows([[1, 2, 3, 4]], 3, "left", 0)
    with pytest.raises(ValueError, match="side='middle'"):
        pad_rows([[1]], 3, "middle", 0)


def test_widths_are_few_and_cover_every_length():
    widths = [width_for(longest, 8) for longest in range(513)]
    assert sorted(set(widths)) == [8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
    assert all(longest <= width <= max(8, 2 * longest) for longest, width in enumerate(widths))
    assert width_for(100, 64, limit=120) == 120
    with pytest.raises(ValueError, match="limit 10"):
        width_for(11, 8, limit=10)


def test_epochs_are_permutations_that_differ():
    """Fault: the shuffle key was used again, so that every epoch had one order."""
    orders = [epoch_order(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert (epoch_order(50, 1, 1) == orders[3]).all()


def test_batches_are_a_pure_function_of_the_step():
    """Fault: a resumed run repeated or skipped data, or ended at an epoch boundary."""
    kwargs = {"count": 10, "batch_size": 3, "seed": 4}
    run = [batch_indices(step, **kwargs) for step in range(9)]
    assert steps_per_epoch(10, 3) == 3
    for epoch in range(3):
        rows = np.concatenate(run[3 * epoch : 3 * epoch + 3])
        assert len(set(rows)) == 9
        assert (rows == epoch_order(10, 4, epoch)[:9]).all()
    for step in (8, 3, 0):  # in any order, without those before
        assert (batch_indices(step, **kwargs) == run[step]).all()


def test_batch_sizes_are_checked_with_their_numbers():
    """Fault: batch arithmetic rounded to 0 steps."""
    with pytest.raises(InputError, match="a batch of 16 pairs is larger than the 10 pairs there are"):
        batch_indices(0, count=10, batch_size=16, seed=0, what="pairs")
    for size in (0, -1):
        with pytest.raises(InputError, match=f"a batch size of {size} is too small"):
            steps_per_epoch(10, size)
        with pytest.raises(InputError, match=f"a batch size of {size} is too small"):
            sequential_batches(10, size)


@pytest.mark.parametrize("count", [0, 1, 4, 7, 8])
def test_sequential_batches_hold_each_row_once(count):
    batches = sequential_batches(count, 4)
    assert all(len(indices) == len(valid) == 4 for indices, valid in batches)
    assert [row for indices, valid in batches for row in indices[valid]] == list(range(count))
    assert all(0 <= row < max(count, 1) for indices, _ in batches for row in indices)

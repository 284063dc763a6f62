"""Which rows make a batch, and how rows of tokens become rectangles.

Batches are pure functions of (seed, step): a resumed run needs no more than its step to go on with the next
rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_jax.errors import InputError


def pad_rows(
    rows: Sequence[Sequence[int]], width: int, side: str, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of token ids as one rectangle.

    The mask comes from the lengths of the rows, never from their ids: pad_id may be a token that occurs in
    them.

    Args:
      rows: token ids, at most `width` each.
      side: "left" or "right", where the padding goes.
    Returns:
      (tokens, mask): int32 and bool of shape [len(rows), width]; mask is True on the tokens of the row.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side={side!r}; use left or right")
    lengths = np.array([len(row) for row in rows], np.int64)
    if lengths.size and lengths.max() > width:
        raise ValueError(f"a row of {lengths.max()} tokens does not fit a width of {width}")
    position = np.arange(width)[None, :]
    mask = position < lengths[:, None] if side == "right" else position >= width - lengths[:, None]
    tokens = np.full((len(rows), width), pad_id, np.int32)
    tokens[mask] = np.concatenate([np.asarray(row, np.int32) for row in rows]) if rows else []
    return tokens, mask


def width_for(longest: int, multiple: int, limit: int | None = None) -> int:
    """The width to pad to: one of a few, so that a jitted step is compiled a few times only.

    Widths are `multiple` times 1, 2, 3, 4, 6, 8, 12, 16, ...: above the first, at most half of one is
    padding. `limit` caps them, for a limit that every row keeps.
    """
    if longest < 0 or multiple < 1 or (limit is not None and longest > limit):
        raise ValueError(f"no width for {longest} tokens with multiple {multiple} and limit {limit}")
    width, step = multiple, multiple
    while width < longest:
        if width >= 4 * step:
            step *= 2
        width += step
    return width if limit is None else min(width, limit)


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of rows in one epoch: a permutation of `count`, another one for each epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def steps_per_epoch(count: int, batch_size: int, *, what: str = "rows") -> int:
    """Whole batches in one pass; the rows left over are other ones in each epoch."""
    if batch_size < 1:
        raise InputError(f"a batch size of {batch_size} is too small; use at least 1")
    if batch_size > count:
        raise InputError(
            f"a batch of {batch_size} {what} is larger than the {count} {what} there are; "
            f"use a batch size of at most {count} or more data"
        )
    return count // batch_size


def batch_indices(step: int, *, count: int, batch_size: int, seed: int, what: str = "rows") -> np.ndarray:
    """The rows of the batch at `step`, counted from 0 over all epochs. A pure function of its arguments."""
    epoch, place = divmod(step, steps_per_epoch(count, batch_size, what=what))
    return epoch_order(count, seed, epoch)[place * batch_size : (place + 1) * batch_size]


def sequential_batches(count: int, batch_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """All rows in order, as (indices, valid) of equal length.

    The last batch is filled up with row 0, where valid is False.
    """
    if batch_size < 1:
        raise InputError(f"a batch size of {batch_size} is too small; use at least 1")
    batches = []
    for start in range(0, count, batch_size):
        indices = np.arange(start, start + batch_size)
        batches.append((np.where(indices < count, indices, 0), indices < count))
    return batches

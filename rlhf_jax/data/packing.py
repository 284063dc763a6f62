"""Texts of different lengths laid end to end in few rows, so that hardly any padding is computed.

Each text of a row is a segment with a number of its own: tokens attend within their segment only, and
positions begin anew in each, so that a text is read as it is alone. Texts that a loss compares, the two sides
of a pair, come into one group; a group is what one shard of the batch holds of one micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlhf_jax.data.batches import width_for

SHORTEST = 128  # tokens of a row: several texts fit, and attention over it still costs little
STEPS = 4  # row counts are 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...: few shapes are compiled


@dataclasses.dataclass(frozen=True)
class PackedTexts:
    """G groups of P items of K texts in R rows of width L. Cells of a group are counted row by row.

    Attributes:
      tokens_GRL: int32, 0 in padding.
      segments_GRL: int32, from 1 in each row; 0 in padding.
      item_GP: the number of each item.
      first_GPK: the cell of each text's first token.
    """

    tokens_GRL: np.ndarray
    segments_GRL: np.ndarray
    item_GP: np.ndarray
    first_GPK: np.ndarray


def pack(
    items: Sequence[Sequence[Sequence[int]]], width: int, groups: int, *, together: bool = True
) -> PackedTexts:
    """Items of K texts each, dealt out to groups and laid into rows.

    Args:
      items: a multiple of `groups`; each has K texts of 1 to `width` token ids.
      together: False gives each text a row of its own, in the order of the items.
    """
    item_GP = deal([sum(map(len, item)) for item in items], groups)
    texts = [[text for i in group for text in items[i]] for group in item_GP]
    most = len(texts[0])
    rows = [
        first_fit([len(text) for text in group], width) if together else [[n] for n in range(most)]
        for group in texts
    ]
    R = _few(max(map(len, rows))) if together else most
    tokens_GRL, segments_GRL = np.zeros((2, groups, R, width), np.int32)
    first_GN = np.zeros((groups, most), np.int32)
    for g, group in enumerate(rows):
        for r, row in enumerate(group):
            column = 0
            for segment, n in enumerate(row, start=1):
                text = texts[g][n]
                end = column + len(text)
                tokens_GRL[g, r, column:end], segments_GRL[g, r, column:end] = text, segment
                first_GN[g, n], column = r * width + column, end
    return PackedTexts(tokens_GRL, segments_GRL, item_GP, first_GN.reshape(*item_GP.shape, -1))


def row_width(longest: int, limit: int) -> int:
    """The width of packed rows.

    Args:
      longest: tokens of the longest text.   limit: positions that the model has, at least as many.
    """
    return min(max(width_for(longest, SHORTEST // 2), SHORTEST), limit)


def _few(count: int) -> int:
    """`count`, rounded up to one of STEPS numbers between a power of two and the next."""
    step = max(1, 2 ** (count.bit_length() - 1) // STEPS)
    return -(-count // step) * step


def deal(sizes: Sequence[int], groups: int) -> np.ndarray:
    """Item numbers in groups of equal count and about equal size: [groups, items / groups]."""
    return np.argsort(-np.asarray(sizes), kind="stable")[dealt_ranks(len(sizes), groups)]


def dealt_ranks(count: int, groups: int) -> np.ndarray:
    """Which of so many items, the largest first, come into each group: [groups, count / groups].

    One to each group, then the next ones in the opposite direction, and so on.
    """
    rounds_PG = np.arange(count).reshape(-1, groups)
    rounds_PG[1::2] = rounds_PG[1::2, ::-1].copy()
    return rounds_PG.T


def first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Text numbers by row: the longest first, each into the first row with room: first-fit decreasing."""
    rows: list[list[int]] = []
    room: list[int] = []
    for n in np.argsort(-np.asarray(lengths), kind="stable"):
        fitting = (r for r, left in enumerate(room) if left >= lengths[n])
        r = next(fitting, None)
        if r is None:
            rows.append([int(n)])
            room.append(width - lengths[n])
        else:
            rows[r].append(int(n))
            room[r] -= lengths[n]
    return rows

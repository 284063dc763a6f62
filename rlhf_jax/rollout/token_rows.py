"""Rows of token ids that several processes render together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlhf_jax.data.batches import pad_rows
from rlhf_jax.sharding.processes import share_rows


def rendered_rows(render: Callable[[int], list[int]], count: int, limit: int) -> list[list[int]]:
    """`count` rows, whole on every process; each renders its share.

    Args:
      render: row -> token ids, at most `limit`.
    """

    def lengths_and_tokens(rows: range) -> np.ndarray:
        """[rows, 1 + limit]: ragged rows do not travel between processes."""
        tokens, mask = pad_rows([render(row) for row in rows], limit, "right", 0)
        return np.concatenate([mask.sum(1, keepdims=True, dtype=np.int32), tokens], axis=1)

    return [row[1 : 1 + row[0]].tolist() for row in share_rows(lengths_and_tokens, count)]

"""Prompts of a batch, padded to one of few widths and laid on the devices that generate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlhf_jax.data.batches import pad_rows, width_for
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.processes import put, share_rows
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

    def lengths_and_tokens(rows: np.ndarray) -> np.ndarray:
        tokens, mask = pad_rows([render(b) for b in rows.tolist()], limit, "left", 0)
        return np.concatenate([mask.sum(1, keepdims=True, dtype=np.int32), tokens], axis=1)

    found = share_rows(lengths_and_tokens, len(row_ids))
    length_B, width = found[:, 0], prompt_width(int(found[:, 0].max()), limit)
    tokens_BP = np.ascontiguousarray(found[:, -width:])
    mask_BP = np.arange(width)[None] >= width - length_B[:, None]
    return Prompts(*put((tokens_BP, mask_BP, row_ids.astype(np.int32)), batch_sharding(view)))

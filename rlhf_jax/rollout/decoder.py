"""What generation needs of a policy, as two pure functions; and the same for a module without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct


class Decoder(NamedTuple):
    """Two functions over a cache: a tree whose leaves' first axis is the row; scalars belong to all rows.

    prefill: (params, tokens_BP, mask_BP, cache_length) -> (logits_BV of each row's last token, cache)
    decode: (params, token_B, cache) -> (logits_BV, cache)
    """

    prefill: Callable[..., Any]
    decode: Callable[..., Any]


def decoder_for(model: nn.Module) -> Decoder:
    """The model's own `prefill` and `decode`; without them, the whole sequence again for each token."""
    if not hasattr(model, "decode"):
        return recomputing_decoder(model)

    def prefill(params, tokens_BP, mask_BP, cache_length):
        return model.apply({"params": params}, tokens_BP, mask_BP, cache_length, method="prefill")

    def decode(params, token_B, cache):
        return model.apply({"params": params}, token_B, cache, method="decode")

    return Decoder(prefill, decode)


@struct.dataclass
class TokenCache:
    """The sequence so far, for models without a key/value cache."""

    tokens_BS: jax.Array
    mask_BS: jax.Array
    slot_B: jax.Array  # where the next token is written


def recomputing_decoder(model: nn.Module) -> Decoder:
    """Generation for any module with `apply(variables, tokens_BT, mask_BT) -> logits_BTV`.

    Simple, and quadratic in the length.
    """

    def prefill(params, tokens_BP, mask_BP, cache_length):
        B, P = tokens_BP.shape
        room = ((0, 0), (0, cache_length - P))
        cache = TokenCache(jnp.pad(tokens_BP, room), jnp.pad(mask_BP, room), jnp.full((B,), P, jnp.int32))
        logits_BPV: Any = model.apply({"params": params}, tokens_BP, mask_BP)
        return logits_BPV[:, -1], cache

    def decode(params, token_B, cache):
        rows, slot_B = jnp.arange(token_B.shape[0]), cache.slot_B
        tokens_BS = cache.tokens_BS.at[rows, slot_B].set(token_B)
        mask_BS = cache.mask_BS.at[rows, slot_B].set(True)
        logits_BSV: Any = model.apply({"params": params}, tokens_BS, mask_BS)
        last_B1V = jnp.take_along_axis(logits_BSV, slot_B[:, None, None], axis=1)
        return last_B1V[:, 0], TokenCache(tokens_BS, mask_BS, slot_B + 1)

    return Decoder(prefill, decode)


def repeat_rows(tree: Any, times: int) -> Any:
    """Every row of every leaf, `times` times in a row."""
    return jax.tree.map(lambda x: x if times == 1 or x.ndim == 0 else jnp.repeat(x, times, axis=0), tree)


def place_rows(cache: Any, new: Any, put: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    """The cache with some rows anew, by its own `place` where it has one.

    Args:
      put: (all rows, new rows) -> all rows, for one leaf.
    """
    return cache.place(new, put) if hasattr(cache, "place") else jax.tree.map(put, cache, new)

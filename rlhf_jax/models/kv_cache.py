"""Keys and values of the tokens seen so far, as a record that goes in and comes out."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class KVCache:
    """One pair of buffers a layer, so that a `while_loop` that carries them writes in place."""

    layers: tuple[tuple[jax.Array, jax.Array], ...]  # (k_BKSE, v_BKSE) of each layer
    mask_BS: jax.Array  # bool, True on slots that may be attended to
    slot_B: jax.Array  # int32, the slot that the next token is written to
    position_B: jax.Array  # int32, the position of the next token

    @property
    def length(self) -> int:
        return self.mask_BS.shape[1]

    def advance(self) -> KVCache:
        """The cache with the next slot open to attention and the counters moved on."""
        mask_BS = jax.vmap(lambda mask_S, slot: mask_S.at[slot].set(True))(self.mask_BS, self.slot_B)
        return dataclasses.replace(
            self, mask_BS=mask_BS, slot_B=self.slot_B + 1, position_B=self.position_B + 1
        )


def write_slot(x_BKSE, slot_B, new_BKE):
    """The buffer with one more token a row; nothing changes in a row whose slot is past its end.

    A `vmap` over rows, since indices that name the rows would have each device collect all rows' tokens.
    """

    def write(x_KSE, slot, new_KE):
        return x_KSE.at[:, slot].set(new_KE.astype(x_KSE.dtype), mode="drop")

    return jax.vmap(write)(x_BKSE, slot_B, new_BKE)


def fill_cache(pairs, mask_BP, length: int) -> KVCache:
    """A cache of `length` slots that begins with the keys and values [B, P, K, E] of a prompt."""
    B, P = mask_BP.shape
    if length < P:
        raise ValueError(f"cache_length {length} is below the prompt's width {P}")

    def slots(x_BPKE):
        return jnp.pad(x_BPKE.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, length - P), (0, 0)))

    return KVCache(
        layers=tuple((slots(k), slots(v)) for k, v in pairs),
        mask_BS=jnp.pad(mask_BP, ((0, 0), (0, length - P))),
        slot_B=jnp.full((B,), P, jnp.int32),
        position_B=mask_BP.sum(-1).astype(jnp.int32),
    )

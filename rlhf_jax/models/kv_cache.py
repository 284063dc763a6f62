"""Keys and values of the tokens seen so far, as a record that goes in and comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

KEY_COLUMNS, VALUE_COLUMNS = 3, 2  # the axis of a layer's keys and values that has the columns


@struct.dataclass
class KVCache:
    """One pair of buffers a layer, so that a `while_loop` that carries them writes in place.

    The next token of every row is written to the same column, and after the last column comes the first.
    Rows may begin at different times all the same: which columns a row attends to is in its mask, and which
    position a token has is in its key. So a token is written as one slice, where an index by row would be a
    scatter.

    Keys are kept with their columns last, as the product of a query with all of them wants its right side:
    two to five times as fast on a CPU as with columns first, where it turns the keys at every step.
    """

    layers: tuple[tuple[jax.Array, jax.Array], ...]  # (k_BKES, v_BKSE) of each layer
    mask_BS: jax.Array  # bool, True on columns that may be attended to
    column: jax.Array  # int32, where the next token of every row is written
    position_B: jax.Array  # int32, the position of the next token

    @property
    def length(self) -> int:
        return self.mask_BS.shape[1]

    def advance(self) -> KVCache:
        """The cache with the next column open to attention and the counters moved on."""
        open_B1 = jnp.ones((self.mask_BS.shape[0], 1), bool)
        return dataclasses.replace(
            self,
            mask_BS=lax.dynamic_update_slice_in_dim(self.mask_BS, open_B1, self.column, 1),
            column=(self.column + 1) % self.length,
            position_B=self.position_B + 1,
        )

    def place(self, new: KVCache, put: Callable[[jax.Array, jax.Array], jax.Array]) -> KVCache:
        """The cache with some rows anew, their tokens turned so that they end before the next column.

        Args:
          new: as many columns.
          put: (all rows, new rows) -> all rows, for arrays whose first axis is the row.
        """
        shift = self.column - new.column

        def put_pair(pair, new_pair):
            (k, v), (new_k, new_v) = pair, new_pair
            return put(k, jnp.roll(new_k, shift, KEY_COLUMNS)), put(v, jnp.roll(new_v, shift, VALUE_COLUMNS))

        return dataclasses.replace(
            self,
            layers=tuple(map(put_pair, self.layers, new.layers)),
            mask_BS=put(self.mask_BS, jnp.roll(new.mask_BS, shift, 1)),
            position_B=put(self.position_B, new.position_B),
        )


def write_column(pair, column, new_pair):
    """The buffers of a layer with one more token (T = 1) of every row: k_BTKE and v_BTKE."""
    (k_BKES, v_BKSE), (k_BTKE, v_BTKE) = pair, new_pair
    k_BKET, v_BKTE = k_BTKE.transpose(0, 2, 3, 1), v_BTKE.transpose(0, 2, 1, 3)
    return (
        lax.dynamic_update_slice_in_dim(k_BKES, k_BKET.astype(k_BKES.dtype), column, KEY_COLUMNS),
        lax.dynamic_update_slice_in_dim(v_BKSE, v_BKTE.astype(v_BKSE.dtype), column, VALUE_COLUMNS),
    )


def fill_cache(pairs, mask_BP, length: int) -> KVCache:
    """A cache of `length` columns that begins with the keys and values [B, P, K, E] of a prompt."""
    P = mask_BP.shape[1]
    if length < P:
        raise ValueError(f"cache_length {length} is below the prompt's width {P}")
    rest = (0, length - P)

    def columns(k_BPKE, v_BPKE):
        k_BKES = jnp.pad(k_BPKE.transpose(0, 2, 3, 1), ((0, 0), (0, 0), (0, 0), rest))
        v_BKSE = jnp.pad(v_BPKE.transpose(0, 2, 1, 3), ((0, 0), (0, 0), rest, (0, 0)))
        return k_BKES, v_BKSE

    return KVCache(
        layers=tuple(columns(k, v) for k, v in pairs),
        mask_BS=jnp.pad(mask_BP, ((0, 0), rest)),
        column=jnp.int32(P % length),
        position_B=mask_BP.sum(-1).astype(jnp.int32),
    )

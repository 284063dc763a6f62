"""Rows laid end to end, so that what a layer does token by token is not done for padding.

Only attention looks across tokens. It sees the padded rows as before; around it, projections, feed-forward
layers and norms see the valid tokens alone. Rows cannot reach each other, whatever lies beside them.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import struct

LINES = 2  # of packed tokens in a group: beside an axis of size 1 a CPU's products take a tenth longer


@struct.dataclass
class Packing:
    """Where tokens lie in both forms: rows in G groups [G, R], R = B/G * T, and packed [G, N].

    A group is what one shard of the batch holds: nothing moves between groups. Packed tokens are in the order
    of their rows; where fewer than N are valid, the rest is padding. An index that is out of range stands for
    nothing, and reads as 0.
    """

    packed_GR: jax.Array  # int32, the packed index of each place of the rows; N where there is no token
    place_GN: jax.Array  # int32, the place in the rows of each packed token; R where there is none

    def pack(self, x_BT):
        """[B, T, ...] -> [G * LINES, N / LINES, ...]: the valid tokens end to end."""
        x_GR = x_BT.reshape(*self.packed_GR.shape, *x_BT.shape[2:])
        x_GN = _take(x_GR, self.place_GN, self.packed_GR)
        return x_GN.reshape(x_GN.shape[0] * LINES, -1, *x_BT.shape[2:])

    def unpack(self, x, rows: int):
        """What `pack` gives -> [B, T, ...]: back into rows, 0 where there is no token."""
        x_GN = x.reshape(*self.place_GN.shape, *x.shape[2:])
        x_GR = _take(x_GN, self.packed_GR, self.place_GN)
        return x_GR.reshape(rows, -1, *x.shape[2:])


def whole_lines(tokens: float) -> int:
    """The least size of a packing that holds so many tokens."""
    return math.ceil(tokens / LINES) * LINES


def pack_valid(mask_BT, groups: int, size: int) -> Packing:
    """The packing of the valid tokens of rows into `size` tokens a group; no group has more valid ones."""
    valid_GR = mask_BT.reshape(groups, -1).astype(bool)
    packed_GR = jnp.where(valid_GR, jnp.cumsum(valid_GR, -1) - 1, size)
    nothing = valid_GR.shape[1]
    place_GN = jax.vmap(lambda valid_R: jnp.nonzero(valid_R, size=size, fill_value=nothing)[0])(valid_GR)
    return Packing(packed_GR.astype(jnp.int32), place_GN.astype(jnp.int32))


def _gather(x_GN, index_GM):
    """x at an index in each group, 0 where it is out of range."""
    return jax.vmap(lambda x_N, index_M: x_N.at[index_M].get(mode="fill", fill_value=0))(x_GN, index_GM)


@jax.custom_vjp
def _take(x_GN, index_GM, inverse_GN):
    """x at an index; `inverse` says where each entry goes, so that the gradient is a gather as well.

    The transpose of a gather is a scatter, which is many times slower. Each entry is taken once at most, and
    the two indices undo each other.
    """
    return _gather(x_GN, index_GM)


def _take_forward(x_GN, index_GM, inverse_GN):
    return _gather(x_GN, index_GM), (index_GM, inverse_GN)


def _take_backward(indices, gradient_GM):
    _, inverse_GN = indices
    return _gather(gradient_GM, inverse_GN), None, None


_take.defvjp(_take_forward, _take_backward)

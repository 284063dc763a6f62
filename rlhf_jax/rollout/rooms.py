"""Passes over a rollout that leave its padding out, in the least room that holds its tokens.

How many tokens a rollout has is known only once it is sampled, and a program's shapes must be known before.
So a pass is compiled for a few rooms, and a condition on the device takes one: the host waits for nothing,
and no rollout compiles anything anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.data.packing import dealt_ranks
from rlhf_jax.errors import InputError
from rlhf_jax.models.packing import whole_lines
from rlhf_jax.models.transformer import Transformer
from rlhf_jax.sharding.rules import batch_shards, take_rows
from rlhf_jax.types import Rollout, Room

# Eighths of the padded size: of all tokens, of the responses' tokens. The first that holds both is taken, and
# where none does, padding is computed too.
ROOMS = ((3, 3), (4, 4), (4, 8), (5, 5), (6, 6), (6, 8), (7, 7), (7, 8))


def in_least_room(function: Callable[[Rollout], Any], rollout: Rollout) -> Any:
    """`function` of the rollout with the least `room` that the tokens of every shard fit into."""
    shards, cells = batch_shards(), (rollout.mask_BS.size, rollout.mask_BT.size)
    fullest_2 = jnp.stack([m.reshape(shards, -1).sum(-1).max() for m in (rollout.mask_BS, rollout.mask_BT)])
    rooms = [
        Room(*(whole_lines(c * e / shards / 8) for c, e in zip(cells, room, strict=True))) for room in ROOMS
    ]
    holds_R = (fullest_2[None] <= jnp.asarray(rooms)).all(-1)
    index = jnp.where(holds_R.any(), holds_R.argmax(), len(rooms))

    def of(room):
        return lambda: function(dataclasses.replace(rollout, room=room))

    return jax.lax.switch(index, [of(room) for room in (*rooms, None)])


def packed(read: Callable[..., Any]) -> Callable[..., Any]:
    """`read`, from (parameters, ..., rollout) to arrays of rows, without padding.

    Rows are dealt out to the batch's shards, so that each has about as many tokens.
    """

    @functools.wraps(read, assigned=("__name__", "__doc__"))
    def reader(*args):
        *params, rollout = args
        order_B = deal(rollout.mask_BS.sum(-1), batch_shards()).reshape(-1)
        found = in_least_room(functools.partial(read, *params), take_rows(rollout, order_B))
        return take_rows(found, jnp.argsort(order_B))

    return reader


def deal(lengths_R: jax.Array, cells: int) -> jax.Array:
    """As `data.packing.deal`, on the device: [cells, R / cells] row numbers, about equal lengths a cell."""
    return jnp.argsort(-lengths_R)[dealt_ranks(len(lengths_R), cells)]


def check_packs(model: nn.Module) -> None:
    """
    Raises:
      InputError: the model cannot leave padding out.
    """
    if not isinstance(model, Transformer):
        raise InputError(
            f"ppo.packing=true needs a Transformer of rlhf_jax, not {type(model).__name__}; use false"
        )

"""How updates leave padding out: rows dealt out evenly, and gradients in the least room that holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from rlhf_jax.rollout.rooms import deal, in_least_room
from rlhf_jax.sharding.rules import batch_shards
from rlhf_jax.trainers.optimizer import Loss, value_and_gradient


def even_order(lengths_R: jax.Array, micro_batches: int) -> jax.Array:
    """The rows of a minibatch in an order that gives each shard of each micro-batch about as many tokens.

    A shard holds rows that are neighbours; of these `accumulate` takes every row whose number is m modulo the
    number of micro-batches into micro-batch m.
    """
    shards = batch_shards()
    cells = deal(lengths_R, shards * micro_batches).reshape(shards, micro_batches, -1)
    return cells.swapaxes(1, 2).reshape(-1)


def packed_gradient(loss: Loss) -> Callable[..., Any]:
    """As `value_and_gradient`, of a loss of an Experience, without padding.

    The gradient is taken inside the condition: a condition that is differentiated keeps what each room needs.
    """

    def gradient(params, experience):
        def of(rollout):
            return value_and_gradient(loss)(params, dataclasses.replace(experience, rollout=rollout))

        return in_least_room(of, experience.rollout)

    return gradient

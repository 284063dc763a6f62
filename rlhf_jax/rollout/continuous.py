"""Continuous batching: few slots, a queue of rows, one `while_loop`.

A slot whose row has ended takes the next waiting row, so that long responses do not hold the batch. The loop
body fills free slots, once enough of them are free to be worth a prefill, and then decodes one token in each
slot. A slot without a row decodes on, and what it says is dropped.

Letters here: G groups of devices that share no row (1 on one device), N rows of a group, B its slots, C the
rows that one refill places. Every group has its own rows and slots and all refill in the same step: nothing
but the loop's conditions crosses from group to group, and all devices run the same steps, as the collectives
of a tensor axis need it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from rlhf_jax.rollout.decoder import Decoder, place_rows, repeat_rows
from rlhf_jax.rollout.sampling import Sampling, row_uniforms
from rlhf_jax.sharding.rules import batch_shards, constrain_rows
from rlhf_jax.types import Prompts, Rollout

REFILL = 8  # a refill places one slot in so many: with more they wait longer, with fewer prefills are small
WORTH = 0.75  # a refill begins when this share of what it could place finds a free slot


class Work(NamedTuple):
    """How well the slots were used."""

    steps: jax.Array  # decode steps
    waiting_steps: jax.Array  # those while rows were waiting
    busy: jax.Array  # slots with a row, summed over the steps while rows were waiting


@struct.dataclass
class _Slots:
    row_GB: jax.Array  # the row of the group that a slot works on; N: none
    t_GB: jax.Array  # the response position that is written next
    token_GB: jax.Array  # the last one
    cache: Any  # leaves [G * B, ...]
    taken_G: jax.Array  # rows that have left the queue
    response_GNT: jax.Array
    logprobs_GNT: jax.Array
    length_GN: jax.Array
    ended_GN: jax.Array  # by an EOS
    work: Work


@dataclasses.dataclass(frozen=True)
class _Queue:
    """All that stays the same while slots change."""

    decoder: Decoder
    params: Any
    key: jax.Array
    sampling: Sampling
    prompts: Prompts  # leaves [G, N / samples, ...]
    row_GN: jax.Array  # each row's sampling stream
    limit_GN: jax.Array
    samples: int
    slots: int  # B
    response_length: int

    @property
    def rows(self) -> int:
        return self.row_GN.shape[1]

    @property
    def refill(self) -> int:
        """C: the rows of whole prompts, with all their samples, about a share REFILL of the slots."""
        return self.samples * max(1, self.slots // self.samples // REFILL)

    @property
    def cache_length(self) -> int:
        return self.prompts.tokens_BP.shape[-1] + self.response_length

    def empty_slots(self) -> _Slots:
        (G, N), B, T = self.row_GN.shape, self.slots, self.response_length
        P = self.prompts.tokens_BP.shape[-1]
        prompts = jax.ShapeDtypeStruct((G * B, P), jnp.int32), jax.ShapeDtypeStruct((G * B, P), bool)

        def cache(params, tokens_BP, mask_BP):
            return self.decoder.prefill(params, tokens_BP, mask_BP, self.cache_length)[1]

        shapes = jax.eval_shape(cache, self.params, *prompts)
        return _Slots(
            row_GB=jnp.full((G, B), N, jnp.int32),
            t_GB=jnp.zeros((G, B), jnp.int32),
            token_GB=jnp.zeros((G, B), jnp.int32),
            cache=jax.tree.map(_empty, shapes),
            taken_G=jnp.zeros(G, jnp.int32),
            response_GNT=jnp.zeros((G, N, T), jnp.int32),
            logprobs_GNT=jnp.zeros((G, N, T), jnp.float32),
            length_GN=jnp.zeros((G, N), jnp.int32),
            ended_GN=jnp.zeros((G, N), bool),
            work=Work(*[jnp.int32(0)] * 3),
        )

    def working(self, slots: _Slots) -> jax.Array:
        return (slots.taken_G < self.rows).any() | (slots.row_GB < self.rows).any()

    def worth_filling(self, slots: _Slots) -> jax.Array:
        most_G = jnp.minimum(self.rows - slots.taken_G, self.refill)
        now, most = jnp.minimum(most_G, self._free(slots)).sum(), most_G.sum()
        return (now > 0) & (now >= WORTH * most)

    def _free(self, slots: _Slots) -> jax.Array:
        """Free slots of each group, as far as they hold whole prompts."""
        return (slots.row_GB == self.rows).sum(-1) // self.samples * self.samples

    def fill(self, slots: _Slots) -> _Slots:
        """The next rows in free slots, with their first tokens; row N and slot B are nobody's."""
        N, B, C = self.rows, self.slots, self.refill
        place_1C = jnp.arange(C)[None]
        row_GC = slots.taken_G[:, None] + place_1C
        placed_GC = (place_1C < self._free(slots)[:, None]) & (row_GC < N)
        slot_GC = jnp.argsort(slots.row_GB < N, axis=-1, stable=True)[:, :C]
        row_GC, slot_GC = jnp.where(placed_GC, row_GC, N), jnp.where(placed_GC, slot_GC, B)

        prompt_Gc = slots.taken_G[:, None] // self.samples + jnp.arange(C // self.samples)[None]
        tokens_cP, mask_cP = (
            _flat(_take(x, prompt_Gc)) for x in (self.prompts.tokens_BP, self.prompts.mask_BP)
        )
        made = self.decoder.prefill(self.params, tokens_cP, mask_cP, self.cache_length)
        logits_CV, new = repeat_rows(made, self.samples)

        def put(all_rows, new_rows):
            groups = slots.row_GB.shape[0]
            return _flat(_put(_grouped(all_rows, groups), slot_GC, _grouped(new_rows, groups)))

        slots = dataclasses.replace(
            slots,
            cache=place_rows(slots.cache, new, put),
            taken_G=slots.taken_G + placed_GC.sum(-1),
        )
        return self.emit(slots, slot_GC, row_GC, jnp.zeros_like(row_GC), logits_CV)

    def step(self, slots: _Slots) -> _Slots:
        """One token in each slot, after free ones are filled."""
        slots = jax.lax.while_loop(self.worth_filling, self.fill, slots)
        waiting, busy = (slots.taken_G < self.rows).any(), (slots.row_GB < self.rows).sum()
        steps, waiting_steps, busy_steps = slots.work
        work = Work(steps + 1, waiting_steps + waiting, busy_steps + waiting * busy)
        logits_BV, cache = self.decoder.decode(self.params, _flat(slots.token_GB), slots.cache)
        every_GB = jnp.broadcast_to(jnp.arange(self.slots)[None], slots.row_GB.shape)
        slots = dataclasses.replace(slots, cache=cache, work=work)
        return self.emit(slots, every_GB, slots.row_GB, slots.t_GB, logits_BV)

    def emit(self, slots: _Slots, slot_Gb, row_Gb, t_Gb, logits_bV) -> _Slots:
        """The tokens of these rows at their positions t, from these logits, noted in these slots."""
        uniform_b = row_uniforms(self.key, _flat(_take(self.row_GN, row_Gb)), _flat(t_Gb))
        drawn = self.sampling(logits_bV, uniform_b)
        token_Gb, logprob_Gb, eos_Gb = (_grouped(x, row_Gb.shape[0]) for x in drawn)
        ended_Gb = eos_Gb | (t_Gb + 1 >= _take(self.limit_GN, row_Gb))
        return dataclasses.replace(
            slots,
            row_GB=_put(slots.row_GB, slot_Gb, jnp.where(ended_Gb, self.rows, row_Gb)),
            t_GB=_put(slots.t_GB, slot_Gb, t_Gb + 1),
            token_GB=_put(slots.token_GB, slot_Gb, token_Gb),
            response_GNT=_put(slots.response_GNT, (row_Gb, t_Gb), token_Gb),
            logprobs_GNT=_put(slots.logprobs_GNT, (row_Gb, t_Gb), logprob_Gb),
            length_GN=_put(slots.length_GN, row_Gb, t_Gb + 1),
            ended_GN=_put(slots.ended_GN, row_Gb, eos_Gb),
        )


def continuous(
    decoder: Decoder,
    params: Any,
    prompts: Prompts,
    key: jax.Array,
    limit_B: jax.Array,
    sampling: Sampling,
    response_length: int,
    *,
    samples: int,
    slots: int,
) -> tuple[Rollout, Work]:
    """`samples` responses to each prompt through `slots` slots of each group, and how well they were used."""
    rows, groups = prompts.repeat(samples), batch_shards()
    queue = _Queue(
        decoder=decoder,
        params=params,
        key=key,
        sampling=sampling,
        prompts=jax.tree.map(lambda x: _grouped(x, groups), prompts),
        row_GN=_grouped(rows.row_B, groups),
        limit_GN=_grouped(limit_B, groups),
        samples=samples,
        slots=slots,
        response_length=response_length,
    )
    end = jax.lax.while_loop(queue.working, queue.step, queue.empty_slots())
    found = (end.response_GNT, end.logprobs_GNT, end.length_GN, end.ended_GN)
    return Rollout.of(rows, *(_flat(x) for x in found)), end.work


def _grouped(x_B, groups: int):
    """[G * B, ...] as [G, B, ...]."""
    return constrain_rows(x_B.reshape(groups, -1, *x_B.shape[1:]))


def _flat(x_GB):
    """[G, B, ...] as [G * B, ...]."""
    return constrain_rows(x_GB.reshape(-1, *x_GB.shape[2:]))


def _take(x_GN, index_Gb):
    """x[g, index[g]] for each group; anything where there is no such row."""
    return jax.vmap(lambda x, index: jnp.take(x, index, axis=0, mode="clip"))(x_GN, index_Gb)


def _put(x_GN, index_Gb, values_Gb):
    """x with x[g, index[g]] = values[g]; nothing where there is no such row."""
    return jax.vmap(lambda x, index, values: x.at[index].set(values, mode="drop"))(x_GN, index_Gb, values_Gb)


def _empty(leaf: jax.ShapeDtypeStruct):
    zeros = jnp.zeros(leaf.shape, leaf.dtype)
    return constrain_rows(zeros) if leaf.ndim else zeros

"""Sampling responses under one jit: all rows at once, or a queue of rows through fewer slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from rlhf_jax.rollout.continuous import continuous
from rlhf_jax.rollout.decoder import Decoder, repeat_rows
from rlhf_jax.rollout.sampling import Sampling, row_uniforms
from rlhf_jax.sharding.rules import batch_shards
from rlhf_jax.types import Prompts, Rollout


def generate(
    decoder: Decoder,
    params: Any,
    prompts: Prompts,
    key: jax.Array,
    limit_B: jax.Array | None = None,
    *,
    response_length: int,
    eos_ids: Sequence[int],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    samples: int = 1,
    slots: int | None = None,
) -> Rollout:
    """`samples` responses to each prompt.

    Row b's token at position t depends on its prompt, on `key`, on the row's number and on t, not on the
    rest of the batch, nor on `slots`. Which responses were truncated is known from the loop, not from ids.

    Args:
      prompts: padded on the left.   key: a typed key; one for each rollout.
      limit_B: the longest response of each row, from 1 to response_length; none: response_length.
      eos_ids: the ids that end a response.
      samples: the responses to prompt b are rows b * samples, b * samples + 1, ..., and draw from the streams
        `prompts.row_B[b] * samples`, ...; the prompt's keys and values are computed once.
      slots: rows that are generated at once, over all devices; whenever some end, waiting ones take their
        place. None, or as many as there are rows: all at once, until the longest has ended.
    """
    rows = prompts.tokens_BP.shape[0] * samples
    sampling = Sampling(tuple(eos_ids), temperature, top_k, top_p)
    if limit_B is None:
        limit_B = jnp.full((rows,), response_length, jnp.int32)
    common = decoder, params, prompts, key, limit_B, sampling, response_length
    groups = batch_shards()
    group_slots = rows if slots is None else max(-(-slots // groups), samples)
    if group_slots * groups >= rows:
        return at_once(*common, samples=samples)
    return continuous(*common, samples=samples, slots=group_slots)[0]


@struct.dataclass
class _Loop:
    t: jax.Array  # the response position that is written next
    token_B: jax.Array
    live_B: jax.Array
    cache: Any
    response_BT: jax.Array
    logprobs_BT: jax.Array
    length_B: jax.Array
    ended_B: jax.Array  # by an EOS


def at_once(
    decoder: Decoder,
    params: Any,
    prompts: Prompts,
    key: jax.Array,
    limit_B: jax.Array,
    sampling: Sampling,
    response_length: int,
    *,
    samples: int,
) -> Rollout:
    """`generate` with every row in the batch from the beginning; the loop ends with the longest response."""
    P, T = prompts.tokens_BP.shape[1], response_length
    rows = prompts.repeat(samples)
    B = rows.tokens_BP.shape[0]

    def emit(loop: _Loop, logits_BV: jax.Array) -> _Loop:
        token_B, logprob_B, eos_B = sampling(logits_BV, row_uniforms(key, rows.row_B, loop.t))
        live_B, t = loop.live_B, loop.t
        return dataclasses.replace(
            loop,
            t=t + 1,
            token_B=token_B,
            live_B=live_B & ~eos_B & (t + 1 < limit_B),
            response_BT=loop.response_BT.at[:, t].set(jnp.where(live_B, token_B, 0)),
            logprobs_BT=loop.logprobs_BT.at[:, t].set(jnp.where(live_B, logprob_B, 0.0)),
            length_B=loop.length_B + live_B,
            ended_B=loop.ended_B | (live_B & eos_B),
        )

    def step(loop: _Loop) -> _Loop:
        logits_BV, cache = decoder.decode(params, loop.token_B, loop.cache)
        return emit(dataclasses.replace(loop, cache=cache), logits_BV)

    made = decoder.prefill(params, prompts.tokens_BP, prompts.mask_BP, P + T)
    logits_BV, cache = repeat_rows(made, samples)
    start = _Loop(
        t=jnp.int32(0),
        token_B=jnp.zeros(B, jnp.int32),
        live_B=jnp.ones(B, bool),
        cache=cache,
        response_BT=jnp.zeros((B, T), jnp.int32),
        logprobs_BT=jnp.zeros((B, T), jnp.float32),
        length_B=jnp.zeros(B, jnp.int32),
        ended_B=jnp.zeros(B, bool),
    )
    loop = jax.lax.while_loop(lambda loop: loop.live_B.any(), step, emit(start, logits_BV))
    return Rollout.of(rows, loop.response_BT, loop.logprobs_BT, loop.length_B, loop.ended_B)

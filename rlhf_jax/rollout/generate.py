"""Sampling responses: prefill and decode under one jit, stopping when every row has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from rlhf_jax.rollout.sampling import row_uniforms, sample
from rlhf_jax.types import Prompts, Rollout


class Decoder(NamedTuple):
    """What generation needs of a policy, as two pure functions."""

    prefill: Callable[
        ..., Any
    ]  # (params, tokens_BP, mask_BP, cache_length) -> (logits_BV of the last token, cache)
    decode: Callable[..., Any]  # (params, token_B, cache) -> (logits_BV, cache)


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
    slot: jax.Array  # where the next token is written


def recomputing_decoder(model: nn.Module) -> Decoder:
    """Generation for any module with `apply(variables, tokens_BT, mask_BT) -> logits_BTV`.

    Simple, and quadratic in the length.
    """

    def prefill(params, tokens_BP, mask_BP, cache_length):
        room = ((0, 0), (0, cache_length - tokens_BP.shape[1]))
        cache = TokenCache(jnp.pad(tokens_BP, room), jnp.pad(mask_BP, room), jnp.int32(tokens_BP.shape[1]))
        logits_BPV: Any = model.apply({"params": params}, tokens_BP, mask_BP)
        return logits_BPV[:, -1], cache

    def decode(params, token_B, cache):
        tokens_BS = cache.tokens_BS.at[:, cache.slot].set(token_B)
        mask_BS = cache.mask_BS.at[:, cache.slot].set(True)
        logits_BSV: Any = model.apply({"params": params}, tokens_BS, mask_BS)
        return logits_BSV[:, cache.slot], TokenCache(tokens_BS, mask_BS, cache.slot + 1)

    return Decoder(prefill, decode)


@struct.dataclass
class _Loop:
    t: jax.Array  # the response position that is written next
    token_B: jax.Array
    ended_B: jax.Array
    cache: Any
    response_BT: jax.Array
    mask_BT: jax.Array
    logprobs_BT: jax.Array


def generate(
    decoder: Decoder,
    params: Any,
    prompts: Prompts,
    key: jax.Array,
    *,
    response_length: int,
    eos_ids: Sequence[int],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Rollout:
    """A response to each prompt.

    Row b's token at position t depends on its prompt, on `key`, on `prompts.row_B[b]` and on t, not on the
    rest of the batch. The loop ends with the longest response. Which responses were truncated is known from
    the loop, not from ids.

    Args:
      prompts: padded on the left.   key: a typed key; one for each rollout.
      eos_ids: the ids that end a response.
    """
    B, P = prompts.tokens_BP.shape
    T = response_length
    eos = jnp.asarray(eos_ids, jnp.int32)

    def emit(loop: _Loop, logits_BV: jax.Array) -> _Loop:
        uniform_B = row_uniforms(key, prompts.row_B, loop.t)
        token_B, logprob_B = sample(logits_BV, uniform_B, temperature=temperature, top_k=top_k, top_p=top_p)
        live_B = ~loop.ended_B
        return dataclasses.replace(
            loop,
            t=loop.t + 1,
            token_B=token_B,
            ended_B=loop.ended_B | jnp.isin(token_B, eos),
            response_BT=loop.response_BT.at[:, loop.t].set(jnp.where(live_B, token_B, 0)),
            mask_BT=loop.mask_BT.at[:, loop.t].set(live_B),
            logprobs_BT=loop.logprobs_BT.at[:, loop.t].set(jnp.where(live_B, logprob_B, 0.0)),
        )

    def step(loop: _Loop) -> _Loop:
        logits_BV, cache = decoder.decode(params, loop.token_B, loop.cache)
        return emit(dataclasses.replace(loop, cache=cache), logits_BV)

    logits_BV, cache = decoder.prefill(params, prompts.tokens_BP, prompts.mask_BP, P + T)
    start = _Loop(
        t=jnp.int32(0),
        token_B=jnp.zeros(B, jnp.int32),
        ended_B=jnp.zeros(B, bool),
        cache=cache,
        response_BT=jnp.zeros((B, T), jnp.int32),
        mask_BT=jnp.zeros((B, T), bool),
        logprobs_BT=jnp.zeros((B, T), jnp.float32),
    )
    loop = jax.lax.while_loop(lambda loop: (loop.t < T) & ~loop.ended_B.all(), step, emit(start, logits_BV))
    return Rollout(
        tokens_BS=jnp.concatenate([prompts.tokens_BP, loop.response_BT], axis=1),
        mask_BS=jnp.concatenate([prompts.mask_BP, loop.mask_BT], axis=1),
        mask_BT=loop.mask_BT,
        logprobs_BT=loop.logprobs_BT,
        truncated_B=~loop.ended_B,
    )

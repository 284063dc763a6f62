"""What the policy, the reference, the critic and the reward model say of a rollout.

The token at response position t is predicted at sequence position P + t - 1: its log-probability comes from
the logits there, and its value is the critic's output there, the state before the token.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.losses import chunked_logprobs, entropy_from_logits, token_logprobs
from rlhf_jax.models.packing import Packing, pack_valid, whole_lines
from rlhf_jax.sharding.rules import batch_shards
from rlhf_jax.types import Rollout, Room

CHUNK = 128  # tokens whose logits exist at once on a device; each chunk gathers a sharded unembedding anew


def response_logprobs(
    model: nn.Module, params: Any, rollout: Rollout, *, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy at each response token, under the tempered distribution.

    A model with `hidden` and `unembed` never makes `[B,T,V]` logits; any other module is applied whole.

    Returns:
      (logprobs_BT, entropy_BT), float32; whatever at masked positions.
    """
    T = rollout.mask_BT.shape[1]
    inputs = rollout.tokens_BS[:, :-1], rollout.mask_BS[:, :-1]
    if not (hasattr(model, "hidden") and hasattr(model, "unembed")):
        whole_BSV: Any = model.apply({"params": params}, *inputs)
        logits_BTV = whole_BSV[:, -T:].astype(jnp.float32) / temperature
        return token_logprobs(logits_BTV, rollout.response_BT), entropy_from_logits(logits_BTV)
    inputs = *inputs, *packing_of(inputs[1], rollout.room)
    hidden_BSD: Any = model.apply({"params": params}, *inputs, method="hidden")
    return _rollout_logprobs(model, params, hidden_BSD[:, -T:], rollout, temperature=temperature)


def packing_of(mask_BS: jax.Array, room: Room | None, *, more: int = 0) -> tuple[Packing, ...]:
    """The further argument of a model that leaves padding out; with room for so many tokens more a shard."""
    return () if room is None else (pack_valid(mask_BS, batch_shards(), whole_lines(room.tokens + more)),)


def _rollout_logprobs(
    model: nn.Module, params: Any, hidden_BTD: jax.Array, rollout: Rollout, *, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """(logprobs_BT, entropy_BT) from the hidden states before each response token."""
    if rollout.room is None:
        return hidden_logprobs(model, params, hidden_BTD, rollout.response_BT, temperature=temperature)
    packing = pack_valid(rollout.mask_BT, batch_shards(), rollout.room.responses)
    packed = packing.pack(hidden_BTD), packing.pack(rollout.response_BT)
    found = hidden_logprobs(model, params, *packed, temperature=temperature)
    logprobs_BT, entropy_BT = (packing.unpack(x, len(hidden_BTD)) for x in found)
    return logprobs_BT, entropy_BT


def hidden_logprobs(
    model: nn.Module, params: Any, hidden_BTD: jax.Array, tokens_BT: jax.Array, *, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """(logprobs_BT, entropy_BT) of tokens, from the hidden states before them; CHUNK tokens at once."""

    def unembed(hidden):
        return model.apply({"params": params}, hidden, method="unembed")

    chunk = CHUNK * batch_shards()
    return chunked_logprobs(hidden_BTD, unembed, tokens_BT, temperature=temperature, chunk=chunk)


def response_values(model: nn.Module, params: Any, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """The critic's values.

    Returns:
      (values_BT, final_B): the value before each response token, and after the last valid one.
    """
    packing = packing_of(rollout.mask_BS, rollout.room)
    values_BS: Any = model.apply({"params": params}, rollout.tokens_BS, rollout.mask_BS, *packing)
    return _split_values(values_BS, rollout)


def response_logprobs_and_values(
    model: nn.Module,
    params: Any,
    critic: nn.Module,
    head_params: Any,
    rollout: Rollout,
    *,
    temperature: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What `response_logprobs` and `response_values` give, in one pass where policy and critic share a trunk.

    Args:
      model: with `hidden` and `unembed`.   critic: with `values`, from the policy's hidden states.
    Returns:
      (logprobs_BT, entropy_BT, values_BT, final_B)
    """
    T = rollout.mask_BT.shape[1]
    inputs = rollout.tokens_BS, rollout.mask_BS, *packing_of(rollout.mask_BS, rollout.room)
    hidden_BSD: Any = model.apply({"params": params}, *inputs, method="hidden")
    logprobs_BT, entropy_BT = _rollout_logprobs(
        model, params, hidden_BSD[:, -T - 1 : -1], rollout, temperature=temperature
    )
    values_BS: Any = critic.apply({"params": head_params}, hidden_BSD[:, -T - 1 :], method="values")
    return logprobs_BT, entropy_BT, *_split_values(values_BS, rollout)


def _split_values(values_BS: jax.Array, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """(values_BT, final_B): before each response token, and after the last valid one."""
    T = rollout.mask_BT.shape[1]
    last_B1 = jnp.maximum(rollout.length_B - 1, 0)[:, None]
    final_B = jnp.take_along_axis(values_BS[:, -T:], last_B1, axis=1)[:, 0]
    return values_BS[:, -T - 1 : -1], final_B


def with_final_eos(rollout: Rollout, eos_id: int) -> tuple[jax.Array, jax.Array]:
    """Prompt and response as a causal reward model reads them: ended by its EOS.

    The EOS is appended to a truncated response, and stands in for another EOS id of the policy, which the
    reward model never saw at the end of a text.

    Returns:
      (tokens_BS, mask_BS) one column wider than the rollout.
    """
    P = rollout.tokens_BS.shape[1] - rollout.mask_BT.shape[1]
    S = rollout.tokens_BS.shape[1] + 1
    position_1S = jnp.arange(S)[None, :]
    end_B1 = P + rollout.length_B[:, None]
    last_BS = position_1S == jnp.where(rollout.truncated_B[:, None], end_B1, end_B1 - 1)
    tokens_BS = jnp.where(last_BS, eos_id, jnp.pad(rollout.tokens_BS, ((0, 0), (0, 1))))
    return tokens_BS, jnp.pad(rollout.mask_BS, ((0, 0), (0, 1))) | last_BS

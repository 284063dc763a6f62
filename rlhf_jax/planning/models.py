"""The modules of a job by shapes alone: no weights, no tokenizer, no data."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from rlhf_jax.errors import InputError
from rlhf_jax.models.configs import EncoderConfig, check_length, shape_config
from rlhf_jax.models.huggingface import open_model
from rlhf_jax.models.lora import with_adapters
from rlhf_jax.models.parameters import build_model, shapes
from rlhf_jax.settings import Config, Lora
from rlhf_jax.trainers.roles import NEW, POLICY


@dataclasses.dataclass(frozen=True)
class Described:
    """A module and its parameters as ShapeDtypeStructs."""

    module: nn.Module
    shapes: Any


def describe_policy(config: Config) -> Described:
    """A fresh model has the vocabulary that policy.shape asks for, of which its tokenizer may fall short."""
    policy = config.policy
    if policy.model == NEW:
        module = build_model(shape_config(policy.shape), head="lm", dtype=policy.dtype)
        return _described(module.clone(remat=policy.remat))
    described = _read(policy.model, "lm", policy.dtype)
    length = config.rollout.prompt_length + config.rollout.response_length
    what = f"policy.model={policy.model}: rollout.prompt_length + rollout.response_length"
    check_length(described.module.config, length, what)
    return dataclasses.replace(described, module=described.module.clone(remat=policy.remat))


def describe_reward(config: Config, policy: Described) -> Described | None:
    """The trained reward model, by the shape of its backbone; None where a function takes its place."""
    reward = config.reward
    if reward.function is not None:
        return None
    if reward.model == POLICY:
        dtype = jnp.dtype(reward.dtype)
        return _described(policy.module.clone(head="score", dtype=dtype))
    if reward.model == NEW:
        shape = dataclasses.replace(reward.shape, vocab_size=policy.module.config.vocab_size)
        return _described(build_model(shape_config(shape), head="score", dtype=reward.dtype))
    return _read(reward.model, "score", reward.dtype)


def describe_critic(config: Config, policy: Described, reward: Described | None) -> Described:
    """The value function, by critic.init."""
    init, remat = config.critic.init, policy.module.remat
    if init == POLICY:
        whole = _described(policy.module.clone(head="value"))
        return Described(whole.module, {"head": whole.shapes["head"]}) if config.critic.shared else whole
    if init != "reward":
        described = _read(init, "value", policy.module.dtype)
        return dataclasses.replace(described, module=described.module.clone(remat=remat))
    if reward is None or isinstance(reward.module.config, EncoderConfig):
        kind = "a function" if reward is None else "an encoder, which sees the future"
        raise InputError(f"critic.init=reward: the reward model is {kind}; use critic.init=policy")
    return _described(reward.module.clone(head="value", remat=remat))


def adapted(described: Described, lora: Lora) -> Described:
    """The module with the adapters that learn in its place; rank 0: the module itself."""
    return described if lora.rank == 0 else _described(with_adapters(described.module, lora))


def _described(module: nn.Module) -> Described:
    return Described(module, shapes(module))


def _read(name: str, head: str, dtype: Any) -> Described:
    module, weights = open_model(name, head=head, dtype=dtype)
    return Described(module, weights.shapes)

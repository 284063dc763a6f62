"""A critic that is a value head on the policy's trunk: one pass judges a rollout, one teaches both.

Policy and head keep states of their own, with their own learning rates and gradient norms, so that the
policy's parameters are the same tree with and without a shared critic.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from rlhf_jax.errors import InputError
from rlhf_jax.models.lora import join
from rlhf_jax.rollout.rooms import packed
from rlhf_jax.rollout.score import response_logprobs_and_values
from rlhf_jax.settings import Config
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.rules import in_view
from rlhf_jax.trainers.optimizer import (
    Gradient,
    Learning,
    Loss,
    Metrics,
    TrainState,
    accumulate,
    apply_gradients,
    state_update,
    value_and_gradient,
)
from rlhf_jax.trainers.ppo import joint_loss, minibatch_order, passes, value_loss
from rlhf_jax.types import Rollout


@struct.dataclass
class Pair:
    """Policy and value head, which take their steps together."""

    actor: TrainState
    critic: TrainState

    @property
    def steps(self) -> jax.Array:
        return self.actor.steps


@dataclasses.dataclass(frozen=True)
class SharedSteps:
    """What takes the place of separate passes. `policy` are the actor's parameters, `head` the critic's.

    Where the actor's state is of adapters alone, `base` is what they lie beside.
    """

    judge: Callable[[Any, Any, Rollout], Any]  # (policy, head, rollout) -> logprobs_BT or None, values, final
    update: Callable[..., Any]  # (pair, experience, kl_coef, key, base) -> (pair, metrics of both)
    update_head: Callable[..., Any]  # (state of the head, policy, experience, key) -> (state, metrics)


def make_shared_steps(
    config: Config,
    view: View,
    model: nn.Module,
    critic: nn.Module,
    actor: Learning,
    head: Learning,
    *,
    recomputes: bool,
) -> SharedSteps:
    """Jitted functions for a policy and the value head that reads its hidden states.

    With `recomputes`, judging gives log-probabilities beside the values; without, None.

    Raises:
      InputError: modules without the methods that this needs.
    """
    for module, names in ((model, ("hidden", "unembed")), (critic, ("values",))):
        for name in names:
            if not hasattr(module, name):
                raise InputError(
                    f"critic.shared=true needs a method `{name}` of {type(module).__name__}; add it, or use "
                    "critic.shared=false"
                )
    both, offload = _Both(config, model, critic, actor, head), config.placement.offload.optimizer

    def judge(policy, head_params, rollout):
        logprobs_BT, _, *values = both.judge(policy, head_params, rollout)
        return logprobs_BT if recomputes else None, *values

    return SharedSteps(
        judge=in_view(view, packed(judge) if config.ppo.packing else judge),
        update=state_update(both.update, view, Pair(actor.places, head.places), offload=offload),
        update_head=state_update(both.update_head, view, head.places, offload=offload),
    )


@dataclasses.dataclass(frozen=True)
class _Both:
    """Two roles that read one trunk."""

    config: Config
    model: nn.Module
    critic: nn.Module
    actor: Learning
    head: Learning

    def judge(self, policy: Any, head_params: Any, rollout: Rollout) -> tuple[jax.Array, ...]:
        return response_logprobs_and_values(
            self.model, policy, self.critic, head_params, rollout, temperature=self.config.rollout.temperature
        )

    def order(self, key: jax.Array) -> jax.Array:
        ppo = self.config.ppo
        return minibatch_order(key, ppo.batch_size, epochs=ppo.epochs, minibatches=ppo.minibatches)

    def update(self, pair: Pair, experience, kl_coef, key, base=None) -> tuple[Pair, dict[str, Any]]:
        config, ppo = self.config, self.config.ppo
        loss = functools.partial(
            joint_loss,
            kl_coef=kl_coef,
            coef=config.critic.coef,
            model=self.model,
            critic=self.critic,
            ppo=ppo,
            temperature=config.rollout.temperature,
        )

        def on_trunk(params, *args, **options):
            return loss((join(base, params[0]), params[1]), *args, **options)

        rates = {
            "actor/lr": self.actor.rate(pair.actor.steps),
            "critic/lr": self.head.rate(pair.critic.steps),
        }
        pair, metrics = passes(
            (self.actor.tx, self.head.tx),
            on_trunk,
            pair,
            experience,
            self.order(key),
            ppo=ppo,
            stop_kl=ppo.stop_kl,
            update=joint_step,
        )
        return pair, _by_role(metrics) | rates | _bad_steps(actor=pair.actor, critic=pair.critic)

    def update_head(self, state: TrainState, policy, experience, key) -> tuple[TrainState, dict[str, Any]]:
        ppo = self.config.ppo

        def loss(params, experience, *, denominator):
            _, _, values_BT, _ = self.judge(policy, params, experience.rollout)
            return value_loss(values_BT, experience, ppo=ppo, denominator=denominator)

        rate = {"critic/lr": self.head.rate(state.steps)}
        state, metrics = passes(self.head.tx, loss, state, experience, self.order(key), ppo=ppo)
        metrics = {f"critic/{name}": number for name, number in metrics.items() if name != "loss"}
        return state, metrics | rate | _bad_steps(critic=state)


def joint_step(
    txs: tuple[optax.GradientTransformationExtraArgs, optax.GradientTransformationExtraArgs],
    loss: Loss,
    pair: Pair,
    batch: Any,
    micro_batch_size: int | None = None,
    gradient: Gradient = value_and_gradient,
) -> tuple[Pair, Metrics]:
    """As `update_step`, for the gradient of one loss with respect to both; either both step or neither.

    Returns:
      (pair, metrics): with `grad_norm` of the policy and `vf_grad_norm` of the head.
    """
    params = pair.actor.params, pair.critic.params
    (value, metrics), (grads, head_grads) = accumulate(loss, params, batch, micro_batch_size, gradient)
    norm, head_norm = optax.tree.norm(grads), optax.tree.norm(head_grads)
    good = jnp.isfinite(norm) & jnp.isfinite(head_norm) & jnp.isfinite(value)
    pair = Pair(
        actor=apply_gradients(txs[0], pair.actor, grads, norm, good),
        critic=apply_gradients(txs[1], pair.critic, head_grads, head_norm, good),
    )
    metrics = {**metrics, "loss": value, "grad_norm": norm, "vf_grad_norm": head_norm}
    metrics = {name: jnp.where(good, number, 0.0) for name, number in metrics.items()}
    return pair, {**metrics, "skipped": (~good).astype(jnp.float32)}


def _by_role(metrics: Metrics) -> Metrics:
    """Named as those of separate updates are."""
    both = ("optimizer_steps", "skipped")
    named = {f"critic/{name}": metrics[name] for name in both}
    for name, number in metrics.items():
        role = "critic" if name.startswith("vf_") else "actor"
        named[f"{role}/{name}"] = number
    named["critic/grad_norm"] = named.pop("critic/vf_grad_norm")
    return named


def _bad_steps(**states: TrainState) -> Metrics:
    return {f"{role}/bad_steps": state.bad_steps for role, state in states.items()}

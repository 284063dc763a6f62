"""PPO as pure functions: from a scored rollout to experience, and from experience to better parameters.

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the KL-shaped reward of Ouyang et al. 2022,
https://arxiv.org/abs/2203.02155, section 3.4. The losses themselves are in `rlhf_jax/losses`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from rlhf_jax.losses import (
    gae,
    kl_estimate,
    kl_shaped_rewards,
    masked_mean,
    masked_whiten,
    ppo_policy_loss,
    ppo_value_loss,
)
from rlhf_jax.losses.masked import counts, token_weights, weighted_sum
from rlhf_jax.rollout.score import response_logprobs, response_logprobs_and_values, response_values
from rlhf_jax.settings import Ppo
from rlhf_jax.sharding.rules import take_rows
from rlhf_jax.trainers.optimizer import Metrics, TrainState, update_step, value_and_gradient
from rlhf_jax.trainers.packing import even_order, packed_gradient
from rlhf_jax.types import Rollout


@struct.dataclass
class Learner:
    """All that PPO changes, and all that a resumed run needs beside its settings and its data."""

    actor: TrainState
    critic: TrainState
    kl_coef: jax.Array  # float32
    iteration: jax.Array  # int32, iterations done


@struct.dataclass
class Statistics:
    """What the frozen models say of a rollout; fixed during its passes."""

    scores_B: jax.Array  # standardised
    old_logprobs_BT: jax.Array | None  # of the policy that sampled, recomputed; None: as they were sampled
    ref_logprobs_BT: jax.Array
    values_BT: jax.Array
    final_values_B: jax.Array  # the critic after the last valid token


@struct.dataclass
class Experience:
    """A rollout with its targets: what the two losses read. Every leaf's first axis is B."""

    rollout: Rollout
    old_logprobs_BT: jax.Array
    ref_logprobs_BT: jax.Array
    old_values_BT: jax.Array
    advantages_BT: jax.Array
    returns_BT: jax.Array


def make_experience(
    rollout: Rollout, statistics: Statistics, kl_coef: jax.Array, *, ppo: Ppo
) -> tuple[Experience, Metrics]:
    """Rewards, advantages and returns of a rollout.

    The old log-probabilities are the denominator of the importance ratio, whose expectation is over the
    distribution that was sampled from: those that came with the samples are exact. They are recomputed where
    sampling rounds otherwise than training, so that the ratio begins at 1.
    """
    mask_BT = rollout.mask_BT
    recomputed_BT = statistics.old_logprobs_BT
    old_logprobs_BT = rollout.logprobs_BT if recomputed_BT is None else recomputed_BT
    kl_BT = kl_estimate(old_logprobs_BT, statistics.ref_logprobs_BT, ppo.kl_kind)
    scores_B = statistics.scores_B - ppo.missing_eos_penalty * rollout.truncated_B
    if ppo.reward_clip is not None:
        scores_B = jnp.clip(scores_B, -ppo.reward_clip, ppo.reward_clip)
    rewards_BT = kl_shaped_rewards(scores_B, kl_BT, mask_BT, kl_coef if ppo.kl_placement == "reward" else 0.0)
    bootstrap_B = jnp.where(rollout.truncated_B & ppo.bootstrap_truncated, statistics.final_values_B, 0.0)

    def one(rewards_T, values_T, mask_T, bootstrap_value):
        return gae(rewards_T, values_T, mask_T, gamma=ppo.gamma, lam=ppo.lam, bootstrap_value=bootstrap_value)

    advantages_BT, returns_BT = jax.vmap(one)(rewards_BT, statistics.values_BT, mask_BT, bootstrap_B)
    if ppo.whiten_advantages:
        advantages_BT = masked_whiten(advantages_BT, mask_BT)
    experience = Experience(
        rollout=rollout,
        old_logprobs_BT=old_logprobs_BT,
        ref_logprobs_BT=statistics.ref_logprobs_BT,
        old_values_BT=statistics.values_BT,
        advantages_BT=advantages_BT,
        returns_BT=returns_BT,
    )
    metrics = _rollout_metrics(experience, statistics, rewards_BT)
    if recomputed_BT is not None:
        drift_BT = jnp.where(mask_BT, jnp.abs(rollout.logprobs_BT - recomputed_BT), 0.0)
        metrics["rollout/logprob_diff_max"] = drift_BT.max()
    return experience, metrics


def _rollout_metrics(experience: Experience, statistics: Statistics, rewards_BT: jax.Array) -> Metrics:
    """Metrics of the policy that sampled. Sums a response are averaged over the responses."""
    rollout, returns_BT = experience.rollout, experience.returns_BT
    mask_BT = rollout.mask_BT

    def per_response(x_BT):
        return jnp.where(mask_BT, x_BT, 0.0).sum(-1).mean()

    def variance(x_BT):
        return masked_mean((x_BT - masked_mean(x_BT, mask_BT)) ** 2, mask_BT)

    k1_BT = kl_estimate(experience.old_logprobs_BT, statistics.ref_logprobs_BT, "k1")
    k3_BT = kl_estimate(experience.old_logprobs_BT, statistics.ref_logprobs_BT, "k3")
    unexplained = variance(returns_BT - statistics.values_BT) / jnp.maximum(variance(returns_BT), 1e-8)
    return {
        "reward/score_mean": statistics.scores_B.mean(),
        "reward/score_std": statistics.scores_B.std(),
        "reward/kl": per_response(k1_BT),
        "reward/kl_k3": per_response(k3_BT),
        "reward/total_mean": per_response(rewards_BT),
        "critic/vf_explained_var": 1.0 - unexplained,
        "response_length/mean": rollout.length_B.astype(jnp.float32).mean(),
        "response_length/clip_ratio": rollout.truncated_B.astype(jnp.float32).mean(),
    }


def actor_loss(
    params: Any,
    experience: Experience,
    *,
    kl_coef: jax.Array,
    model: nn.Module,
    ppo: Ppo,
    temperature: float,
    denominator: dict[str, jax.Array],
) -> tuple[jax.Array, Metrics]:
    """Policy loss - entropy_coef * entropy (+ kl_coef * KL if placed in the loss), a sum over rows."""
    logprobs_BT, entropy_BT = response_logprobs(model, params, experience.rollout, temperature=temperature)
    return policy_loss(logprobs_BT, entropy_BT, experience, kl_coef=kl_coef, ppo=ppo, denominator=denominator)


def policy_loss(
    logprobs_BT: jax.Array,
    entropy_BT: jax.Array,
    experience: Experience,
    *,
    kl_coef: jax.Array,
    ppo: Ppo,
    denominator: dict[str, jax.Array],
) -> tuple[jax.Array, Metrics]:
    """`actor_loss` from its model's log-probabilities and entropies."""
    mask_BT = experience.rollout.mask_BT
    loss, metrics = ppo_policy_loss(
        logprobs_BT,
        experience.old_logprobs_BT,
        experience.advantages_BT,
        mask_BT,
        clip_low=ppo.clip_low,
        clip_high=ppo.clip_high,
        dual_clip=ppo.dual_clip,
        aggregation=ppo.aggregation,
        denominator=denominator,
    )
    weights_BT = token_weights(mask_BT, "token_mean", **denominator, dtype=logprobs_BT.dtype)
    metrics = {**metrics, "pg_loss": loss, "entropy": weighted_sum(entropy_BT, weights_BT)}
    if ppo.entropy_coef:  # without, its gradient would be computed and multiplied by 0
        loss = loss - ppo.entropy_coef * metrics["entropy"]
    if ppo.kl_placement == "loss":
        kl_BT = kl_estimate(logprobs_BT, experience.ref_logprobs_BT, ppo.kl_kind)
        metrics["kl_loss"] = weighted_sum(kl_BT, weights_BT)
        loss = loss + kl_coef * metrics["kl_loss"]
    return loss, metrics


def critic_loss(
    params: Any, experience: Experience, *, model: nn.Module, ppo: Ppo, denominator: dict[str, jax.Array]
) -> tuple[jax.Array, Metrics]:
    """Clipped value loss, a sum over rows."""
    values_BT, _ = response_values(model, params, experience.rollout)
    return value_loss(values_BT, experience, ppo=ppo, denominator=denominator)


def value_loss(
    values_BT: jax.Array, experience: Experience, *, ppo: Ppo, denominator: dict[str, jax.Array]
) -> tuple[jax.Array, Metrics]:
    """`critic_loss` from its model's values."""
    loss, metrics = ppo_value_loss(
        values_BT,
        experience.old_values_BT,
        experience.returns_BT,
        experience.rollout.mask_BT,
        clip=ppo.value_clip,
        aggregation=ppo.aggregation,
        denominator=denominator,
    )
    return loss, {**metrics, "vf_loss": loss}


def joint_loss(
    params: tuple[Any, Any],
    experience: Experience,
    *,
    kl_coef: jax.Array,
    coef: float,
    model: nn.Module,
    critic: nn.Module,
    ppo: Ppo,
    temperature: float,
    denominator: dict[str, jax.Array],
) -> tuple[jax.Array, Metrics]:
    """`actor_loss` + coef * `critic_loss` of a policy whose trunk is the critic's too, in one pass.

    Args:
      params: (the policy's, the value head's).
    """
    logprobs_BT, entropy_BT, values_BT, _ = response_logprobs_and_values(
        model, params[0], critic, params[1], experience.rollout, temperature=temperature
    )
    policy, metrics = policy_loss(
        logprobs_BT, entropy_BT, experience, kl_coef=kl_coef, ppo=ppo, denominator=denominator
    )
    value, value_metrics = value_loss(values_BT, experience, ppo=ppo, denominator=denominator)
    return policy + coef * value, metrics | value_metrics


def minibatch_order(key: jax.Array, rows: int, *, epochs: int, minibatches: int) -> jax.Array:
    """Row numbers of each step: [epochs * minibatches, rows / minibatches], a fresh shuffle each epoch."""
    shuffles = jax.vmap(lambda key: jax.random.permutation(key, rows))(jax.random.split(key, epochs))
    return shuffles.reshape(epochs * minibatches, -1)


def passes(
    tx: Any,
    loss: Any,
    state: Any,
    experience: Experience,
    order: jax.Array,
    *,
    ppo: Ppo,
    stop_kl: float | None = None,
    update: Callable[..., tuple[Any, Metrics]] = update_step,
) -> tuple[Any, Metrics]:
    """One optimizer step for each row of `order`.

    Once a step's `ppo_kl` is above `stop_kl` the remaining ones are skipped.

    Args:
      tx, state: the optimizer and the TrainState, or whatever `update` steps in their place.
      loss: (params, minibatch, denominator=) -> (loss, metrics), sums over rows.
      ppo: of it `micro_batch_size` and `packing`.
    Returns:
      (state, metrics): means over the steps that were taken, and `optimizer_steps`, `skipped` as counts.
    """
    gradient = packed_gradient if ppo.packing else value_and_gradient

    def step(carry, rows_b):
        state, stopped = carry
        if ppo.packing:
            lengths_b = experience.rollout.mask_BS[rows_b].sum(-1)
            rows_b = rows_b[even_order(lengths_b, len(rows_b) // (ppo.micro_batch_size or len(rows_b)))]
        minibatch = take_rows(experience, rows_b)
        whole = functools.partial(loss, denominator=counts(minibatch.rollout.mask_BT))

        def take(state):
            return update(tx, whole, state, minibatch, ppo.micro_batch_size, gradient)

        if stop_kl is None:
            state, metrics = take(state)
            return (state, stopped), metrics
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(take, state)[1])
        state, metrics = jax.lax.cond(stopped, lambda state: (state, nothing), take, state)
        return (state, stopped | (metrics["ppo_kl"] > stop_kl)), metrics

    before = state.steps
    (state, _), metrics = jax.lax.scan(step, (state, jnp.bool_(False)), order)
    taken = state.steps - before
    skipped = metrics.pop("skipped").sum()
    means = {name: number.sum() / jnp.maximum(taken, 1) for name, number in metrics.items()}
    return state, {**means, "optimizer_steps": taken, "skipped": skipped}

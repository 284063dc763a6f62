"""Puts a PPO run together: policy, reference, critic, scorer, evaluator."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.data.messages import Dialogue
from rlhf_jax.models.flops import forward_flops
from rlhf_jax.models.lora import frozen, learnt
from rlhf_jax.models.parameters import like
from rlhf_jax.rollout.reward_function import RewardFunction
from rlhf_jax.rollout.reward_model import RewardModel, Scale, scale_of
from rlhf_jax.rollout.scored import Scorer
from rlhf_jax.settings import Config
from rlhf_jax.sharding.offload import to_host
from rlhf_jax.sharding.placement import Views
from rlhf_jax.trainers.evaluate import Evaluator
from rlhf_jax.trainers.inputs import Gold
from rlhf_jax.trainers.ppo import Learner
from rlhf_jax.trainers.ppo_steps import make_policy_steps, make_ppo_steps, recomputes_old_logprobs
from rlhf_jax.trainers.ppo_task import Bases, PpoTask
from rlhf_jax.trainers.roles import POLICY, LoadedModel, adapted, load_critic, place, same_rendering

log = logging.getLogger("rlhf_jax")

SCALE_SAMPLES = 128  # responses of the reference on which the scale is measured


def scorer_of(config: Config, reward: LoadedModel | None, policy: LoadedModel, views: Views) -> Scorer:
    """The reward model, or the Python function that takes its place."""
    if reward is None:
        settings = config.reward
        return RewardFunction(settings.function or "", retries=settings.retries, timeout=settings.timeout)
    params = reward.place(views.reward)
    return RewardModel(
        reward.model,
        to_host(params) if config.placement.offload.reward else params,
        reward.renderer,
        view=views.reward,
        max_length=config.reward.max_length,
        batch_size=config.ppo.batch_size,
        reads_rollouts=same_rendering(policy.renderer, reward.renderer),
        packing=config.ppo.packing,
    )


def make_evaluator(
    config: Config, policy: LoadedModel, scorer: Scorer, scale: Scale, views: Views, gold: Gold | None
) -> Evaluator:
    """Samples and scores responses to held-out prompts; its reference is `policy`."""
    steps = make_policy_steps(config, views, policy.model, policy.shapes, policy.renderer.eos_ids)
    params = policy.place(views.reference)
    return Evaluator(
        steps=steps,
        reference_params=to_host(params) if config.placement.offload.reference else params,
        renderer=policy.renderer,
        scorer=scorer,
        scale=scale,
        fallback=config.reward.fallback,
        gold=gold,
        settings=config.eval,
        prompt_length=config.rollout.prompt_length,
        key=jax.random.fold_in(jax.random.key(config.run.seed), EVALUATION_STREAM),
    )


EVALUATION_STREAM = 2**31 - 1  # no iteration has this number, so that no rollout shares the evaluation's key


def measure_scale(evaluator: Evaluator, prompts: Sequence[Dialogue]) -> Scale:
    """The scale on which the reference policy's samples on `prompts` score with mean 0 and variance 1."""
    raw = dataclasses.replace(evaluator, scale=Scale(), fallback=None, gold=None)
    params = place(evaluator.steps.model, evaluator.reference_params, evaluator.steps.views.train)
    responses = raw(params, prompts[:SCALE_SAMPLES])
    scale = scale_of(np.array([r.score for r in responses]))
    log.info(
        "reward scale from %d reference responses: gain %.4g, bias %.4g",
        len(responses),
        scale.gain,
        scale.bias,
    )
    return scale


def make_ppo_task(
    config: Config,
    views: Views,
    policy: LoadedModel,
    reward: LoadedModel | None,
    evaluator: Evaluator,
    prompts: Sequence[Dialogue],
    held_out: Sequence[Dialogue],
    save_policy: Callable[[Any, int], None],
    critic: LoadedModel | None = None,
) -> tuple[PpoTask, Callable[[], Learner]]:
    """The task, and a function that makes its first learner. No critic: by critic.init."""
    if config.rollout.top_k > 0 or config.rollout.top_p < 1:
        log.warning(
            "rollout.top_k=%d and rollout.top_p=%g cut the distribution that responses are sampled from, and "
            "log-probabilities are those of the whole one: PPO's importance ratios and the KL are biased; "
            "use rollout.top_k=0 rollout.top_p=1",
            config.rollout.top_k,
            config.rollout.top_p,
        )
    critic = critic or load_critic(config.critic, policy, reward, config.run.seed)
    actor = adapted(policy, config.lora, config.run.seed)
    if not config.critic.shared:
        critic = adapted(critic, config.lora, config.run.seed + 1)
    steps = make_ppo_steps(config, evaluator.steps, critic.model, critic.shapes)
    task = PpoTask(
        config=config,
        views=views,
        steps=steps,
        evaluator=evaluator,
        prompts=prompts,
        held_out=held_out,
        save_policy=save_policy,
        flops=iteration_flops(config, policy.model, critic.model),
        bases=bases_of(
            config,
            views,
            critic.shapes,
            evaluator.reference_params,
            lambda: policy.place(views.train),
            lambda: critic.place(views.critic, frozen),
        ),
    )
    part = learnt if config.lora.rank else lambda tree: tree
    return task, lambda: steps.init_learner(actor.place(views.train, part), critic.place(views.critic, part))


def bases_of(
    config: Config,
    views: Views,
    critic_shapes: Any,
    reference: Any,
    place_policy: Callable[[], Any],
    place_critic: Callable[[], Any],
) -> Bases:
    """The frozen parameters beside adapters: the reference's own leaves wherever these lie as is needed.

    Args:
      reference: the reference's parameters, arrays or shapes.
      place_policy, place_critic: what is frozen of them, where they learn.
    """
    if config.lora.rank == 0:
        return Bases()
    in_place = views.reference == views.train and not config.placement.offload.reference
    actor = reference if in_place else place_policy()
    if config.critic.shared:
        return Bases(actor)
    if config.critic.init == POLICY and views.critic == views.train:
        return Bases(actor, like(frozen(critic_shapes), actor))
    return Bases(actor, place_critic())


def iteration_flops(
    config: Config, actor: Any, critic: Any
) -> Callable[[np.ndarray, np.ndarray], float] | None:
    """Model FLOPs of an iteration as a function of prompt and response lengths [B]; None for unknown modules.

    Generation, reference log-probabilities and, where they are recomputed, old ones are one forward pass of
    the actor each, values one of the critic; each epoch is a forward and a backward pass, three forward
    passes' worth, of both. A critic on the policy's trunk has no passes of its own but for values where
    nothing is recomputed. The reward model is not counted.
    """
    if not (hasattr(actor, "config") and hasattr(critic, "config")):
        return None
    passes = 3 * config.ppo.epochs
    recomputes = recomputes_old_logprobs(config, actor)
    scoring = 3 if recomputes else 2
    critic_passes = int(not recomputes) if config.critic.shared else 1 + passes

    def flops(prompt_lengths_B: np.ndarray, lengths_B: np.ndarray) -> float:
        whole_B = prompt_lengths_B + lengths_B
        actor_flops = forward_flops(actor.config, whole_B, unembed_positions=int(lengths_B.sum()))
        critic_flops = critic_passes * forward_flops(critic.config, whole_B)
        return float((scoring + passes) * actor_flops + critic_flops)

    return flops

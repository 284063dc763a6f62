"""The programs of a PPO iteration, as the trainer makes them, with shapes in place of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.checks import check_devices
from rlhf_jax.models.lora import frozen, join
from rlhf_jax.planning.models import Described, adapted, describe_critic, describe_policy, describe_reward
from rlhf_jax.settings import Config
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.offload import check_offload
from rlhf_jax.sharding.placement import make_views, placed_shapes
from rlhf_jax.sharding.rules import batch_sharding, in_view, replicated
from rlhf_jax.trainers.optimizer import TrainState
from rlhf_jax.trainers.ppo import Statistics
from rlhf_jax.trainers.ppo_setup import bases_of, iteration_flops
from rlhf_jax.trainers.ppo_steps import (
    PpoSteps,
    make_policy_steps,
    make_ppo_steps,
    recomputes_old_logprobs,
)
from rlhf_jax.trainers.ppo_task import Bases
from rlhf_jax.trainers.roles import shardings_of
from rlhf_jax.trainers.shared_critic import Pair
from rlhf_jax.types import Prompts, Rollout

SHAPE: Any = jax.ShapeDtypeStruct  # stands where records expect arrays
EOS_IDS = (0,)  # any: which ids end a response changes no shape


@dataclasses.dataclass(frozen=True)
class Program:
    """A part of an iteration. `lower` gives the computations that it consists of and how often each runs."""

    name: str
    lower: Callable[[], Sequence[tuple[jax.stages.Lowered, int]]]
    state: Any = ()  # those of its arguments that are resident


@dataclasses.dataclass(frozen=True)
class Job:
    """What PPO keeps on the devices, what it runs, and how much work that is."""

    resident: dict[str, Any]  # by role: what lies there all the time, as ShapeDtypeStructs with shardings
    programs: list[Program]  # in the order of an iteration
    reshard_bytes: int  # that the busiest device receives, counted from the two layouts
    flops: float | None  # of an iteration whose prompts and responses all have full length


def ppo_job(config: Config, devices: Sequence[Any]) -> Job:
    """The PPO phase of a configuration on these devices, which may be those of a topology.

    Raises:
      InputError: a model, a batch or a layout does not fit.
    """
    check_devices(config, len(devices))
    views = make_views(config, devices)
    policy = describe_policy(config)
    reward = describe_reward(config, policy)
    critic = describe_critic(config, policy, reward)
    if not config.critic.shared:
        critic = adapted(critic, config.lora)
    check_offload(config, views)
    policy_steps = make_policy_steps(config, views, policy.module, policy.shapes, EOS_IDS)
    steps = make_ppo_steps(config, policy_steps, critic.module, critic.shapes)
    reference = _placed(policy, views.reference)
    resident = {
        "actor": _resting(config, steps.actor_state),
        "critic": _resting(config, steps.critic_state),
        "reference": () if config.placement.offload.reference else reference,
    }
    bases = bases_of(
        config,
        views,
        critic.shapes,
        reference,
        lambda: _placed(policy, views.train),
        lambda: _placed(critic, views.critic, frozen),
    )
    if config.lora.rank:
        resident["bases"] = _beside(bases, resident["reference"])
    programs = _frozen_programs(config, steps, bases, reference, resident["reference"])
    if reward is not None:
        params = _placed(reward, views.reward)
        resident["reward"] = () if config.placement.offload.reward else params
        programs.append(_score(config, reward, params, resident["reward"], views.reward))
    flops, rows = iteration_flops(config, policy.module, critic.module), np.ones(config.ppo.batch_size, int)
    return Job(
        resident=resident,
        programs=programs + _learning_programs(config, steps, bases, resident),
        reshard_bytes=policy_steps.sampler.reshard.moved_bytes,
        flops=flops and flops(config.rollout.prompt_length * rows, config.rollout.response_length * rows),
    )


def _resting(config: Config, state: TrainState) -> TrainState:
    """What of a state is in the devices' memory between updates."""
    return dataclasses.replace(state, opt_state=()) if config.placement.offload.optimizer else state


def _beside(bases: Bases, reference: Any) -> list[Any]:
    """The leaves of the bases that are not the reference's, each once."""
    known = {id(leaf) for leaf in jax.tree.leaves(reference)}
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves((bases.actor, bases.critic))}
    return [leaf for number, leaf in leaves.items() if number not in known]


def _frozen_programs(
    config: Config, steps: PpoSteps, bases: Bases, reference: Any, resident: Any
) -> list[Program]:
    """From the new actor to what actor, reference and critic say of its responses."""
    policy = steps.policy
    actor = join(bases.actor, steps.actor_state.params)
    critic = join(bases.critic, steps.critic_state.params)
    sampler, views = policy.sampler, policy.views
    rollout, key = rollout_shapes(config, views.train), _key(views.generate)
    prompts = _prompt_shapes(config, views.generate)
    if steps.shared is not None:
        both = actor, critic
        judging = [_once("values", steps.shared.judge, *both, rollout, state=both)]
    else:
        judging = [_once("values", steps.values, critic, rollout, state=critic)]
        if recomputes_old_logprobs(config, policy.model):
            judging.insert(0, _once("old_logprobs", policy.logprobs, actor, rollout, state=actor))
    return [
        Program("reshard", lambda: [(move, times) for _, move, times in sampler.reshard.programs()], actor),
        _once("generate", sampler.generate, sampler.shapes, prompts, key),
        *judging,
        _once("reference_logprobs", policy.reference_logprobs, reference, rollout, state=resident),
    ]


def _score(config: Config, reward: Described, params: Any, resident: Any, view: View) -> Program:
    """The reward model on the longest texts that it may meet."""
    P, T = config.rollout.prompt_length, config.rollout.response_length
    own_text = config.reward.model not in ("new", "policy")
    width = config.reward.max_length if own_text else P + T + 1  # one more for its EOS
    rows = -(-config.ppo.batch_size // view.batch_shards) * view.batch_shards
    tokens = SHAPE((rows, width), jnp.int32, sharding=batch_sharding(view))
    mask = SHAPE((rows, width), jnp.bool_, sharding=batch_sharding(view))
    score = in_view(view, lambda params, tokens, mask: reward.module.apply({"params": params}, tokens, mask))
    return _once("score", score, params, tokens, mask, state=resident)


def _learning_programs(
    config: Config, steps: PpoSteps, bases: Bases, resident: dict[str, Any]
) -> list[Program]:
    """From statistics to new parameters."""
    view = steps.policy.views.train
    rollout, key, rows = rollout_shapes(config, view), _key(view), batch_sharding(view)
    per_token, per_row = rollout.logprobs_BT, SHAPE(rollout.truncated_B.shape, jnp.float32, sharding=rows)
    kl_coef = SHAPE((), jnp.float32, sharding=replicated(view))
    old = per_token if recomputes_old_logprobs(config, steps.policy.model) else None
    statistics = Statistics(per_row, old, per_token, per_token, per_row)
    experience, _ = jax.eval_shape(steps.experience, rollout, statistics, kl_coef)
    experience = placed_shapes(experience, rows)
    actor, critic = steps.actor_state, steps.critic_state
    if steps.shared is not None:
        held = resident["actor"], resident["critic"], bases.actor
        inputs = Pair(actor, critic), experience, kl_coef, key, bases.actor
        return [
            _once("experience", steps.experience, rollout, statistics, kl_coef),
            _once("update_both", steps.shared.update, *inputs, state=held),
        ]
    critic_inputs, critic_held = (critic, experience, key, bases.critic), (resident["critic"], bases.critic)
    actor_inputs, actor_held = (
        (actor, experience, kl_coef, key, bases.actor),
        (resident["actor"], bases.actor),
    )
    return [
        _once("experience", steps.experience, rollout, statistics, kl_coef),
        _once("update_critic", steps.update_critic, *critic_inputs, state=critic_held),
        _once("update_actor", steps.update_actor, *actor_inputs, state=actor_held),
    ]


def _once(name: str, function: Any, *arguments: Any, state: Any = ()) -> Program:
    """One jitted function, which runs once."""
    return Program(name, lambda: [(function.lower(*arguments), 1)], state)


def rollout_shapes(config: Config, view: View) -> Rollout:
    """A rollout in this view."""
    B, T = config.ppo.batch_size, config.rollout.response_length
    S = config.rollout.prompt_length + T
    rollout = Rollout(
        tokens_BS=SHAPE((B, S), jnp.int32),
        mask_BS=SHAPE((B, S), jnp.bool_),
        mask_BT=SHAPE((B, T), jnp.bool_),
        logprobs_BT=SHAPE((B, T), jnp.float32),
        truncated_B=SHAPE((B,), jnp.bool_),
    )
    return placed_shapes(rollout, batch_sharding(view))


def _prompt_shapes(config: Config, view: View) -> Prompts:
    B, P = config.ppo.batch_size, config.rollout.prompt_length
    prompts = Prompts(SHAPE((B, P), jnp.int32), SHAPE((B, P), jnp.bool_), SHAPE((B,), jnp.int32))
    return placed_shapes(prompts, batch_sharding(view))


def _key(view: View) -> jax.ShapeDtypeStruct:
    key = jax.eval_shape(jax.random.key, 0)
    return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated(view))


def _placed(described: Described, view: View, part: Callable[[Any], Any] = lambda tree: tree) -> Any:
    shapes = part(described.shapes)
    return placed_shapes(shapes, shardings_of(described.module, shapes, view))

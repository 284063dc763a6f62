"""PPO for any Flax linen module, with any Python reward; docs/own-policy.md shows how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta

from rlhf_jax.checks import check, check_devices
from rlhf_jax.data.messages import Dialogue
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import MetricsLog
from rlhf_jax.models.weights import ArrayWeights
from rlhf_jax.rollout.reward_function import RewardFunction
from rlhf_jax.rollout.reward_model import Scale
from rlhf_jax.run_directory import open_run
from rlhf_jax.settings import Config
from rlhf_jax.sharding.offload import check_offload
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.sharding.processes import is_primary
from rlhf_jax.trainers.ppo import Learner
from rlhf_jax.trainers.ppo_loop import train_ppo
from rlhf_jax.trainers.ppo_setup import make_evaluator, make_ppo_task
from rlhf_jax.trainers.ppo_task import PpoTask
from rlhf_jax.trainers.roles import LoadedModel
from rlhf_jax.trainers.timing import CompileClock

Reward = Callable[[list[list[dict[str, str]]], list[str]], Sequence[float]]


def own_policy_task(
    config: Config,
    policy: tuple[nn.Module, Any],
    critic: tuple[nn.Module, Any],
    tokenizer: Any,
    reward: Reward,
    prompts: Sequence[Dialogue],
    held_out: Sequence[Dialogue] = (),
    save_policy: Callable[[Any, int], None] = lambda params, step: None,
) -> tuple[PpoTask, Learner]:
    """The task of `train_own_policy` and its first learner, for a loop of one's own over `iterate`."""
    task, first_learner = _task(config, policy, critic, tokenizer, reward, prompts, held_out, save_policy)
    return task, first_learner()


def _task(
    config: Config,
    policy: tuple[nn.Module, Any],
    critic: tuple[nn.Module, Any],
    tokenizer: Any,
    reward: Reward,
    prompts: Sequence[Dialogue],
    held_out: Sequence[Dialogue],
    save_policy: Callable[[Any, int], None],
) -> tuple[PpoTask, Callable[[], Learner]]:
    check(config)
    if config.lora.rank:
        raise InputError(f"lora.rank={config.lora.rank}: modules of your own learn whole; use lora.rank=0")
    if config.eval.every and not held_out:
        raise InputError(
            f"eval.every={config.eval.every} needs held_out prompts; give some or use eval.every=0"
        )
    check_devices(config, jax.device_count(), jax.process_count())
    views = make_views(config)
    check_offload(config, views)
    loaded = _loaded(policy, tokenizer)
    scorer = RewardFunction(reward, retries=config.reward.retries, timeout=config.reward.timeout)
    evaluator = make_evaluator(config, loaded, scorer, Scale(), views, gold=None)
    own_critic = _loaded(critic, tokenizer)
    return make_ppo_task(config, views, loaded, None, evaluator, prompts, held_out, save_policy, own_critic)


def train_own_policy(
    config: Config,
    policy: tuple[nn.Module, Any],
    critic: tuple[nn.Module, Any],
    tokenizer: Any,
    reward: Reward,
    prompts: Sequence[Dialogue],
    held_out: Sequence[Dialogue] = (),
    save_policy: Callable[[Any, int], None] = lambda params, step: None,
) -> Learner:
    """PPO in run.dir: metrics.jsonl and checkpoints, and a run that stopped goes on where it was.

    Args:
      config: `ppo.*`, `critic.*` but critic.init, `rollout.*`, `eval.*`, `health.*`, `placement.*`, `run.*`,
        reward.retries, reward.timeout and reward.fallback apply.
      policy: (module, variables); `apply(variables, tokens_BT, mask_BT)` gives logits_BTV. Its reference too.
      critic: (module, variables); apply gives values_BT.
      tokenizer: of `transformers`, with an EOS token.
      reward: (prompts, responses) -> one finite number a response; it is not standardised.
      prompts: to learn on.
      held_out: to evaluate on; needed where eval.every is above 0.
      save_policy: called with the policy's parameters and the step, whenever an evaluation finds the best so
        far, or at the end where eval.every is 0.
    Returns:
      The learner at the end; `learner.actor.params` are the policy's parameters.
    """
    task, first_learner = _task(config, policy, critic, tokenizer, reward, prompts, held_out, save_policy)
    with (
        open_run(config) as directory,
        MetricsLog(directory.path, tensorboard=config.run.tensorboard, writes=is_primary()) as metrics,
    ):
        return train_ppo(task, directory.path, first_learner, metrics, CompileClock())


def _loaded(own: tuple[nn.Module, Any], tokenizer: Any) -> LoadedModel:
    """A module with its parameters alone, without their axis names, which are read from the module."""
    module, variables = own
    if set(variables) != {"params"}:
        raise InputError(
            f"a module with the variables {sorted(variables)} keeps state; only `params` is carried"
        )
    return LoadedModel(module, ArrayWeights(meta.unbox(variables["params"])), Renderer(tokenizer))

"""What a run needs of its models and its data, checked before anything is created or trained.

Models are described by their configurations and the headers of their files: no weights are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from etils import epath

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.data.messages import Dialogue
from rlhf_jax.data.preferences import Preference
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.errors import InputError
from rlhf_jax.models.configs import check_length
from rlhf_jax.rollout.reward_function import RewardFunction
from rlhf_jax.settings import Config, Reward, Sft
from rlhf_jax.trainers import roles
from rlhf_jax.trainers.inputs import Pairs, PromptSplit
from rlhf_jax.trainers.roles import LoadedModel

ROLLOUT = "rollout.prompt_length + rollout.response_length"


def check_run(
    config: Config,
    phases: Collection[str],
    path: epath.Path,
    pairs: Pairs | None,
    prompts: PromptSplit | None,
) -> None:
    """Raise InputError where a phase would fail for what it is given.

    Args:
      phases: of sft, reward, ppo, eval and export, those that this command is about to do.
      path: the run's directory, which need not exist.
      pairs, prompts: where these phases read them.
    """
    _check_earlier_phases(phases, path)
    training = pairs.train if pairs else ()
    if "sft" in phases:
        policy = roles.load_policy(config.policy, training, config.run.seed)
    else:
        policy = roles.initial_policy(config, path, training)
    if "sft" in phases and pairs is not None:
        what = f"policy.model={config.policy.model}: sft.max_length"
        check_length(policy.model.config, config.sft.max_length, what)
        _check_pairs("sft", config.sft, pairs, policy.renderer, lambda pair: (pair.chosen,))
    if "reward" in phases and pairs is not None:
        reward = roles.load_backbone(config.reward, policy, config.run.seed)
        what = f"reward.model={config.reward.model}: reward.max_length"
        check_length(reward.model.config, config.reward.max_length, what)
        both = lambda pair: (pair.chosen, pair.rejected)  # noqa: E731
        _check_pairs("reward", config.reward, pairs, reward.renderer, both)
    elif prompts is not None:
        reward = roles.trained_reward_model(config, path)
    else:
        return
    if prompts is not None:
        _check_rollouts(config, policy, reward, prompts)
    if prompts is not None and "ppo" in phases and config.ppo.batch_size > len(prompts.train):
        size = f"ppo.batch_size={config.ppo.batch_size}"
        raise InputError(
            f"{size} is larger than the {len(prompts.train)} prompts; lower it or give more data"
        )
    if "ppo" in phases or "export" in phases:
        critic = roles.load_critic(config.critic, policy, reward, config.run.seed)
        check_length(
            critic.model.config, _rollout_length(config), f"critic.init={config.critic.init}: {ROLLOUT}"
        )


def _check_earlier_phases(phases: Collection[str], path: epath.Path) -> None:
    best, checkpoints = path / roles.BEST_POLICY, Checkpoints(path, "ppo", keep=1)
    if "eval" in phases and not roles.is_complete(best):
        raise InputError(f"{best} does not exist; run `rlhf-jax ppo` or `rlhf-jax run` first")
    if "export" in phases and checkpoints.latest_step() is None:
        raise InputError(f"{checkpoints.directory} holds no checkpoint; run `rlhf-jax ppo` first")


def _check_pairs(
    section: str,
    settings: Sft | Reward,
    pairs: Pairs,
    renderer: Renderer,
    responses: Callable[[Preference], Iterable[str]],
) -> None:
    """A batch of training pairs and one held-out pair fit the length. Looks no further than it must."""

    def fitting(given: Sequence[Preference], wanted: int) -> int:
        fits = (
            pair
            for pair in given
            if all(
                renderer.dialogue(pair.prompt, response, settings.max_length) is not None
                for response in responses(pair)
            )
        )
        return sum(1 for _ in itertools.islice(fits, wanted))

    limit = f"{section}.max_length={settings.max_length}"
    found = fitting(pairs.train, settings.batch_size)
    if found < settings.batch_size:
        raise InputError(
            f"{found} of {len(pairs.train)} training pairs fit {limit}, fewer than {section}.batch_size="
            f"{settings.batch_size}; lower the batch size, raise the length or give more data"
        )
    if not fitting(pairs.held_out, 1):
        raise InputError(f"none of {len(pairs.held_out)} held-out pairs fits {limit}; raise it")


def _check_rollouts(
    config: Config, policy: LoadedModel, reward: LoadedModel | None, prompts: PromptSplit
) -> None:
    length = _rollout_length(config)
    check_length(policy.model.config, length, f"policy.model={config.policy.model}: {ROLLOUT}")
    shapes = _one_of_each_shape([*prompts.train, *prompts.held_out])
    for prompt in shapes:
        policy.renderer.prompt(prompt, config.rollout.prompt_length)
    if reward is None:
        RewardFunction(config.reward.function or "")
    elif roles.same_rendering(policy.renderer, reward.renderer):
        what = f"reward.model={config.reward.model}: {ROLLOUT} + 1 for its end-of-sequence token"
        check_length(reward.model.config, length + 1, what)
    else:
        limit = f"reward.max_length={config.reward.max_length}"
        what = f"reward.model={config.reward.model}: reward.max_length"
        check_length(reward.model.config, config.reward.max_length, what)
        if any(reward.renderer.dialogue(prompt, "", config.reward.max_length) is None for prompt in shapes):
            raise InputError(f"{limit} has no room for the markers around a turn; raise it")


def _rollout_length(config: Config) -> int:
    return config.rollout.prompt_length + config.rollout.response_length


def _one_of_each_shape(prompts: Sequence[Dialogue]) -> list[Dialogue]:
    """A prompt for each sequence of roles: what a template refuses, or has no room for, depends on these."""
    by_roles: dict[Any, Dialogue] = {}
    for prompt in prompts:
        by_roles.setdefault(tuple(message.role for message in prompt), prompt)
    return list(by_roles.values())

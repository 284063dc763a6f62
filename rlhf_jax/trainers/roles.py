"""The models of a run: where each comes from, and how it is placed on the devices."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Sharding

from rlhf_jax.data.preferences import Preference
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.errors import InputError
from rlhf_jax.models.configs import shape_config
from rlhf_jax.models.huggingface import eos_token_ids, load_model, load_tokenizer, read_hf_config
from rlhf_jax.models.parameters import build_model, fresh_head, init_model, logical_axes, shapes
from rlhf_jax.settings import Config, Policy, Reward, Shape
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.rules import parameter_shardings, replicated_dimensions
from rlhf_jax.trainers.inputs import texts_of

log = logging.getLogger("rlhf_jax")

NEW, POLICY = "new", "policy"  # values of policy.model and reward.model that are no place
SFT_POLICY, BEST_REWARD_MODEL, BEST_POLICY = "sft_policy", "best_reward_model", "best_policy"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model, its parameters (not placed yet) and how it reads and writes text."""

    model: nn.Module
    params: Any
    renderer: Renderer


def load_policy(
    policy: Policy, pairs: Sequence[Preference], seed: int, *, weights: bool = True
) -> LoadedModel:
    """The policy that a run begins with. For `new`, the tokenizer is trained on the texts of `pairs`.

    Here and below, `weights=False` checks what is there and gives shapes in place of parameters.
    """
    if policy.model != NEW:
        return load_language_model(policy.model, policy, weights=weights)
    tokenizer = train_tokenizer(texts_of(pairs), policy.shape.vocab_size)
    shape = dataclasses.replace(policy.shape, vocab_size=len(tokenizer))
    model, params = _new_model(shape, "lm", policy.dtype, seed, weights)
    return LoadedModel(model.clone(remat=policy.remat), params, Renderer(tokenizer))


def load_language_model(directory: Any, policy: Policy, *, weights: bool = True) -> LoadedModel:
    """A language model from a directory or hub name."""
    model, variables = load_model(directory, head="lm", dtype=policy.dtype, weights=weights)
    return LoadedModel(model.clone(remat=policy.remat), variables["params"], load_renderer(directory))


def initial_policy(
    config: Config, path: epath.Path, pairs: Sequence[Preference], *, weights: bool = True
) -> LoadedModel:
    """The policy that PPO in the run directory `path` begins with, which is its reference too."""
    directory = path / SFT_POLICY
    if config.sft.epochs == 0:
        return load_policy(config.policy, pairs, config.run.seed, weights=weights)
    if not is_complete(directory):
        raise InputError(
            f"sft.epochs={config.sft.epochs} and {directory} does not exist; "
            "run `rlhf-jax sft` first, or set sft.epochs=0"
        )
    return load_language_model(directory, config.policy, weights=weights)


def _new_model(shape: Shape, head: str, dtype: str, seed: int, weights: bool) -> tuple[nn.Module, Any]:
    if weights:
        model, variables = init_model(shape_config(shape), head=head, dtype=dtype, seed=seed)
        return model, variables["params"]
    model = build_model(shape_config(shape), head=head, dtype=dtype)
    return model, shapes(model)


def load_backbone(reward: Reward, policy: LoadedModel, seed: int, *, weights: bool = True) -> LoadedModel:
    """The model that a reward model's training begins with.

    `policy` is the policy's trunk with a fresh head (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155,
    section 3.5); `new` is a fresh model that reads with the policy's tokenizer.
    """
    if reward.model == POLICY:
        model = policy.model.clone(head="score", dtype=jnp.dtype(reward.dtype), remat=False)
        params = with_fresh_head(model, policy.params, seed + 1) if weights else shapes(model)
        return LoadedModel(model, params, policy.renderer)
    if reward.model != NEW:
        model, variables = load_model(
            reward.model, head="score", dtype=reward.dtype, seed=seed, weights=weights
        )
        return LoadedModel(model, variables["params"], load_renderer(reward.model))
    shape = dataclasses.replace(reward.shape, vocab_size=len(policy.renderer.tokenizer))
    model, params = _new_model(shape, "score", reward.dtype, seed + 1, weights)
    return LoadedModel(model, params, policy.renderer)


def with_fresh_head(model: nn.Module, params: Any, seed: int) -> dict[str, Any]:
    """Parameters for `model`, whose head is scalar: the trunk of other parameters and a seeded head."""
    trunk = {name: params[name] for name in shapes(model) if name != "head"}
    return {**trunk, "head": fresh_head(model, seed)}


def reward_directory(config: Config, path: epath.Path) -> str:
    """The run's own reward model where it trained one, else what reward.model says, to the letter."""
    own = path / BEST_REWARD_MODEL
    return str(own) if is_complete(own) else config.reward.model


def trained_reward_model(config: Config, path: epath.Path, *, weights: bool = True) -> LoadedModel | None:
    """The reward model of the run directory `path`; None where a function takes its place."""
    if config.reward.function is not None:
        return None
    return load_reward_model(reward_directory(config, path), config.reward.dtype, weights=weights)


def load_reward_model(directory: str, dtype: str, *, weights: bool = True) -> LoadedModel:
    """A trained reward model.

    Raises:
      InputError: the model is only a backbone, whose head would be random.
    """
    if directory in (NEW, POLICY):
        raise InputError(
            f"reward.model={directory} is not trained; run `rlhf-jax reward` first, or give the "
            "best_reward_model of such a run"
        )
    architectures = read_hf_config(directory).get("architectures") or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise InputError(
            f"reward.model={directory} is {', '.join(architectures) or 'of no named architecture'}, "
            "which has no trained score head; train one with `rlhf-jax reward` and give its best_reward_model"
        )
    model, variables = load_model(directory, head="score", dtype=dtype, head_required=True, weights=weights)
    return LoadedModel(model, variables["params"], load_renderer(directory))


def load_critic(
    init: str, policy: LoadedModel, reward: LoadedModel | None, seed: int, *, weights: bool = True
) -> tuple[nn.Module, Any]:
    """(model, params) of the critic: the policy's trunk and a fresh head, the reward model, or a place."""
    if init == POLICY:
        critic = policy.model.clone(head="value")
        return critic, with_fresh_head(critic, policy.params, seed) if weights else shapes(critic)
    if init != "reward":
        model, variables = load_model(
            init, head="value", dtype=policy.model.dtype, seed=seed, weights=weights
        )
        _check_reads_like(policy.renderer, load_renderer(init), f"critic.init={init}")
        return model.clone(remat=policy.model.remat), variables["params"]
    if reward is None or reward.renderer.encoder:
        kind = "a function" if reward is None else "an encoder, which sees the future"
        raise InputError(f"critic.init=reward: the reward model is {kind}; use critic.init=policy")
    _check_reads_like(policy.renderer, reward.renderer, "critic.init=reward")
    return reward.model.clone(head="value", remat=policy.model.remat), reward.params


def _check_reads_like(policy: Renderer, other: Renderer, what: str) -> None:
    if not _same_vocabulary(policy, other):
        sizes = f"{len(policy.tokenizer)} and {len(other.tokenizer)} entries"
        raise InputError(f"{what} has another tokenizer than the policy ({sizes}); use critic.init=policy")


def _same_vocabulary(policy: Renderer, other: Renderer) -> bool:
    """True where the other has every token of the policy; it may have a pad token of its own beside."""
    ours, theirs = policy.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    return ours.items() <= theirs.items() and theirs.keys() - ours.keys() <= {other.tokenizer.pad_token}


def load_renderer(name: str) -> Renderer:
    tokenizer = load_tokenizer(name)
    encoder = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
    return Renderer(tokenizer, None if encoder else eos_token_ids(name, tokenizer))


def same_rendering(policy: Renderer, other: Renderer) -> bool:
    """True where both render every dialogue to the same tokens."""
    return (
        not other.encoder
        and _same_vocabulary(policy, other)
        and policy.tokenizer.chat_template == other.tokenizer.chat_template
        and policy.eos_id == other.eos_id
    )


def shardings_of(model: nn.Module, params: Any, view: View) -> Any:
    """Where each parameter lies in this view.

    A module that names no logical axes is kept whole everywhere.
    """
    axes = logical_axes(model)
    for line in replicated_dimensions(view, axes, params):
        log.debug(line)
    return parameter_shardings(view, axes, params)


def place(model: nn.Module, params: Any, view: View) -> Any:
    """A copy of the parameters on the devices: what one role donates is no other role's."""
    return jax.tree.map(_copy_to, params, shardings_of(model, params, view))


def _copy_to(leaf: Any, sharding: Sharding) -> jax.Array:
    return jnp.copy(
        jax.device_put(leaf, sharding)
    )  # device_put alone gives the same buffer where it need not move


def is_complete(directory: epath.Path) -> bool:
    """True for an exported model; exports are renamed into place when whole."""
    return (directory / "config.json").exists()

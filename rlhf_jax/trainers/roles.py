"""The models of a run: where each comes from, and how it is placed on the devices."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from etils import epath

from rlhf_jax.data.preferences import Preference
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.errors import InputError
from rlhf_jax.models.config_json import names_in
from rlhf_jax.models.configs import shape_config
from rlhf_jax.models.huggingface import eos_token_ids, load_tokenizer, open_model, read_hf_config
from rlhf_jax.models.lora import with_adapters
from rlhf_jax.models.parameters import build_model, flatten, like, logical_axes
from rlhf_jax.models.weights import (
    AdapterWeights,
    ArrayWeights,
    FreshWeights,
    HeadWeights,
    TrunkWeights,
    Weights,
)
from rlhf_jax.settings import Config, Critic, Lora, Policy, Reward, Shape
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.rules import parameter_shardings, replicated_dimensions
from rlhf_jax.trainers.inputs import texts_of

log = logging.getLogger("rlhf_jax")

NEW, POLICY = "new", "policy"  # values of policy.model and reward.model that are no place
SFT_POLICY, BEST_REWARD_MODEL, BEST_POLICY = "sft_policy", "best_reward_model", "best_policy"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model, where its parameters come from, and how it reads and writes text."""

    model: nn.Module
    weights: Weights
    renderer: Renderer

    @property
    def shapes(self) -> Any:
        """The parameters as jax.ShapeDtypeStruct leaves."""
        return self.weights.shapes

    def place(self, view: View, part: Callable[[Any], Any] = lambda tree: tree) -> Any:
        """The parameters, or a part of them, on the devices of this view: new arrays at every call."""
        return self.weights.read(shardings_of(self.model, part(self.shapes), view))


def adapted(loaded: LoadedModel, lora: Lora, seed: int) -> LoadedModel:
    """The model with fresh adapters, which change nothing yet; rank 0: the model itself.

    Raises:
      InputError: it has none of the projections that lora.targets names.
    """
    if lora.rank == 0:
        return loaded
    model = with_adapters(loaded.model, lora)
    weights = AdapterWeights(loaded.weights, FreshWeights(model, seed))
    if set(flatten(weights.shapes)) == set(flatten(loaded.shapes)):
        raise InputError(
            f"lora.targets={lora.targets}: a {model.config.family} model has none of these; name others"
        )
    return LoadedModel(model, weights, loaded.renderer)


def load_policy(policy: Policy, pairs: Sequence[Preference], seed: int) -> LoadedModel:
    """The policy that a run begins with. For `new`, the tokenizer is trained on the texts of `pairs`."""
    if policy.model != NEW:
        return load_language_model(policy.model, policy)
    tokenizer = train_tokenizer(texts_of(pairs), policy.shape.vocab_size)
    shape = dataclasses.replace(policy.shape, vocab_size=len(tokenizer))
    model, weights = _new_model(shape, "lm", policy.dtype, seed)
    return LoadedModel(model.clone(remat=policy.remat), weights, Renderer(tokenizer))


def load_language_model(directory: Any, policy: Policy) -> LoadedModel:
    """A language model from a directory or hub name."""
    model, weights = open_model(directory, head="lm", dtype=policy.dtype)
    return LoadedModel(model.clone(remat=policy.remat), weights, load_renderer(directory))


def initial_policy(config: Config, path: epath.Path, pairs: Sequence[Preference]) -> LoadedModel:
    """The policy that PPO in the run directory `path` begins with, which is its reference too."""
    directory = path / SFT_POLICY
    if config.sft.epochs == 0:
        return load_policy(config.policy, pairs, config.run.seed)
    if not is_complete(directory):
        raise InputError(
            f"sft.epochs={config.sft.epochs} and {directory} does not exist; "
            "run `rlhf-jax sft` first, or set sft.epochs=0"
        )
    return load_language_model(directory, config.policy)


def sft_start(config: Config, pairs: Sequence[Preference]) -> LoadedModel:
    """The model that fine-tuning begins with."""
    return adapted(load_policy(config.policy, pairs, config.run.seed), config.lora, config.run.seed)


def reward_start(config: Config, policy: LoadedModel) -> LoadedModel:
    """The model that the reward model's training begins with."""
    return adapted(load_backbone(config.reward, policy, config.run.seed), config.lora, config.run.seed)


def _new_model(shape: Shape, head: str, dtype: str, seed: int) -> tuple[nn.Module, Weights]:
    model = build_model(shape_config(shape), head=head, dtype=dtype)
    return model, FreshWeights(model, seed)


def load_backbone(reward: Reward, policy: LoadedModel, seed: int) -> LoadedModel:
    """The model that a reward model's training begins with.

    `policy` is the policy's trunk with a fresh head (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155,
    section 3.5); `new` is a fresh model that reads with the policy's tokenizer.
    """
    if reward.model == POLICY:
        model = policy.model.clone(head="score", dtype=jnp.dtype(reward.dtype))
        weights = TrunkWeights(policy.weights, FreshWeights(model, seed + 1))
        return LoadedModel(model, weights, policy.renderer)
    if reward.model != NEW:
        model, weights = open_model(reward.model, head="score", dtype=reward.dtype, seed=seed)
        return LoadedModel(model.clone(remat=policy.model.remat), weights, load_renderer(reward.model))
    shape = dataclasses.replace(reward.shape, vocab_size=len(policy.renderer.tokenizer))
    model, weights = _new_model(shape, "score", reward.dtype, seed + 1)
    return LoadedModel(model.clone(remat=policy.model.remat), weights, policy.renderer)


def reward_directory(config: Config, path: epath.Path) -> str:
    """The run's own reward model where it trained one, else what reward.model says, to the letter."""
    own = path / BEST_REWARD_MODEL
    return str(own) if is_complete(own) else config.reward.model


def trained_reward_model(config: Config, path: epath.Path) -> LoadedModel | None:
    """The reward model of the run directory `path`; None where a function takes its place."""
    if config.reward.function is not None:
        return None
    return load_reward_model(reward_directory(config, path), config.reward.dtype)


def load_reward_model(directory: str, dtype: str) -> LoadedModel:
    """A trained reward model.

    Raises:
      InputError: the model is only a backbone, whose head would be random.
    """
    if directory in (NEW, POLICY):
        raise InputError(
            f"reward.model={directory} is not trained; run `rlhf-jax reward` first, or give the "
            "best_reward_model of such a run"
        )
    architectures = names_in(read_hf_config(directory), "architectures", f"{directory}/config.json")
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise InputError(
            f"reward.model={directory} is {', '.join(architectures) or 'of no named architecture'}, "
            "which has no trained score head; train one with `rlhf-jax reward` and give its best_reward_model"
        )
    model, weights = open_model(directory, head="score", dtype=dtype, head_required=True)
    return LoadedModel(model, weights, load_renderer(directory))


def load_critic(critic: Critic, policy: LoadedModel, reward: LoadedModel | None, seed: int) -> LoadedModel:
    """The critic: the policy's trunk and a fresh head, the reward model, or a place.

    Of a critic that shares the policy's trunk the head alone is loaded.
    """
    init = critic.init
    if init == POLICY:
        model = policy.model.clone(head="value")
        if critic.shared:
            return LoadedModel(model, HeadWeights(FreshWeights(model, seed)), policy.renderer)
        weights = TrunkWeights(policy.weights, FreshWeights(model, seed))
        return LoadedModel(model, weights, policy.renderer)
    if init != "reward":
        model, weights = open_model(init, head="value", dtype=policy.model.dtype, seed=seed)
        renderer = load_renderer(init)
        _check_reads_like(policy.renderer, renderer, f"critic.init={init}")
        return LoadedModel(model.clone(remat=policy.model.remat), weights, renderer)
    if reward is None or reward.renderer.encoder:
        kind = "a function" if reward is None else "an encoder, which sees the future"
        raise InputError(f"critic.init=reward: the reward model is {kind}; use critic.init=policy")
    _check_reads_like(policy.renderer, reward.renderer, "critic.init=reward")
    model = reward.model.clone(head="value", remat=policy.model.remat)
    return LoadedModel(model, reward.weights, reward.renderer)


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

    Args:
      params: all parameters of the model or some subtrees of them, as arrays or shapes.
    """
    axes = like(params, logical_axes(model))
    for line in replicated_dimensions(view, axes, params):
        log.debug(line)
    return parameter_shardings(view, axes, params)


def place(model: nn.Module, params: Any, view: View) -> Any:
    """A copy of parameters that are in memory, on the devices of this view."""
    return ArrayWeights(params).read(shardings_of(model, params, view))


def is_complete(directory: epath.Path) -> bool:
    """True for an exported model; exports are renamed into place when whole."""
    return (directory / "config.json").exists()

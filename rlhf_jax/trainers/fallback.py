"""Which parameters stay whole on every device because they do not divide, from the settings alone."""

from __future__ import annotations

import pathlib
from typing import Any

import flax.linen as nn

from rlhf_jax.layouts import layouts, sizes_of
from rlhf_jax.models.config_json import config_from_json
from rlhf_jax.models.configs import shape_config
from rlhf_jax.models.huggingface import read_hf_config
from rlhf_jax.models.parameters import build_model, logical_axes, shapes
from rlhf_jax.settings import Config, Policy, Reward
from rlhf_jax.sharding.mesh import abstract_view
from rlhf_jax.sharding.rules import replicated_dimensions
from rlhf_jax.trainers.roles import NEW, POLICY


def whole_parameters(config: Config) -> list[str]:
    """A line for each dimension and role.

    New models and those in directories are looked at; what is a name on the hub is not fetched for it. Sizes
    of -1 count as 1: they are known where the devices are.
    """
    policy = _model(config.policy)
    reward = policy if config.reward.model == POLICY else _model(config.reward)
    critic = {POLICY: policy, "reward": reward}.get(config.critic.init) or _stored(config.critic.init)
    models = {"train": policy, "generate": policy, "critic": critic, "reference": policy, "reward": reward}
    lines = []
    for role, layout in layouts(config).items():
        model = models[role]
        sizes = {axis: max(size, 1) for axis, size in sizes_of(layout).items()}
        if model is not None:
            found = replicated_dimensions(abstract_view(sizes), logical_axes(model), shapes(model))
            lines += [f"placement.{role}: {line}" for line in found]
    return lines


def _model(settings: Policy | Reward) -> nn.Module | None:
    if isinstance(settings, Reward) and settings.function is not None:
        return None
    if settings.model == NEW:
        return build_model(shape_config(settings.shape), head="lm")
    return _stored(settings.model)


def _stored(place: Any) -> nn.Module | None:
    """The body of a model in a directory; None for other places."""
    directory = pathlib.Path(place).expanduser()
    if not (directory / "config.json").is_file():
        return None
    model_config = config_from_json(read_hf_config(directory), str(directory / "config.json"))
    return build_model(model_config, head="score")

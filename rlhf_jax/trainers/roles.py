"""The models of a run: loaded once, placed by their role's view of the grid."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Sharding

from rlhf_jax.data.rendering import Renderer
from rlhf_jax.models.huggingface import eos_token_ids, load_model, load_tokenizer
from rlhf_jax.models.transformer import logical_axes
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.rules import parameter_shardings, replicated_dimensions

log = logging.getLogger("rlhf_jax")


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A model with the tokenizer that it reads and writes."""

    model: nn.Module
    params: Any
    renderer: Renderer
    eos_ids: tuple[int, ...]


def load_language_model(name: str, *, head: str, dtype: str, seed: int = 0, remat: bool = False) -> LanguageModel:
    """A model and its tokenizer from a hub name or a directory."""
    model, variables = load_model(name, head=head, dtype=dtype, seed=seed)
    if remat:
        model = model.clone(remat=True)
    tokenizer = load_tokenizer(name)
    eos_ids = eos_token_ids(name, tokenizer)
    return LanguageModel(model, variables["params"], Renderer(tokenizer, eos_ids), eos_ids)


def shardings_of(model: nn.Module, params: Any, view: View) -> Any:
    """Where each parameter of the model lies in this view. A module that names no logical axes is kept whole everywhere."""
    axes = logical_axes(model)
    for line in replicated_dimensions(view, axes, params):
        log.info(line)
    return parameter_shardings(view, axes, params)


def place(params: Any, shardings: Any) -> Any:
    """The parameters on their devices."""
    return jax.tree.map(_put, params, shardings)


def _put(leaf: Any, sharding: Sharding) -> jax.Array:
    return jax.device_put(leaf, sharding)


def same_tokenizer(a: Renderer, b: Renderer) -> bool:
    """True where both render every dialogue to the same tokens: the same tokenizer file and the same template."""
    return not (a.encoder or b.encoder) and (
        a.tokenizer.backend_tokenizer.to_str() == b.tokenizer.backend_tokenizer.to_str()
        and a.tokenizer.chat_template == b.tokenizer.chat_template
        and a.eos_id == b.eos_id
    )

"""One answer to one prompt, from text to text."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.data.messages import prompt_of_text
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.models.configs import check_length
from rlhf_jax.models.huggingface import eos_token_ids, load_model, load_tokenizer
from rlhf_jax.models.parameters import unstack_layers
from rlhf_jax.rollout.decoder import decoder_for
from rlhf_jax.rollout.generate import generate
from rlhf_jax.settings import Rollout as RolloutSettings
from rlhf_jax.types import Prompts


def generate_text(model: Any, prompt: str, rollout_settings: RolloutSettings, seed: int) -> str:
    """A language model's response to a prompt, sampled on one device.

    Args:
      model: a directory or hub name.
      prompt: what the user says, or a dialogue as HH text.
      rollout_settings: lengths and sampling; temperature 0 takes the likeliest tokens.
      seed: the same seed gives the same response.
    """
    module, variables = load_model(model, head="lm", dtype=rollout_settings.dtype or "float32")
    tokenizer = load_tokenizer(model)
    renderer = Renderer(tokenizer, eos_token_ids(model, tokenizer))
    ids = renderer.prompt(prompt_of_text(prompt), rollout_settings.prompt_length)
    what = f"{model}: {len(ids)} prompt tokens + rollout.response_length"
    check_length(module.config, len(ids) + rollout_settings.response_length, what)
    tokens_BP = np.asarray(ids, np.int32)[None]
    sample = functools.partial(
        generate,
        decoder_for(module.clone(scan_layers=False)),
        response_length=rollout_settings.response_length,
        eos_ids=renderer.eos_ids,
        temperature=rollout_settings.temperature,
        top_k=rollout_settings.top_k,
        top_p=rollout_settings.top_p,
    )
    prompts = Prompts(jnp.asarray(tokens_BP), jnp.ones(tokens_BP.shape, bool), jnp.zeros(1, jnp.int32))
    params = unstack_layers(variables["params"])
    rollout = jax.device_get(jax.jit(sample)(params, prompts, jax.random.key(seed)))
    return renderer.text(rollout.response_BT[0][rollout.mask_BT[0]])

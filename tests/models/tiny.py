"""Tiny decoders with weights that show a fault, and one jit for all tests of a shape."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models import Rope, Transformer, TransformerConfig
from rlhf_jax.models.parameters import shapes

LLAMA = TransformerConfig(
    vocab_size=53,
    layers=2,
    embed=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp=24,
    max_positions=32,
    rope=Rope(theta=100.0),
)
GPT2 = dataclasses.replace(
    LLAMA,
    family="gpt2",
    kv_heads=4,
    norm="layer",
    activation="gelu_new",
    gated_mlp=False,
    rope=None,
    attention_bias=True,
    mlp_bias=True,
    tied=False,
)
CONFIGS = {"llama": LLAMA, "gpt2": GPT2}


def randomised(model, seed=0):
    """Variables with noise everywhere, norms around 1; compiles nothing."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        noise = 0.3 * rng.normal(size=shape.shape).astype(np.float32)
        return jnp.asarray(1 + noise if path[-1].key == "scale" else noise)

    return {"params": jax.tree_util.tree_map_with_path(leaf, shapes(model))}


def made(config, head="lm"):
    model = Transformer(config, head=head)
    return model, randomised(model)


# Nothing here runs long enough to earn LLVM's optimisation, which is half of a compilation.
QUICK = {"compiler_options": {"xla_backend_optimization_level": 0}}
quick_jit = functools.partial(jax.jit, **QUICK)


@functools.partial(quick_jit, static_argnums=(0, 1))
def call(model, method, variables, *args):
    """A method of a model under jit; equal models and shapes share one compilation."""
    return model.apply(variables, *args, method=method)


@functools.partial(quick_jit, static_argnums=(0, 4))
def prefill(model, variables, tokens, mask, length):
    return model.apply(variables, tokens, mask, length, method="prefill")


def batch(T=8):
    """Ragged rows: padding on the left, on the right and none."""
    tokens = np.random.default_rng(1).integers(0, 53, (3, T))
    steps = np.arange(T)
    return jnp.asarray(tokens), jnp.asarray(np.stack([steps >= 3, steps < 6, steps >= 0]))

"""Shapes over the grid, and tiny models of every family with dimensions that eight devices divide or not."""

import dataclasses
import functools
import itertools

import jax
import numpy as np

from rlhf_jax.models import Encoder, EncoderConfig, Transformer, TransformerConfig, logical_axes
from rlhf_jax.models.parameters import shapes as parameter_shapes
from rlhf_jax.sharding.mesh import ROLE_AXES
from rlhf_jax.sharding.rules import parameter_shardings

LLAMA = TransformerConfig(
    vocab_size=24, layers=3, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=32, max_positions=64
)
GPT2 = dataclasses.replace(
    LLAMA,
    family="gpt2",
    kv_heads=4,
    norm="layer",
    gated_mlp=False,
    rope=None,
    attention_bias=True,
    mlp_bias=True,
    tied=False,
)
BERT = EncoderConfig(vocab_size=24, layers=3, embed=16, heads=4, mlp=32, max_positions=16)
DISTILBERT = dataclasses.replace(BERT, family="distilbert", token_types=0, pooler_activation="relu")
MODELS = {
    "llama": Transformer(LLAMA),
    "gpt2": Transformer(GPT2),
    "bert": Encoder(BERT),
    "distilbert": Encoder(DISTILBERT),
}


def shape(*sizes):
    return dict(zip(ROLE_AXES, sizes, strict=True))


def shapes(count):
    """Every (data, fsdp, tensor) whose product is `count`."""
    sizes = itertools.product(range(1, count + 1), repeat=3)
    return [shape(*size) for size in sizes if size[0] * size[1] * size[2] == count]


def name(shape):
    return "x".join(map(str, shape.values()))


axes_of = functools.cache(logical_axes)


def shardings(model, params, view):
    return parameter_shardings(view, axes_of(model), params)


def random_params(model):
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.normal(size=leaf.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, parameter_shapes(model))

"""What stands on a backbone: the unembedding, the value and score head, the encoder's classifier."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from rlhf_jax.models.layers import ACTIVATIONS, Linear, parameter, product

DECODER_HEADS = ("lm", "value", "score")
ENCODER_HEADS = ("score",)


class Unembed(nn.Module):
    """Float32 logits from a table of its own (untied)."""

    embed: int
    vocab_size: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x_BTD):
        shape, axes = (self.embed, self.vocab_size), ("embed", "vocab")
        kernel = parameter(self, "kernel", shape, axes, self.param_dtype)
        return product(x_BTD.astype(self.dtype), kernel.astype(self.dtype), out=jnp.float32)


class ScalarHead(nn.Module):
    """A float32 number a position: a value, or at the last valid token a score. No bias: it must export."""

    embed: int
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        kernel = parameter(self, "kernel", (self.embed, 1), ("embed", "norm"), self.param_dtype)
        return product(x.astype(jnp.float32), kernel.astype(jnp.float32))[..., 0]


class ClassifierHead(nn.Module):
    """Dense layer over the first token (BERT's pooler, DistilBERT's pre_classifier), then a float32 score."""

    embed: int
    activation: str
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x_BD):
        D, dtype, param_dtype = self.embed, self.dtype, self.param_dtype
        pooler = Linear((D,), (D,), ("embed", "mlp"), True, dtype, param_dtype, name="pooler")
        classifier = Linear((D,), (1,), ("mlp", "norm"), True, jnp.float32, param_dtype, name="classifier")
        return classifier(ACTIVATIONS[self.activation](pooler(x_BD)))[..., 0]

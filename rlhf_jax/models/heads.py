"""What stands on a backbone: the unembedding, the value and score head, the encoder's classifier."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax

from rlhf_jax.models.layers import ACTIVATIONS, Linear, normal

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
        init = nn.with_logical_partitioning(normal, ("embed", "vocab"))
        kernel = self.param("kernel", init, (self.embed, self.vocab_size), self.param_dtype).astype(
            self.dtype
        )
        contract = (((x_BTD.ndim - 1,), (0,)), ((), ()))
        return lax.dot_general(x_BTD.astype(self.dtype), kernel, contract, preferred_element_type=jnp.float32)


class ScalarHead(nn.Module):
    """A float32 number a position: a value, or at the last valid token a score. No bias: it must export."""

    embed: int
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(normal, ("embed", "norm"))
        kernel = self.param("kernel", init, (self.embed, 1), self.param_dtype)
        contract = (((x.ndim - 1,), (0,)), ((), ()))
        return lax.dot_general(x.astype(jnp.float32), kernel.astype(jnp.float32), contract)[..., 0]


class ClassifierHead(nn.Module):
    """A score from the first token: a dense layer (BERT's pooler, DistilBERT's pre_classifier), a classifier."""

    embed: int
    activation: str
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x_BD):
        D = self.embed
        pooled = Linear((D,), (D,), ("embed", "mlp"), True, self.dtype, self.param_dtype, name="pooler")(x_BD)
        pooled = ACTIVATIONS[self.activation](pooled)
        out = Linear((D,), (1,), ("mlp", "norm"), True, jnp.float32, self.param_dtype, name="classifier")(
            pooled
        )
        return out[..., 0]

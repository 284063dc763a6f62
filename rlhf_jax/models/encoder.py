"""The bidirectional encoder with a score: BERT and DistilBERT."""

from __future__ import annotations

from typing import Any

import chex
import flax.linen as nn
import jax.numpy as jnp

from rlhf_jax.errors import InputError
from rlhf_jax.models.attention import Attention
from rlhf_jax.models.configs import EncoderConfig
from rlhf_jax.models.heads import ENCODER_HEADS, ClassifierHead
from rlhf_jax.models.layers import Mlp, Norm, Table, positions_of, take_position
from rlhf_jax.models.remat import recomputed
from rlhf_jax.settings import Lora
from rlhf_jax.sharding.rules import constrain


class EncoderBlock(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    config: EncoderConfig
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    lora: Lora | None = None

    def setup(self):
        c, types = self.config, (self.dtype, self.param_dtype)
        self.attention = Attention(c.embed, c.heads, c.heads, c.head_dim, True, *types, self.lora)
        self.attention_norm = Norm(c.embed, "layer", c.norm_eps, *types)
        self.mlp = Mlp(c.embed, c.mlp, c.activation, False, True, *types, self.lora)
        self.mlp_norm = Norm(c.embed, "layer", c.norm_eps, *types)

    def __call__(self, x_BTD, mask_BT):
        out, _ = self.attention(x_BTD, None, mask_BT, causal=False)
        x_BTD = self.attention_norm(x_BTD + out)
        x_BTD = self.mlp_norm(x_BTD + self.mlp(x_BTD))
        return constrain(x_BTD, "batch", "length", "embed_act"), None


class Encoder(nn.Module):
    """Scores a row by the classifier over its first valid token ([CLS]), wherever the padding is."""

    config: EncoderConfig
    head: str = "score"
    dtype: Any = jnp.float32
    remat: str = "none"
    param_dtype: Any = jnp.float32
    lora: Lora | None = None

    def setup(self):
        c, types = self.config, (self.dtype, self.param_dtype)
        if self.head not in ENCODER_HEADS:
            raise InputError(
                f"an encoder ({c.family}) has no head {self.head!r}: it sees the future; use a decoder"
            )
        self.embed = Table(c.vocab_size, c.embed, "vocab", *types)
        self.positions = Table(c.max_positions, c.embed, "positions", *types)
        if c.token_types:
            self.token_types = Table(c.token_types, c.embed, "positions", *types)
        self.embed_norm = Norm(c.embed, "layer", c.norm_eps, *types)
        block = recomputed(EncoderBlock, self.remat, scanned=True)
        broadcast: Any = nn.broadcast
        scanned = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=broadcast,
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        self.layers = scanned(c, *types, self.lora)
        self.classifier = ClassifierHead(c.embed, c.pooler_activation, *types, name="head")

    def __call__(self, tokens_BT, mask_BT=None):
        """Float32 scores_B."""
        mask_BT = jnp.ones(tokens_BT.shape, bool) if mask_BT is None else mask_BT.astype(bool)
        hidden_BTD = self.hidden(tokens_BT, mask_BT)
        return self.classifier(take_position(hidden_BTD, jnp.argmax(mask_BT, -1)))

    def hidden(self, tokens_BT, mask_BT):
        """Hidden states of the last block."""
        chex.assert_rank(tokens_BT, 2)
        chex.assert_equal_shape([tokens_BT, mask_BT])
        length, limit = tokens_BT.shape[1], self.config.max_positions
        if length > limit:
            raise InputError(f"{length} tokens are more than the encoder's {limit} positions; shorten them")
        x = self.embed(tokens_BT) + self.positions(positions_of(mask_BT))
        if self.config.token_types:
            x = x + self.token_types(jnp.zeros_like(tokens_BT))
        x = constrain(self.embed_norm(x), "batch", "length", "embed_act")
        x, _ = self.layers(x, mask_BT)
        return x

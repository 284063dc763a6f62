"""Attention over whole sequences and over a cache, rotary positions, and the projections around them."""

from __future__ import annotations

import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models.configs import Rope
from rlhf_jax.models.kv_cache import write_column
from rlhf_jax.models.layers import Linear
from rlhf_jax.models.packing import Packing
from rlhf_jax.settings import Lora

MASKED = -1e30  # finite, so that a row with nothing to attend to averages and has finite gradients


def attend(q_BTHE, k_BTKE, v_BTKE, mask_BT, *, causal: bool):
    """softmax(q k / sqrt(E)) v over valid positions, if causal only up to the query's own. Float32 softmax.

    A mask of numbers in place of bool names segments, of which none sees another; 0 is padding.

    Returns:
      [B, T, H, E]; finite, without meaning, where no position is allowed.
    """
    allowed_BTT = _allowed(mask_BT, causal)
    if jax.default_backend() == "gpu" and q_BTHE.dtype in (jnp.bfloat16, jnp.float16):
        return attend_fused(q_BTHE, k_BTKE, v_BTKE, allowed_BTT, implementation="cudnn")
    return attend_plain(q_BTHE, k_BTKE, v_BTKE, allowed_BTT)


def _allowed(mask_BT, causal: bool):
    """Which position (last axis) each query may see: [B, T, T], or [B, 1, T] where it is the same for all."""
    allowed = mask_BT[:, None, :]
    if mask_BT.dtype != bool:
        allowed = (allowed > 0) & (allowed == mask_BT[:, :, None])
    if causal:
        T = mask_BT.shape[1]
        allowed = allowed & jnp.tril(jnp.ones((1, T, T), bool))
    return allowed


def attend_fused(q_BTHE, k_BTKE, v_BTKE, allowed_BTT, *, implementation: Literal["xla", "cudnn"]):
    """`attend` by jax.nn.dot_product_attention: "cudnn" is FlashAttention, for 16 bits on NVIDIA GPUs."""
    B, T = q_BTHE.shape[:2]
    mask_B1TT = jnp.broadcast_to(allowed_BTT[:, None], (B, 1, T, T))
    return jax.nn.dot_product_attention(q_BTHE, k_BTKE, v_BTKE, mask=mask_B1TT, implementation=implementation)


def attend_plain(q_BTHE, k_BTKE, v_BTKE, allowed_BTT):
    """`attend` by two matrix products.

    H/K query heads share a key/value head. They are folded into the rows of one matrix product per key/value
    head: a fifth faster on a CPU, forward and backward, than jax.nn.dot_product_attention.
    """
    B, T, H, E = q_BTHE.shape
    K = k_BTKE.shape[2]
    G = H // K
    q = (q_BTHE * E**-0.5).reshape(B, T, K, G, E).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, E)
    scores = jnp.einsum("bkne,bske->bkns", q, k_BTKE, preferred_element_type=jnp.float32)
    scores = jnp.where(allowed_BTT[:, None, None], scores.reshape(B, K, G, T, T), MASKED)
    weights = jax.nn.softmax(scores, -1).astype(v_BTKE.dtype).reshape(B, K, G * T, T)
    out = jnp.einsum("bkns,bske->bkne", weights, v_BTKE)
    return out.reshape(B, K, G, T, E).transpose(0, 3, 1, 2, 4).reshape(B, T, H, E)


def attend_cached(q_BHE, k_BKES, v_BKSE, mask_BS):
    """As `attend`, for one query a row over the valid slots of a cache. Returns [B, H, E]."""
    B, H, E = q_BHE.shape
    K = k_BKES.shape[1]
    q = (q_BHE * E**-0.5).reshape(B, K, H // K, E)
    scores = jnp.einsum("bkge,bkes->bkgs", q, k_BKES, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask_BS[:, None, None], scores, MASKED), -1).astype(v_BKSE.dtype)
    return jnp.einsum("bkgs,bkse->bkge", weights, v_BKSE).reshape(B, H, E)


def rope_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians a position for each of the E/2 pairs, in the same float32 steps as `transformers`.

    linear (https://arxiv.org/abs/2306.15595): all divided by factor. llama3 (Llama 3.1): those of wavelengths
    above original/low_freq_factor divided by factor, below original/high_freq_factor kept, a ramp between.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "llama3":
        turns = rope.original_positions * frequencies / np.float32(2 * math.pi)  # over the original context
        ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(ramp, 0.0, 1.0).astype(np.float32)
        return (1 - keep) * frequencies / np.float32(rope.factor) + keep * frequencies
    return frequencies


def rotation(rope: Rope, head_dim: int, positions_BT):
    """(cos, sin), each [B, T, 1, E/2] in float32."""
    angles = positions_BT[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)[None, None]
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def rotate(x_BTNE, cos, sin):
    """Pairs (x_i, x_{i+E/2}) turned by their angles; in float32."""
    first, second = jnp.split(x_BTNE.astype(jnp.float32), 2, -1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.astype(x_BTNE.dtype)


class Attention(nn.Module):
    """Projections to queries, keys and values, and back."""

    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    lora: Lora | None = None

    def setup(self):
        D, E, types = self.embed, self.head_dim, (self.dtype, self.param_dtype, self.lora)

        def into(heads, axis):
            return Linear((D,), (heads, E), ("embed", axis, "head_dim"), self.bias, *types)

        self.q = into(self.heads, "heads")
        self.k = into(self.kv_heads, "kv_heads")
        self.v = into(self.kv_heads, "kv_heads")
        axes = ("heads", "head_dim", "embed")
        self.o = Linear((self.heads, E), (D,), axes, self.bias, *types)

    def project(self, x_BTD, turn=None):
        """(q_BTHE, k_BTKE, v_BTKE), queries and keys rotated by turn = (cos, sin)."""
        q, k, v = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        return q, k, v

    def __call__(self, x_BTD, turn, mask_BT, *, causal: bool):
        """(output_BTD, (k_BTKE, v_BTKE)) over a whole sequence."""
        q, k, v = self.project(x_BTD, turn)
        return self.o(attend(q, k, v, mask_BT, causal=causal)), (k, v)

    def packed(self, x_GND, turn, mask_BT, packing: Packing):
        """As a causal call for packed tokens; turn holds theirs. Returns output_GND."""
        q, k, v = (packing.unpack(x, mask_BT.shape[0]) for x in self.project(x_GND, turn))
        return self.o(packing.pack(attend(q, k, v, mask_BT, causal=True)))

    def decode(self, x_BTD, turn, cached, mask_BS, column):
        """(output_BTD, cached) for one token a row (T = 1), whose key and value are written at `column`."""
        q, k, v = self.project(x_BTD, turn)
        cached = write_column(cached, column, (k, v))
        return self.o(attend_cached(q[:, 0], *cached, mask_BS)[:, None]), cached

"""The causal decoder: GPT-2, Llama and what is made of the same parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import flax.linen as nn
import jax.numpy as jnp

from rlhf_jax.errors import InputError
from rlhf_jax.models.attention import Attention, rotation
from rlhf_jax.models.configs import TransformerConfig
from rlhf_jax.models.heads import DECODER_HEADS, ScalarHead, Unembed
from rlhf_jax.models.kv_cache import KVCache, fill_cache
from rlhf_jax.models.layers import Mlp, Norm, Table, last_valid, positions_of, take_position
from rlhf_jax.models.packing import Packing
from rlhf_jax.models.remat import recomputed
from rlhf_jax.settings import Lora
from rlhf_jax.sharding.rules import constrain


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: TransformerConfig
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    lora: Lora | None = None

    def setup(self):
        c, types = self.config, (self.dtype, self.param_dtype)
        self.attention_norm = Norm(c.embed, c.norm, c.norm_eps, *types)
        self.attention = Attention(
            c.embed, c.heads, c.kv_heads, c.head_dim, c.attention_bias, *types, self.lora
        )
        self.mlp_norm = Norm(c.embed, c.norm, c.norm_eps, *types)
        self.mlp = Mlp(c.embed, c.mlp, c.activation, c.gated_mlp, c.mlp_bias, *types, self.lora)

    def __call__(self, x_BTD, turn, mask_BT, packing=None):
        if packing is None:
            x_BTD, _ = self.prefill(x_BTD, turn, mask_BT)
        else:
            out = self.attention.packed(self.attention_norm(x_BTD), turn, mask_BT, packing)
            x_BTD = self._feed(x_BTD + out)
        return constrain(x_BTD, "batch", "length", "embed_act"), None

    def prefill(self, x_BTD, turn, mask_BT):
        """(x_BTD, (k_BTKE, v_BTKE))."""
        out, pair = self.attention(self.attention_norm(x_BTD), turn, mask_BT, causal=True)
        return self._feed(x_BTD + out), pair

    def decode(self, x_BTD, turn, pair, mask_BS, column):
        """(x_BTD, pair) for one token a row."""
        out, pair = self.attention.decode(self.attention_norm(x_BTD), turn, pair, mask_BS, column)
        return self._feed(x_BTD + out), pair

    def _feed(self, x_BTD):
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Transformer(nn.Module):
    """A decoder with a head: logits (lm), a value a token (value) or a score a row (score).

    Attributes:
      config: shape and choices.
      head: lm, value or score; the last two are one parameter, read at every or at the last valid token.
      dtype: type of the computation; norms, softmax, logits, values and scores are float32 always.
      scan_layers: True, one scanned block with stacked parameters (training); False, block after block
        (`decode` needs it). `unstack_layers` and `stack_layers` convert the parameters.
      remat: what the backward pass recomputes of each block, one of `remat.POLICIES`.
      lora: adapters on the blocks' projections; None: none.
    """

    config: TransformerConfig
    head: str = "lm"
    dtype: Any = jnp.float32
    scan_layers: bool = True
    remat: str = "none"
    param_dtype: Any = jnp.float32
    lora: Lora | None = None

    def setup(self):
        c, types = self.config, (self.dtype, self.param_dtype)
        if self.head not in DECODER_HEADS:
            raise InputError(f"a decoder has no head {self.head!r}; use one of {', '.join(DECODER_HEADS)}")
        self.embed = Table(c.vocab_size, c.embed, "vocab", *types)
        if c.rope is None:
            self.positions = Table(c.max_positions, c.embed, "positions", *types)
        self.layers = self._layers()
        self.final_norm = Norm(c.embed, c.norm, c.norm_eps, *types)
        if self.head != "lm":
            self.scalar = ScalarHead(c.embed, self.param_dtype, name="head")
        elif not c.tied:
            self.unembedding = Unembed(c.embed, c.vocab_size, *types)

    def _layers(self) -> Any:
        """One scanned block, or a list of blocks."""
        c = self.config
        block = recomputed(Block, self.remat, scanned=self.scan_layers)
        if not self.scan_layers:
            return [block(c, self.dtype, self.param_dtype, self.lora) for _ in range(c.layers)]
        scanned = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
            methods=["__call__", "prefill"],
        )
        return scanned(c, self.dtype, self.param_dtype, self.lora)

    def __call__(self, tokens_BT, mask_BT=None, packing: Packing | None = None):
        """Float32 logits_BTV, values_BT or scores_B, by head, independent of padding side and content.

        Args:
          mask_BT: bool; or for packed rows int, the number of each token's segment and 0 for padding:
            segments do not see each other, and each begins at position 0.
          packing: of a bool mask; padding is then left out of what is computed.
        """
        hidden_BTD = self.hidden(tokens_BT, mask_BT, packing)
        if self.head == "lm":
            return constrain(self.unembed(hidden_BTD), "batch", "length", "vocab_act")
        if self.head == "value" or mask_BT is None:
            values_BT = self.scalar(hidden_BTD)
            return values_BT if self.head == "value" else values_BT[:, -1]
        return self.scalar(take_position(hidden_BTD, last_valid(mask_BT.astype(bool))))

    def hidden(self, tokens_BT, mask_BT=None, packing: Packing | None = None):
        """Hidden states after the final norm; with a packing of the mask, 0 in padding."""
        x_BTD, turn, mask_BT = self._embed(tokens_BT, mask_BT, packing=packing)
        x_BTD = constrain(x_BTD, "batch", "length", "embed_act")
        if self.scan_layers:
            x_BTD, _ = self.layers(x_BTD, turn, mask_BT, packing)
        else:
            for layer in self.layers:
                x_BTD, _ = layer(x_BTD, turn, mask_BT, packing)
        x_BTD = self.final_norm(x_BTD)
        return x_BTD if packing is None else packing.unpack(x_BTD, tokens_BT.shape[0])

    def unembed(self, hidden_BTD):
        """Float32 logits."""
        if self.head != "lm":
            raise ValueError(f"a model with head {self.head!r} has no logits; load it with head='lm'")
        return self.embed.attend(hidden_BTD) if self.config.tied else self.unembedding(hidden_BTD)

    def values(self, hidden_BTD):
        """Float32 values of hidden states, which may be those of another model with the same trunk."""
        return self.scalar(hidden_BTD)

    def prefill(self, tokens_BP, mask_BP, cache_length: int):
        """(float32 logits_BV of each row's last valid token, cache of cache_length columns, P written)."""
        x, turn, mask_BP = self._embed(tokens_BP, mask_BP.astype(bool), cache_length)
        if self.scan_layers:
            x, (keys, values) = self.layers.prefill(x, turn, mask_BP)
            pairs = [(keys[i], values[i]) for i in range(self.config.layers)]
        else:
            pairs = []
            for layer in self.layers:
                x, pair = layer.prefill(x, turn, mask_BP)
                pairs.append(pair)
        last_BD = take_position(x, last_valid(mask_BP))
        return self.unembed(self.final_norm(last_BD)), fill_cache(pairs, mask_BP, cache_length)

    def decode(self, tokens_B, cache: KVCache):
        """(float32 logits_BV, cache) after one more token a row."""
        if self.scan_layers:
            raise ValueError("decode needs model.clone(scan_layers=False) and parameters from unstack_layers")
        position_B1, column = cache.position_B[:, None], cache.column
        cache = cache.advance()
        x = self.embed(tokens_B[:, None])
        x, turn = self._place(x, position_B1)
        pairs = []
        for layer, pair in zip(self.layers, cache.layers, strict=True):
            x, pair = layer.decode(x, turn, pair, cache.mask_BS, column)
            pairs.append(pair)
        return self.unembed(self.final_norm(x[:, 0])), dataclasses.replace(cache, layers=tuple(pairs))

    def _embed(self, tokens_BT, mask_BT, length: int | None = None, packing: Packing | None = None):
        """(x_BTD, rotation or None, mask_BT of bool or of segments); packed x and rotation by a packing."""
        chex.assert_rank(tokens_BT, 2)
        mask_BT = jnp.ones(tokens_BT.shape, bool) if mask_BT is None else jnp.asarray(mask_BT)
        chex.assert_equal_shape([tokens_BT, mask_BT])
        length, limit = length or tokens_BT.shape[1], self.config.max_positions
        if self.config.rope is None and length > limit:
            raise InputError(
                f"{length} tokens are more than the model's {limit} learned positions; shorten them"
            )
        positions_BT = positions_of(mask_BT)
        if packing is not None:
            tokens_BT, positions_BT = packing.pack(tokens_BT), packing.pack(positions_BT)
        x, turn = self._place(self.embed(tokens_BT), positions_BT)
        return x, turn, mask_BT

    def _place(self, x_BTD, positions_BT):
        if self.config.rope is None:
            return x_BTD + self.positions(positions_BT), None
        return x_BTD, rotation(self.config.rope, self.config.head_dim, positions_BT)

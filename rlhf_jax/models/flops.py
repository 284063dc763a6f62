"""Work that a model does, counted from its shape: the numerator of model FLOPs utilisation (MFU)."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_jax.models.configs import EncoderConfig, TransformerConfig


def forward_flops(
    config: TransformerConfig | EncoderConfig, lengths: Iterable[int], *, unembed_positions: int = 0
) -> int:
    """FLOPs of one forward pass over sequences of these lengths in valid tokens, padding not counted.

    Two FLOPs a multiply-add of every matrix product; a token attends to itself and those before it, which is
    n (n + 1) / 2 pairs for n tokens, in an encoder to all, n^2. Norms, softmax, activations, rotations, table
    look-ups and scalar heads are not counted. A backward pass is two forward passes; recomputation (remat) is
    no model work. Decoding n tokens is one pass over them, with the sampled tokens in `unembed_positions`.

    Args:
      unembed_positions: positions, over all sequences, for which logits are computed.
    """
    causal = isinstance(config, TransformerConfig)
    lengths = [int(n) for n in lengths]
    D, H, E, F = config.embed, config.heads, config.head_dim, config.mlp
    K = config.kv_heads if causal else H
    projections = D * (H + 2 * K) * E + H * E * D
    feed_forward = (3 if causal and config.gated_mlp else 2) * D * F
    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    layer = sum(lengths) * (projections + feed_forward) + pairs * 2 * H * E
    pooler = 0 if causal else len(lengths) * D * D
    return 2 * (config.layers * layer + pooler + unembed_positions * D * config.vocab_size)

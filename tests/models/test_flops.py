"""Counts by hand."""

import dataclasses

from rlhf_jax.models import EncoderConfig, TransformerConfig, forward_flops

CONFIG = TransformerConfig(
    vocab_size=10, layers=2, embed=4, heads=2, kv_heads=1, head_dim=3, mlp=5, max_positions=8, rope=None
)


def test_a_decoder_by_hand():
    # A token and layer: q 4*6, k and v 4*3 each, o 6*4 = 72; gate, up, down 3*4*5 = 60.
    # Pairs: 3 tokens 6, 1 token 1; each 2 * 6 multiply-adds. Layers: 4 * 132 + 7 * 12 = 612.
    assert forward_flops(CONFIG, [3, 1]) == 2 * 2 * 612
    assert forward_flops(CONFIG, [3, 1], unembed_positions=2) == 2 * (2 * 612 + 2 * 4 * 10)
    plain = dataclasses.replace(CONFIG, gated_mlp=False)
    assert forward_flops(CONFIG, [3, 1]) - forward_flops(plain, [3, 1]) == 2 * 2 * 4 * 20


def test_an_encoder_by_hand():
    config = EncoderConfig(vocab_size=10, layers=2, embed=4, heads=2, mlp=5, max_positions=8)
    # A token and layer: 4 * 4*4 + 2 * 4*5 = 104; 9 pairs of 2 * 4; one pooler of 4*4.
    assert forward_flops(config, [3]) == 2 * (2 * (3 * 104 + 9 * 8) + 16)


def test_decoding_is_one_pass():
    """One token after another over a cache: the n-th attends to n, and the sum is a causal pass."""
    steps = sum(forward_flops(CONFIG, [n]) - forward_flops(CONFIG, [n - 1]) for n in range(1, 7))
    assert steps == forward_flops(CONFIG, [6])


def test_it_is_about_two_a_parameter_and_token():
    """The rule of thumb 2 N per token, for a shape where attention is small."""
    config = TransformerConfig(
        vocab_size=32000,
        layers=32,
        embed=4096,
        heads=32,
        kv_heads=32,
        head_dim=128,
        mlp=11008,
        max_positions=8,
    )
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    flops = forward_flops(config, [128], unembed_positions=128)
    assert 1 < flops / (2 * parameters * 128) < 1.01

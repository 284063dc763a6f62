"""Shapes and choices of the two kinds of model; `families.py` says which family makes which choice."""

from __future__ import annotations

import dataclasses

from rlhf_jax.errors import InputError
from rlhf_jax.settings import Shape


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding: rotation frequencies theta^(-2i/E), slowed for long contexts by `kind`."""

    theta: float = 10000.0
    kind: str = "default"  # default, linear (all by factor) or llama3 (the slow ones by factor, with a ramp)
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A causal decoder with pre-normalised blocks."""

    vocab_size: int
    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_positions: int
    family: str = "llama"
    norm: str = "rms"  # rms (scale only) or layer (scale and bias)
    norm_eps: float = 1e-5
    activation: str = "silu"
    gated_mlp: bool = True  # down(activation(gate(x)) * up(x)), otherwise down(activation(up(x)))
    rope: Rope | None = Rope()  # None: learned absolute positions
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = True  # the unembedding is the embedding table

    def __post_init__(self):
        check_positive(
            self, "vocab_size", "layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "max_positions"
        )
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} heads are not a multiple of {self.kv_heads} key/value heads; change one"
            )
        if self.rope is not None and self.head_dim % 2:
            raise InputError(f"head width {self.head_dim} is odd; rotary positions need an even one")


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """A bidirectional encoder with post-normalised blocks that reads one score off its first token."""

    vocab_size: int
    layers: int
    embed: int
    heads: int
    mlp: int
    max_positions: int
    family: str = "bert"
    norm_eps: float = 1e-12
    activation: str = "gelu"
    token_types: int = 2  # rows of the segment table, of which row 0 is used; 0: no such table
    pooler_activation: str = "tanh"

    def __post_init__(self):
        check_positive(self, "vocab_size", "layers", "embed", "heads", "mlp", "max_positions")
        if self.embed % self.heads:
            raise InputError(f"width {self.embed} is not divisible by {self.heads} heads; change one")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads


def check_length(config: TransformerConfig | EncoderConfig, length: int, what: str) -> None:
    """Refuses sequences that are longer than the model's positions, learned or rotary."""
    if length > config.max_positions:
        raise InputError(f"{what} = {length} exceeds its {config.max_positions} positions; lower it")


def check_positive(config, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r} of a {config.family} model is not a positive whole number")


def shape_config(shape: Shape) -> TransformerConfig:
    """The Llama-architecture model that `policy.shape` or `reward.shape` describes."""
    if shape.embed < 1 or shape.heads < 1 or shape.embed % shape.heads:
        raise InputError(
            f"shape.embed={shape.embed} is not divisible by shape.heads={shape.heads}; change one"
        )
    return TransformerConfig(
        vocab_size=shape.vocab_size,
        layers=shape.layers,
        embed=shape.embed,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.embed // shape.heads,
        mlp=shape.mlp,
        max_positions=shape.max_positions,
        tied=shape.tied,
    )

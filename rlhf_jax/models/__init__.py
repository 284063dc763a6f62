"""Decoders and encoders as Flax linen modules, and the way from and to Hugging Face checkpoints."""

from rlhf_jax.models.configs import EncoderConfig, Rope, TransformerConfig, shape_config
from rlhf_jax.models.encoder import Encoder
from rlhf_jax.models.kv_cache import KVCache
from rlhf_jax.models.parameters import init_model, logical_axes, stack_layers, unstack_layers
from rlhf_jax.models.transformer import Transformer

__all__ = [
    "Encoder",
    "EncoderConfig",
    "KVCache",
    "Rope",
    "Transformer",
    "TransformerConfig",
    "init_model",
    "logical_axes",
    "shape_config",
    "stack_layers",
    "unstack_layers",
]

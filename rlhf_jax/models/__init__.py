"""Decoders and encoders as Flax linen modules, and the way from and to Hugging Face checkpoints."""

from rlhf_jax.models.configs import EncoderConfig, Rope, TransformerConfig, shape_config
from rlhf_jax.models.encoder import Encoder
from rlhf_jax.models.export import export_model
from rlhf_jax.models.flops import forward_flops
from rlhf_jax.models.huggingface import eos_token_ids, load_model, load_tokenizer, read_hf_config
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
    "eos_token_ids",
    "export_model",
    "forward_flops",
    "init_model",
    "load_model",
    "load_tokenizer",
    "logical_axes",
    "read_hf_config",
    "shape_config",
    "stack_layers",
    "unstack_layers",
]

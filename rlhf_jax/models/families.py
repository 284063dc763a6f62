"""The supported families, one table entry each: architectures, keys of config.json, names of weights.

To add a family, add an entry to `FAMILIES`; docs/models.md shows how.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_jax.models.configs import EncoderConfig, TransformerConfig

REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of config.json, the field it fills, and what a missing or null key means."""

    name: str
    field: str
    default: Any = REQUIRED  # a value, or a function of the fields read so far


@dataclasses.dataclass(frozen=True)
class Weight:
    """A tensor of the checkpoint and the parameter it holds; `{}` in its name is the number of the layer.

    Forms: linear [out, in] and conv [in, out] hold a kernel [*in, *out], vector is any shape in one axis, a
    table is as it is. `part=(i, n)`: the i-th of n equal pieces along the tensor's last axis.
    """

    name: str
    path: str
    form: str
    inputs: int = 1  # leading axes of the kernel that are inputs
    part: tuple[int, int] = (0, 1)
    bare: bool = False  # stands outside the backbone: its name takes no prefix


@dataclasses.dataclass(frozen=True)
class Family:
    """What tells one family from another, all of it names and constants."""

    model_type: str
    architectures: Mapping[str, str]  # by head
    prefix: str  # of the backbone's weights inside a model with a head
    config: type
    keys: tuple[Key, ...]
    weights: tuple[Weight, ...]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields that no key sets
    derived: Mapping[str, Callable[[dict], Any]] = dataclasses.field(default_factory=dict)
    rotary: bool = False  # the rope_* keys count
    only: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # keys with the one value that is implemented
    renames: tuple[tuple[str, str], ...] = ()  # older spellings in weight names
    ignored: tuple[str, ...] = ()  # regular expressions of tensors that carry nothing the model needs


def dense(
    name: str, path: str, form: str = "linear", inputs: int = 1, bare: bool = False
) -> tuple[Weight, ...]:
    """A kernel and its bias; the bias is used only where the model has one."""
    return (
        Weight(f"{name}.weight", f"{path}/kernel", form, inputs, bare=bare),
        Weight(f"{name}.bias", f"{path}/bias", "vector", bare=bare),
    )


def norm(name: str, path: str) -> tuple[Weight, ...]:
    return Weight(f"{name}.weight", f"{path}/scale", "vector"), Weight(
        f"{name}.bias", f"{path}/bias", "vector"
    )


def table(name: str, path: str) -> tuple[Weight, ...]:
    return (Weight(f"{name}.weight", f"{path}/embedding", "table"),)


def decoder_heads() -> tuple[Weight, ...]:
    return (
        Weight("lm_head.weight", "unembedding/kernel", "linear", bare=True),
        Weight("score.weight", "head/kernel", "linear", bare=True),
    )


# Tensors beside the backbone that other heads, older libraries or tied copies leave in a checkpoint.
OTHER_HEADS = (r"(lm_head|score|v_head|classifier|pre_classifier|qa_outputs)\..*",)

LLAMA = Family(
    model_type="llama",
    architectures={
        "lm": "LlamaForCausalLM",
        "score": "LlamaForSequenceClassification",
        "value": "LlamaForSequenceClassification",
    },
    prefix="model.",
    config=TransformerConfig,
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "embed"),
        Key("num_hidden_layers", "layers"),
        Key("num_attention_heads", "heads"),
        Key("num_key_value_heads", "kv_heads", lambda fields: fields["heads"]),
        Key("head_dim", "head_dim", lambda fields: fields["embed"] // fields["heads"]),
        Key("intermediate_size", "mlp"),
        Key("max_position_embeddings", "max_positions", 2048),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("hidden_act", "activation", "silu"),
        Key("attention_bias", "attention_bias", False),
        Key("mlp_bias", "mlp_bias", False),
        Key("tie_word_embeddings", "tied", False),
    ),
    rotary=True,
    fixed={"norm": "rms", "gated_mlp": True},
    weights=(
        *table("embed_tokens", "embed"),
        *norm("layers.{}.input_layernorm", "layers/attention_norm"),
        *dense("layers.{}.self_attn.q_proj", "layers/attention/q"),
        *dense("layers.{}.self_attn.k_proj", "layers/attention/k"),
        *dense("layers.{}.self_attn.v_proj", "layers/attention/v"),
        *dense("layers.{}.self_attn.o_proj", "layers/attention/o", inputs=2),
        *norm("layers.{}.post_attention_layernorm", "layers/mlp_norm"),
        *dense("layers.{}.mlp.gate_proj", "layers/mlp/gate"),
        *dense("layers.{}.mlp.up_proj", "layers/mlp/up"),
        *dense("layers.{}.mlp.down_proj", "layers/mlp/down"),
        *norm("norm", "final_norm"),
        *decoder_heads(),
    ),
    ignored=(r"(layers\.\d+\.self_attn\.)?rotary_emb\..*", *OTHER_HEADS),
)

GPT2 = Family(
    model_type="gpt2",
    architectures={
        "lm": "GPT2LMHeadModel",
        "score": "GPT2ForSequenceClassification",
        "value": "GPT2ForSequenceClassification",
    },
    prefix="transformer.",
    config=TransformerConfig,
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("n_embd", "embed"),
        Key("n_layer", "layers"),
        Key("n_head", "heads"),
        Key("n_inner", "mlp", lambda fields: 4 * fields["embed"]),
        Key("n_positions", "max_positions", 1024),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("activation_function", "activation", "gelu_new"),
        Key("tie_word_embeddings", "tied", True),
    ),
    fixed={"norm": "layer", "gated_mlp": False, "rope": None, "attention_bias": True, "mlp_bias": True},
    derived={
        "kv_heads": lambda fields: fields["heads"],
        "head_dim": lambda fields: fields["embed"] // fields["heads"],
    },
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    weights=(
        *table("wte", "embed"),
        *table("wpe", "positions"),
        *norm("h.{}.ln_1", "layers/attention_norm"),
        *(
            Weight(f"h.{{}}.attn.c_attn.{kind}", f"layers/attention/{letter}/{leaf}", form, part=(i, 3))
            for kind, leaf, form in (("weight", "kernel", "conv"), ("bias", "bias", "vector"))
            for i, letter in enumerate("qkv")
        ),
        *dense("h.{}.attn.c_proj", "layers/attention/o", "conv", inputs=2),
        *norm("h.{}.ln_2", "layers/mlp_norm"),
        *dense("h.{}.mlp.c_fc", "layers/mlp/up", "conv"),
        *dense("h.{}.mlp.c_proj", "layers/mlp/down", "conv"),
        *norm("ln_f", "final_norm"),
        *decoder_heads(),
    ),
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)", *OTHER_HEADS),
)

BERT = Family(
    model_type="bert",
    architectures={"score": "BertForSequenceClassification"},
    prefix="bert.",
    config=EncoderConfig,
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "embed"),
        Key("num_hidden_layers", "layers"),
        Key("num_attention_heads", "heads"),
        Key("intermediate_size", "mlp"),
        Key("max_position_embeddings", "max_positions", 512),
        Key("type_vocab_size", "token_types", 2),
        Key("layer_norm_eps", "norm_eps", 1e-12),
        Key("hidden_act", "activation", "gelu"),
    ),
    fixed={"pooler_activation": "tanh"},
    only={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    weights=(
        *table("embeddings.word_embeddings", "embed"),
        *table("embeddings.position_embeddings", "positions"),
        *table("embeddings.token_type_embeddings", "token_types"),
        *norm("embeddings.LayerNorm", "embed_norm"),
        *dense("encoder.layer.{}.attention.self.query", "layers/attention/q"),
        *dense("encoder.layer.{}.attention.self.key", "layers/attention/k"),
        *dense("encoder.layer.{}.attention.self.value", "layers/attention/v"),
        *dense("encoder.layer.{}.attention.output.dense", "layers/attention/o", inputs=2),
        *norm("encoder.layer.{}.attention.output.LayerNorm", "layers/attention_norm"),
        *dense("encoder.layer.{}.intermediate.dense", "layers/mlp/up"),
        *dense("encoder.layer.{}.output.dense", "layers/mlp/down"),
        *norm("encoder.layer.{}.output.LayerNorm", "layers/mlp_norm"),
        *dense("pooler.dense", "head/pooler"),
        *dense("classifier", "head/classifier", bare=True),
    ),
    renames=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    ignored=(r"embeddings\.position_ids", r"cls\..*", *OTHER_HEADS),
)

DISTILBERT = Family(
    model_type="distilbert",
    architectures={"score": "DistilBertForSequenceClassification"},
    prefix="distilbert.",
    config=EncoderConfig,
    keys=(
        Key("vocab_size", "vocab_size"),
        Key("dim", "embed"),
        Key("n_layers", "layers"),
        Key("n_heads", "heads"),
        Key("hidden_dim", "mlp"),
        Key("max_position_embeddings", "max_positions", 512),
        Key("activation", "activation", "gelu"),
    ),
    fixed={"pooler_activation": "relu", "token_types": 0, "norm_eps": 1e-12},
    weights=(
        *table("embeddings.word_embeddings", "embed"),
        *table("embeddings.position_embeddings", "positions"),
        *norm("embeddings.LayerNorm", "embed_norm"),
        *dense("transformer.layer.{}.attention.q_lin", "layers/attention/q"),
        *dense("transformer.layer.{}.attention.k_lin", "layers/attention/k"),
        *dense("transformer.layer.{}.attention.v_lin", "layers/attention/v"),
        *dense("transformer.layer.{}.attention.out_lin", "layers/attention/o", inputs=2),
        *norm("transformer.layer.{}.sa_layer_norm", "layers/attention_norm"),
        *dense("transformer.layer.{}.ffn.lin1", "layers/mlp/up"),
        *dense("transformer.layer.{}.ffn.lin2", "layers/mlp/down"),
        *norm("transformer.layer.{}.output_layer_norm", "layers/mlp_norm"),
        *dense("pre_classifier", "head/pooler", bare=True),
        *dense("classifier", "head/classifier", bare=True),
    ),
    ignored=(r"embeddings\.position_ids", r"vocab_(transform|layer_norm|projector)\..*", *OTHER_HEADS),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, LLAMA, BERT, DISTILBERT)}

"""config.json both ways, and what is refused by name."""

import dataclasses

import pytest

from rlhf_jax.errors import InputError
from rlhf_jax.models.config_json import config_from_json, config_to_json
from rlhf_jax.models.configs import Rope, shape_config
from rlhf_jax.models.families import FAMILIES
from rlhf_jax.settings import Shape

LLAMA = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2}
BERT = {**LLAMA, "model_type": "bert"}
DISTILBERT = {
    "model_type": "distilbert",
    "vocab_size": 11,
    "dim": 8,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 12,
}


def read(hf):
    return config_from_json(hf, "config.json")


def test_defaults_are_those_of_transformers():
    """A key that config.json leaves out means what `transformers` takes it to mean."""
    llama, gpt2 = read(LLAMA), read(GPT2)
    assert (llama.kv_heads, llama.head_dim, llama.norm_eps, llama.tied) == (2, 4, 1e-6, False)
    assert llama.rope == Rope(theta=10000.0)
    assert (gpt2.mlp, gpt2.kv_heads, gpt2.tied, gpt2.activation, gpt2.rope) == (32, 2, True, "gelu_new", None)
    assert (read(BERT).token_types, read(BERT).norm_eps) == (2, 1e-12)
    assert (read(DISTILBERT).token_types, read(DISTILBERT).pooler_activation) == (0, "relu")


@pytest.mark.parametrize(
    "hf",
    [
        LLAMA,
        {**LLAMA, "rope_parameters": {"rope_theta": 500000.0}},
        {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
        {
            **LLAMA,
            "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
        },
        {**LLAMA, "num_key_value_heads": 1, "head_dim": 6, "mlp_bias": True, "sliding_window": None},
        {**GPT2, "n_inner": None},
        BERT,
        DISTILBERT,
    ],
)
def test_there_and_back(hf):
    config = read(hf)
    for head, architecture in FAMILIES[config.family].architectures.items():
        written = config_to_json(config, head)
        assert written["architectures"] == [architecture]
        assert read(written) == config
        assert read({**written, "model_type": None}) == config


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({**LLAMA, "hidden_size": None}, "no 'hidden_size'"),
        ({**LLAMA, "hidden_size": "8"}, "hidden_size='8'"),
        ({**LLAMA, "num_hidden_layers": 0}, "layers=0"),
        ({**LLAMA, "num_hidden_layers": 1.5}, r"num_hidden_layers=1.5"),
        ({**LLAMA, "num_attention_heads": True}, "num_attention_heads=True"),
        (
            {**LLAMA, "num_attention_heads": 3, "head_dim": 4, "num_key_value_heads": 2},
            "3 heads are not a multiple",
        ),
        ({**LLAMA, "head_dim": 3}, "head width 3 is odd"),
        ({**LLAMA, "hidden_act": "swiglu"}, "hidden_act='swiglu' is not supported; use one of silu"),
        ({**LLAMA, "rms_norm_eps": "small"}, "rms_norm_eps='small' is not supported; use a number"),
        ({**LLAMA, "attention_bias": "yes"}, "attention_bias='yes' is not supported; use true or false"),
        ({**LLAMA, "sliding_window": 4096}, "sliding_window=4096"),
        ({**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantized"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic'.*default, linear, llama3"),
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn", "factor": 2}}, "'yarn'.*default, linear, llama3"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one set for all layers"),
        ({**LLAMA, "rope_scaling": "linear"}, "one set for all layers"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "rope type linear has no 'factor'"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0}}, "factor=0.0 must be positive"),
        ({**LLAMA, "rope_scaling": {"type": "llama3", "factor": 8}}, "llama3 has no 'low_freq_factor'"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention=True"),
        ({**BERT, "position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({**BERT, "is_decoder": True}, "is_decoder=True"),
        ({**BERT, "num_attention_heads": 3}, "width 8 is not divisible by 3 heads"),
    ],
)
def test_refusals_name_the_value(hf, message):
    with pytest.raises(InputError, match=message) as error:
        read(hf)
    assert "\n" not in str(error.value)


def test_a_shape_from_the_settings():
    config = shape_config(Shape(vocab_size=300, embed=64, heads=4, kv_heads=2))
    assert (config.vocab_size, config.head_dim, config.kv_heads, config.tied) == (300, 16, 2, True)
    assert not shape_config(Shape(tied=False)).tied
    for wrong in ({"embed": 63}, {"heads": 0}, {"kv_heads": 3}, {"layers": -1}):
        with pytest.raises(InputError):
            shape_config(dataclasses.replace(Shape(), **wrong))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": 3}, "layer_types=3 is not a list of names"),
        ({"architectures": {"a": 1}, "model_type": None}, "is not a list of names"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not supported"),
        ({"hidden_size": float("inf")}, "hidden_size=inf is not supported; use a whole number of at least 1"),
        ({"hidden_size": float("nan")}, "hidden_size=nan is not supported"),
        ({"hidden_size": 10**30}, "is not supported; use a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 is not supported"),
        ({"rms_norm_eps": 10**400}, "is not supported; use a number"),
        ({"num_key_value_heads": 3}, "config.json: 4 heads are not a multiple of 3"),
    ],
)
def test_values_that_no_model_has_are_refused_with_the_file(change, words):
    """Fault: a TypeError, ZeroDivisionError or OverflowError came out, or a message without its place."""
    hf = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1}
    hf |= {"num_attention_heads": 4, "intermediate_size": 32} | change
    with pytest.raises(InputError, match=words) as error:
        config_from_json(hf, "config.json")
    assert str(error.value).startswith("config.json")

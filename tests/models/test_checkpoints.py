"""Files of weights: names, types, several files, and every way they can be wrong."""

import json
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from rlhf_jax.errors import InputError
from rlhf_jax.models import EncoderConfig, load_model
from rlhf_jax.models.checkpoints import INDEX, stored_tensors
from rlhf_jax.models.config_json import config_to_json
from rlhf_jax.models.encoder import Encoder
from rlhf_jax.models.families import FAMILIES
from rlhf_jax.models.transformer import Transformer

from .tiny import GPT2, LLAMA, randomised


def write(directory, config=LLAMA, head="lm"):
    """A checkpoint without `transformers`: (directory, tensors, params)."""
    model = Encoder(config) if isinstance(config, EncoderConfig) else Transformer(config, head=head)
    params = randomised(model)["params"]
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_to_json(config, head)))
    tensors = {name: tensor() for name, _, tensor in stored_tensors(params, FAMILIES[config.family])}
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors, params


def equal(params, directory, head="lm"):
    import jax

    found = load_model(directory, head=head)[1]["params"]
    assert jax.tree.structure(found) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_sizes_are_known_before_the_tensors():
    for config in (LLAMA, GPT2):
        params = randomised(Transformer(config))["params"]
        for name, size, tensor in stored_tensors(params, FAMILIES[config.family]):
            assert tensor().nbytes == size, name


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_names_with_and_without_prefix(config, tmp_path):
    directory, tensors, params = write(tmp_path, config)
    equal(params, directory)
    prefix = FAMILIES[config.family].prefix
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    assert set(bare) != set(tensors)
    save_file(bare, directory / "model.safetensors")
    equal(params, directory)


def test_the_oldest_bert_names(tmp_path):
    config = EncoderConfig(vocab_size=53, layers=2, embed=16, heads=4, mlp=24, max_positions=16)
    directory, tensors, params = write(tmp_path, config, "score")
    spelled = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    spelled["bert.embeddings.position_ids"] = np.arange(16)[None]
    spelled["cls.predictions.bias"] = np.zeros(53, np.float32)
    save_file(spelled, directory / "model.safetensors")
    equal(params, directory, "score")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_float_types_become_float32(dtype, tmp_path):
    directory, tensors, params = write(tmp_path)
    save_file(
        {name: tensor.astype(dtype) for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    found = load_model(directory)[1]["params"]["layers"]["attention"]["o"]["kernel"]
    assert found.dtype == np.float32
    wanted = np.asarray(params["layers"]["attention"]["o"]["kernel"]).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)


def shard(directory, tensors):
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    where = {name: file for file, part in parts.items() for name in part}
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))
    (directory / "model.safetensors").unlink()
    return where


def test_several_files(tmp_path):
    directory, tensors, params = write(tmp_path)
    shard(directory, tensors)
    equal(params, directory)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ('{"weight_map": {"x": "../model.safetensors"}}', r"names '\.\./model\.safetensors'"),
        ('{"weight_map": {"x": "/etc/passwd"}}', r"names '/etc/passwd'"),
        (json.dumps({"weight_map": {"x": "x" * 5000}}), "which is not a file beside it"),
        ("[" * 100_000, "not an index"),
        ('{"weight_map": {"x": "c.safetensors"}}', r"names 'c\.safetensors'"),
    ],
)
def test_a_bad_index(index, message, tmp_path):
    directory, tensors, _ = write(tmp_path)
    shard(directory, tensors)
    (directory / INDEX).write_text(index)
    with pytest.raises(InputError, match=message):
        load_model(directory)


def test_what_is_no_weight_is_left_alone(tmp_path):
    directory, tensors, params = write(tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
        "v_head.summary.weight": np.ones((1, 16), np.float32),
        "something.else": np.ones(3, np.float32),
    }
    save_file({**tensors, **extra}, directory / "model.safetensors")
    equal(params, directory)
    directory, tensors, params = write(tmp_path / "gpt2", GPT2)
    tensors["transformer.h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)
    save_file(tensors, directory / "model.safetensors")
    equal(params, directory)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), rf"no tensor '{NORM}' of shape \(16,\)"),
        (lambda t: t.update({NORM: t[NORM][:-1]}), rf"'{NORM}' has shape \(15,\), expected \(16,\)"),
        (lambda t: t.update({NORM: t[NORM].astype(np.int8)}), f"'{NORM}' is I8"),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": t[NORM]}),
            r"1 tensors, such as 'layers\.2\.input_layernorm\.weight', have no place",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t[NORM]}),
            r"'layers\.0\.self_attn\.q_proj\.bias', have no place",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"].T}),
            r"has shape \(16, 53\), expected \(53, 16\)",
        ),
    ],
    ids=["missing", "wrong shape", "quantized", "more layers", "unknown bias", "transposed"],
)
def test_tensors_that_do_not_fit(change, message, tmp_path):
    directory, tensors, _ = write(tmp_path)
    change(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / "model.safetensors")
    with pytest.raises(InputError, match=message) as error:
        load_model(directory)
    assert "\n" not in str(error.value)


def test_a_head_of_two_labels_is_a_wrong_shape(tmp_path):
    directory, tensors, _ = write(tmp_path, head="score")
    tensors["score.weight"] = np.ones((2, 16), np.float32)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(InputError, match=r"'score.weight' has shape \(2, 16\), expected \(1, 16\)"):
        load_model(directory, head="score")


def test_an_untied_model_without_unembedding_is_refused(tmp_path):
    directory, tensors, _ = write(tmp_path, GPT2)
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(InputError, match=r"no tensor 'lm_head\.weight' of shape \(53, 16\)"):
        load_model(directory)


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b[:4],
        lambda b: b"",
        lambda b: struct.pack("<Q", 2**40) + b[8:],
        lambda b: b[:8] + b"x" * 40 + b[48:],
    ],
    ids=["truncated", "only a length", "empty", "huge header", "header no JSON"],
)
def test_a_damaged_file(damage, tmp_path):
    directory, _, _ = write(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match="not a whole safetensors file") as error:
        load_model(directory)
    assert "\n" not in str(error.value)


def test_pickles_are_never_read(tmp_path):
    directory, _, _ = write(tmp_path)
    (directory / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        load_model(directory)

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was read",))

    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match=r"only pytorch_model\.bin, a pickle.*safetensors"):
        load_model(directory)


def test_files_are_marked_for_transformers(tmp_path):
    """`transformers` wants the format in the metadata; the export writes it."""
    from rlhf_jax.models.export import _write_tensors

    _write_tensors(tmp_path, randomised(Transformer(LLAMA))["params"], FAMILIES["llama"])
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert all(tensor.flags.c_contiguous for tensor in load_file(tmp_path / "model.safetensors").values())

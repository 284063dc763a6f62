"""Directories of models: config.json, headers of safetensors, their index, tokenizer files."""

import contextlib
import json
import struct

import jax
import pytest
from hypothesis import strategies as st

from rlhf_jax.data.messages import Message
from rlhf_jax.models.huggingface import open_model
from rlhf_jax.trainers.roles import load_renderer
from tests.bad_input import llama
from tests.fuzz.inputs import TEXTS, VALUES, changed, fuzz, mutated, outcome
from tests.trainers.test_course_setting import distilbert, gpt2

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small model of each kind; tests damage a file and put it back."""
    folder = tmp_path_factory.mktemp("models")
    for name, make in {"llama": llama, "gpt2": gpt2, "distilbert": distilbert}.items():
        make(folder / name)
    return folder


@contextlib.contextmanager
def file_as(path, data):
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(data)
    try:
        yield
    finally:
        path.unlink() if before is None else path.write_bytes(before)


def opened(directory, head="score"):
    """The model, its weights not read; a refusal names the directory."""
    opening = lambda: open_model(directory, head=head, dtype="float32")  # noqa: E731
    found = outcome(opening, str(directory))
    if found is not None:
        assert jax.tree.leaves(found[1].shapes)
    return found


def rendered(directory):
    """The renderer of a directory, used once."""

    def use():
        renderer = load_renderer(str(directory))
        prompt = (Message("system", "be kind"), Message("user", "how <|im_end|> are you"))
        whole = renderer.dialogue(prompt, "well", 200)
        assert whole is None or all(type(id) is int for id in whole)
        return renderer

    return outcome(use, str(directory), "chat template", "the tokenizer", "rollout.prompt_length")


JSON = ("llama", "gpt2", "distilbert")


@st.composite
def configs(draw, folders):
    name = draw(st.sampled_from(JSON))
    data = (folders / name / "config.json").read_bytes()
    if draw(st.booleans()):
        return name, draw(mutated(data))
    known = json.loads(data)
    extra = draw(st.sampled_from(EXTRA))
    value = draw(st.one_of(changed(known), VALUES.map(lambda value: known | {extra: value})))
    return name, json.dumps(value).encode()


EXTRA = (
    "architectures",
    "model_type",
    "layer_types",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "sliding_window",
    "quantization_config",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "partial_rotary_factor",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
    "n_head",
    "n_layer",
    "dim",
    "n_heads",
    "is_decoder",
)


@fuzz(st.data(), share=0.3)
def test_config_json(folders, data):
    name, config = data.draw(configs(folders))
    with file_as(folders / name / "config.json", config):
        opened(folders / name)


@fuzz(st.data(), share=0.3)
def test_end_of_sequence_ids(folders, data):
    """generation_config.json, and config.json where that says nothing."""
    directory = folders / "llama"
    name = data.draw(st.sampled_from(["generation_config.json", "config.json"]))
    known = json.loads((directory / name).read_text())
    value = data.draw(st.one_of(changed(known), VALUES.map(lambda value: known | {"eos_token_id": value})))
    silent = file_as(directory / "generation_config.json", b"{}")
    with (
        silent if name == "config.json" else contextlib.nullcontext(),
        file_as(directory / name, json.dumps(value).encode()),
    ):
        rendered(directory)


@st.composite
def tensors(draw, data):
    """A safetensors file with a damaged header, or damaged anywhere."""
    if draw(st.booleans()):
        return draw(mutated(data))
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    text = json.dumps(draw(changed(header))).encode()
    length = draw(st.sampled_from([len(text), 0, 1, len(text) - 1, len(text) + 1, 2**63, 2**64 - 1, 10**8]))
    return struct.pack("<Q", max(0, length)) + text + data[8 + size :]


@fuzz(st.data(), share=0.3)
def test_safetensors(folders, data):
    path = folders / data.draw(st.sampled_from(JSON)) / WEIGHTS
    with file_as(path, data.draw(tensors(path.read_bytes()))):
        opened(path.parent)


@fuzz(st.data(), share=0.3)
def test_index_of_safetensors(folders, data):
    names = st.sampled_from(
        [WEIGHTS, "../llama/" + WEIGHTS, "/etc/passwd", "..", ".", "", "a\0b", "config.json"]
    )
    index = {
        "metadata": {},
        "weight_map": data.draw(st.dictionaries(TEXTS, st.one_of(names, TEXTS), max_size=3)),
    }
    text = data.draw(
        st.one_of(changed(index).map(json.dumps).map(str.encode), mutated(json.dumps(index).encode()))
    )
    directory = folders / "gpt2"
    hidden = (directory / WEIGHTS).rename(directory / "hidden")
    try:
        with file_as(directory / (WEIGHTS + ".index.json"), text):
            opened(directory)
    finally:
        hidden.rename(directory / WEIGHTS)


@fuzz(st.data(), share=0.3)
def test_tokenizer_files(folders, data):
    directory = folders / "llama"
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]))
    path = directory / name
    before = path.read_bytes() if path.exists() else b"{}"
    known = json.loads(before)
    damaged = data.draw(st.one_of(mutated(before), changed(known).map(json.dumps).map(str.encode)))
    with file_as(path, damaged):
        rendered(directory)

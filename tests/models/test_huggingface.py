"""Parity with `transformers`: every family and variant, both padding sides, against unpadded rows."""

import json
import logging

import jax
import numpy as np
import pytest

from rlhf_jax.errors import InputError
from rlhf_jax.models import eos_token_ids, load_model, load_tokenizer, read_hf_config
from rlhf_jax.models.attention import rope_frequencies

from . import checkpoints
from .tiny import call

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # models this small only wait for each other

DECODERS = {
    "gpt2": ("gpt2", {}),
    "gpt2 untied, own width": ("gpt2", {"tie_word_embeddings": False, "n_inner": 40}),
    "llama grouped-query": ("llama", {}),
    "llama tied, multi-query": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama own head width": ("llama", {"head_dim": 12}),
    "llama theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": {**checkpoints.LLAMA3, "rope_theta": 100.0}}),
}


def outputs(model, variables, rows, side):
    tokens, mask = checkpoints.pad(rows, side)
    out = np.asarray(call(model, None, variables, tokens, mask))
    if out.ndim < 3:
        return list(out)
    return [checkpoints.log_softmax(out[i][mask[i]]) for i in range(len(rows))]


def assert_parity(model, directory, head):
    rows = checkpoints.ragged()
    expected = checkpoints.torch_outputs(model, rows)
    ours, variables = load_model(directory, head=head)
    for side in ("left", "right"):
        for found, wanted in zip(outputs(ours, variables, rows, side), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0, err_msg=side)


@pytest.mark.parametrize("variant", DECODERS)
def test_logprobs_equal(variant, tmp_path):
    family, changes = DECODERS[variant]
    model = checkpoints.hf_model(family, **changes)
    assert_parity(model, checkpoints.save(model, tmp_path), "lm")


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "distilbert"])
def test_scores_equal(family, tmp_path):
    model = checkpoints.hf_model(family, "score")
    assert_parity(model, checkpoints.save(model, tmp_path), "score")


def test_the_older_rope_keys(tmp_path):
    """rope_theta and rope_scaling count as rope_parameters do."""
    theta, scaling = 100.0, {**checkpoints.LLAMA3, "type": "llama3"}
    model = checkpoints.hf_model("llama", rope_parameters={**checkpoints.LLAMA3, "rope_theta": theta})
    checkpoints.save(model, tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert_parity(model, tmp_path, "lm")


def test_long_positions_follow_transformers(tmp_path):
    """Angles at position 8000 need the same float32 frequencies, not better ones."""
    model = checkpoints.hf_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    ours, _ = load_model(checkpoints.save(model, tmp_path))
    frequencies = rope_frequencies(ours.config.rope, ours.config.head_dim)
    np.testing.assert_allclose(8000 * frequencies, 8000 * model.model.rotary_emb.inv_freq.numpy(), atol=1e-3)


@pytest.mark.parametrize("family", ["gpt2", "distilbert"])
def test_a_bare_backbone_gets_a_fresh_seeded_head(family, tmp_path, caplog):
    checkpoints.save(checkpoints.hf_model(family, None), tmp_path)
    with caplog.at_level(logging.WARNING, "rlhf_jax"):
        _, first = load_model(tmp_path, head="score", seed=1)
    assert "fresh" in caplog.text
    assert "head/" in caplog.text
    again, other = (load_model(tmp_path, head="score", seed=seed)[1]["params"] for seed in (1, 2))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), first["params"], again)
    assert all(jax.tree.leaves(same))
    leaf = "kernel" if family in ("gpt2", "llama") else "classifier"
    a, b = (jax.tree.leaves(tree["head"][leaf])[-1] for tree in (again, other))
    assert a.std() > 0
    assert (np.asarray(a) != np.asarray(b)).any()


def test_value_and_score_are_one_head(tmp_path):
    checkpoints.save(checkpoints.hf_model("llama", "score"), tmp_path)
    scorer, variables = load_model(tmp_path, head="score")
    critic, same = load_model(tmp_path, head="value")
    assert jax.tree.structure(variables) == jax.tree.structure(same)
    tokens, mask = checkpoints.pad(checkpoints.ragged(), "right")
    values = call(critic, None, variables, tokens, mask)
    scores = call(scorer, None, variables, tokens, mask)
    last = mask.sum(-1) - 1
    np.testing.assert_allclose(scores, np.asarray(values)[np.arange(3), last], rtol=1e-5)


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters(tmp_path):
    model = checkpoints.hf_model("llama")
    checkpoints.save(model, tmp_path)
    low, variables = load_model(tmp_path, dtype="bfloat16")
    high, _ = load_model(tmp_path)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(variables))
    tokens, mask = checkpoints.pad(checkpoints.ragged(), "left")
    a, b = (call(model, None, variables, tokens, mask) for model in (low, high))
    assert a.dtype == np.float32
    # bfloat16 keeps 8 bits: a few per cent of the logits' spread after two layers
    assert float(np.abs(np.asarray(a - b))[mask].mean()) < 0.05 * float(np.asarray(b)[mask].std())


def test_dropout_of_the_configuration_is_off(tmp_path):
    """Training frameworks leave it on in critics and reward models; here no module draws a random number."""
    checkpoints.save(checkpoints.hf_model("bert", "score", hidden_dropout_prob=0.5), tmp_path)
    model, variables = load_model(tmp_path, head="score")
    tokens, mask = checkpoints.pad(checkpoints.ragged(), "left")
    program = str(jax.make_jaxpr(model.apply)(variables, tokens, mask))
    assert "random_bits" not in program
    assert "threefry" not in program


def test_eos_ids_come_from_tokenizer_and_generation_config(tmp_path):
    tokenizer = checkpoints.tokenizer()
    tokenizer.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 5}))
    loaded = load_tokenizer(tmp_path)
    assert loaded("hello <eos>").input_ids == tokenizer("hello <eos>").input_ids
    assert eos_token_ids(tmp_path, loaded) == (0, 5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 0, 8]}))
    assert eos_token_ids(tmp_path, loaded) == (0, 9, 8)
    loaded.eos_token = None
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="end-of-sequence"):
        eos_token_ids(tmp_path, loaded)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/place/at/all", "not a directory"),
        ("", "not a directory"),
        ("./nowhere", "not a directory"),
        ("nobody/no-such-model", "neither a directory nor a model that the hub gives"),
        ("not a name", "neither a directory nor a model that the hub gives"),
    ],
)
def test_a_name_that_is_nothing(name, message):
    with pytest.raises(InputError, match=message) as error:
        load_model(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json does not exist"),
        (b"", "is not JSON"),
        (b'{"model_type": "llama"', "is not JSON"),
        (b'{"model_type": "\xff"}', "is not JSON"),
        (b"[1]", "expected a JSON object"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", r"model_type None is not supported.*LlamaForCausalLM"),
        (b'{"architectures": ["MambaForCausalLM"]}', "MambaForCausalLM is not supported.*llama"),
        (b'{"model_type": "mamba"}', "'mamba' is not supported.*distilbert"),
    ],
)
def test_a_bad_config_json(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(InputError, match=message) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


def test_heads_and_types_that_do_not_exist(tmp_path):
    checkpoints.save(checkpoints.hf_model("bert", "score"), tmp_path)
    with pytest.raises(InputError, match="'values' is unknown; use one of lm, value, score"):
        load_model(tmp_path, head="values")
    for head in ("lm", "value"):
        with pytest.raises(InputError, match=f"sees the future.*'{head}'"):
            load_model(tmp_path, head=head)
    with pytest.raises(InputError, match=r"float16.*float32, bfloat16"):
        load_model(tmp_path, head="score", dtype="float16")


def test_a_directory_without_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="no tokenizer that can be read"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head"), [("smollm2-135m-instruct", "lm"), ("minilm-l6", "score")])
def test_real_models(name, head, real_models, tmp_path):
    """Within max(1e-4, 4 x transformers' own float32-against-float64 difference) on the same input."""
    import transformers

    tokenizer = load_tokenizer(real_models / name)
    texts = [
        "The capital of France is Paris.",
        "Human: How do I sort a list in Python?\n\nAssistant: Call sorted() on it.",
    ]
    rows = [tokenizer(text).input_ids for text in texts]
    directory = real_models / name
    if head == "score":  # a classifier of its own, so that there is something to compare
        loader = transformers.AutoModelForSequenceClassification
        torch.manual_seed(0)
        reference = loader.from_pretrained(str(directory), num_labels=1, dtype=torch.float32).eval()
        reference.save_pretrained(str(tmp_path))
        directory = tmp_path
    else:
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=torch.float32
        ).eval()
    single = checkpoints.torch_outputs(reference, rows)
    double = checkpoints.torch_outputs(reference.double(), rows)
    own = max(float(np.abs(a - b).max()) for a, b in zip(single, double, strict=True))
    model, variables = load_model(directory, head=head)
    for side in ("left", "right"):
        tokens, mask = checkpoints.pad(rows, side, width=32)
        out = np.asarray(call(model, None, variables, tokens, mask))
        for i, wanted in enumerate(single):
            found = out[i] if head == "score" else checkpoints.log_softmax(out[i][mask[i]])
            np.testing.assert_allclose(found, wanted, atol=max(1e-4, 4 * own), rtol=0)


def test_extra_is_read_back(tmp_path):
    (tmp_path / "config.json").write_text('{"rlhf_jax": {"gain": 2.0}}')
    assert read_hf_config(tmp_path)["rlhf_jax"] == {"gain": 2.0}


@pytest.mark.parametrize("ids", [float("nan"), float("inf"), {}, "2", [2, "3"], True, -1, 2.5])
def test_end_of_sequence_ids_that_are_none(ids, tmp_path):
    """Fault: int() was asked what they are, and raised, or made 2 of 2.5."""
    tokenizer = checkpoints.tokenizer()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": ids}))
    with pytest.raises(InputError, match="is neither a token id nor a list of them; mend it in"):
        eos_token_ids(tmp_path, tokenizer)


def test_a_tokenizer_that_fails_in_use_is_refused_when_it_is_read(tmp_path):
    """Fault: what tokenizer_config.json holds was looked at only with the first text, in a traceback."""
    checkpoints.tokenizer().save_pretrained(str(tmp_path))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": []}))
    with pytest.raises(InputError, match=r"has no tokenizer that can be read .*; save tokenizer\.json"):
        load_tokenizer(tmp_path)

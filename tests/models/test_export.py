"""Round trips: `transformers` -> load -> export -> `transformers`, with equal weights and outputs."""

import json

import numpy as np
import pytest

from rlhf_jax.errors import InputError
from rlhf_jax.models import export, export_model, load_model, load_tokenizer, read_hf_config, unstack_layers
from rlhf_jax.models.lora import join, learnt, merged, with_adapters
from rlhf_jax.settings import Lora

from . import checkpoints
from .test_weights import layout
from .tiny import call, randomised

torch = pytest.importorskip("torch")

VARIANTS = {
    "gpt2": ("gpt2", "lm", {}),
    "gpt2 untied": ("gpt2", "lm", {"tie_word_embeddings": False}),
    "llama": ("llama", "lm", {}),
    "llama tied, biases": (
        "llama",
        "lm",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "llama linear": (
        "llama",
        "lm",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}},
    ),
    "llama llama3": ("llama", "lm", {"rope_parameters": {**checkpoints.LLAMA3, "rope_theta": 100.0}}),
    "gpt2 score": ("gpt2", "score", {}),
    "llama score": ("llama", "score", {}),
    "bert": ("bert", "score", {}),
    "distilbert": ("distilbert", "score", {}),
}


def reload(directory, head):
    """As a user would: the class comes from the head, everything else from the directory."""
    import transformers

    auto = {"lm": transformers.AutoModelForCausalLM, "score": transformers.AutoModelForSequenceClassification}
    model, info = auto[head].from_pretrained(str(directory), output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(variant, tmp_path):
    family, head, changes = VARIANTS[variant]
    first = checkpoints.hf_model(family, head, **changes)
    model, variables = load_model(checkpoints.save(first, tmp_path / "in"), head=head)
    tokenizer = checkpoints.tokenizer(pad="<pad>", template="{{ messages[0].content }}")
    export_model(tmp_path / "out", model, variables, tokenizer=tokenizer, extra={"gain": 2.0})
    second = reload(tmp_path / "out", head)
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(theirs[name].numpy(), tensor.numpy(), err_msg=name)
    rows = checkpoints.ragged()
    for a, b in zip(*(checkpoints.torch_outputs(m, rows) for m in (first, second)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    again, _ = load_model(tmp_path / "out", head=head)
    assert again == model
    assert read_hf_config(tmp_path / "out")["rlhf_jax"] == {"gain": 2.0}
    loaded = load_tokenizer(tmp_path / "out")
    assert loaded("hello <eos> there").input_ids == tokenizer("hello <eos> there").input_ids
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert loaded.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("pad", [None, "<eos>", "<pad>"], ids=["no pad", "pad is eos", "own pad"])
def test_transformers_reads_the_score_at_the_last_valid_token(family, pad, tmp_path):
    """Scores of rows that end in EOS, padded on either side by the exported tokenizer, are ours."""
    tokenizer = checkpoints.tokenizer(pad=pad)
    source = checkpoints.hf_model(family, "score", vocab_size=len(tokenizer))
    model, variables = load_model(checkpoints.save(source, tmp_path / "in"), head="score")
    export_model(tmp_path / "out", model, variables, tokenizer=tokenizer)
    exported, own = reload(tmp_path / "out", "score"), load_tokenizer(tmp_path / "out")
    assert tokenizer.pad_token == pad
    assert exported.config.pad_token_id == own.pad_token_id != own.eos_token_id
    assert exported.config.vocab_size == len(tokenizer) + (pad != "<pad>")
    texts = ["hello<eos>", "hello there, hello<eos>", "world<eos>"]
    width = 14
    rows = [tokenizer(text).input_ids for text in texts]
    ours = call(model, None, variables, *checkpoints.pad(rows, "right", width))
    for side in ("left", "right"):
        encoded = own(texts, padding="max_length", max_length=width, padding_side=side, return_tensors="pt")
        with torch.no_grad():
            positions = (encoded.attention_mask.cumsum(-1) - 1).clamp(min=0)
            scores = exported(
                encoded.input_ids, attention_mask=encoded.attention_mask, position_ids=positions
            ).logits[:, 0]
        np.testing.assert_allclose(scores, ours, atol=1e-4, err_msg=side)
    back, grown = load_model(tmp_path / "out", head="score")
    np.testing.assert_allclose(
        call(back, None, grown, *checkpoints.pad(rows, "left", width)), ours, atol=1e-5
    )


def made(tmp_path, head="lm"):
    model, variables = load_model(
        checkpoints.save(checkpoints.hf_model("gpt2", head), tmp_path / "in"), head=head
    )
    return model, variables, checkpoints.tokenizer(pad="<pad>")


def test_a_value_model_keeps_its_head(tmp_path):
    _, variables, tokenizer = made(tmp_path, "score")
    model, _ = load_model(tmp_path / "in", head="value")
    export_model(tmp_path / "out", model, variables, tokenizer=tokenizer)
    kernel = load_model(tmp_path / "out", head="value")[1]["params"]["head"]["kernel"]
    np.testing.assert_array_equal(kernel, variables["params"]["head"]["kernel"])


def test_unrolled_parameters_and_several_files(tmp_path, monkeypatch):
    model, variables, tokenizer = made(tmp_path)
    params = {"params": unstack_layers(variables["params"])}
    monkeypatch.setattr(export, "SHARD_BYTES", 30_000)
    export_model(
        tmp_path / "out", model.clone(scan_layers=False), params, tokenizer=tokenizer, eos_ids=(0, 9)
    )
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    _, again = load_model(tmp_path / "out")
    for path in ("embed", "final_norm"):
        for leaf, value in variables["params"][path].items():
            np.testing.assert_array_equal(again["params"][path][leaf], value)
    exported = reload(tmp_path / "out", "lm")
    assert exported.generation_config.eos_token_id == [0, 9]


def test_replaces_an_earlier_export_and_nothing_else(tmp_path):
    model, variables, tokenizer = made(tmp_path)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    for taken in (mine, mine / "thesis.txt", tmp_path / "in"):
        with pytest.raises(InputError, match="is no earlier export"):
            export_model(taken, model, variables, tokenizer=tokenizer)
    assert (mine / "thesis.txt").read_text() == "years of work"
    for step in (1, 2):
        export_model(tmp_path / "out", model, variables, tokenizer=tokenizer, extra={"step": step})
    assert read_hf_config(tmp_path / "out")["rlhf_jax"]["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "mine", "out"]


def test_a_failure_leaves_the_earlier_export(tmp_path, monkeypatch):
    model, variables, tokenizer = made(tmp_path)
    export_model(tmp_path / "out", model, variables, tokenizer=tokenizer, extra={"step": 1})

    def full(*_args, **_kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        export_model(tmp_path / "out", model, variables, tokenizer=tokenizer, extra={"step": 2})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rlhf_jax"] == {"step": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 1, 8), (2, 2, 2)], ids=["fsdp 8", "tensor 8", "2 x 2 x 2"])
@pytest.mark.parametrize(("family", "head"), [("llama", "lm"), ("gpt2", "score"), ("bert", "score")])
def test_shards_of_any_mesh_give_the_same_files(family, head, sizes, tmp_path):
    source = checkpoints.save(checkpoints.hf_model(family, head, vocab_size=304), tmp_path / "in")
    tokenizer = checkpoints.tokenizer()
    for name, shardings in (("one", None), ("eight", layout(*sizes))):
        model, variables = load_model(source, head=head, shardings=shardings)
        export_model(tmp_path / name, model, variables, tokenizer=tokenizer)
    one, eight = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "eight"))
    assert one == eight
    assert "model.safetensors" in one


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_adapters_are_merged_into_what_transformers_loads(family, tmp_path):
    """Convolution kernels lie the other way round than linear ones."""
    base, variables = load_model(
        checkpoints.save(checkpoints.hf_model(family, "lm"), tmp_path / "in"), head="lm"
    )
    lora = Lora(rank=2, alpha=4.0)
    model = with_adapters(base, lora)
    params = join(variables["params"], learnt(randomised(model)["params"]))
    export_model(tmp_path / "out", model, {"params": merged(params, lora)}, tokenizer=checkpoints.tokenizer())
    rows = checkpoints.ragged()
    tokens, mask = checkpoints.pad(rows, "right")
    ours = checkpoints.log_softmax(call(model, "__call__", {"params": params}, tokens, mask))
    plain = checkpoints.log_softmax(call(base, "__call__", variables, tokens, mask))
    for i, theirs in enumerate(checkpoints.torch_outputs(reload(tmp_path / "out", "lm"), rows)):
        np.testing.assert_allclose(ours[i, : len(rows[i])], theirs, atol=1e-4)
        assert np.abs(plain[i, : len(rows[i])] - theirs).max() > 0.1

"""A folder of files and models, few of them as they should be."""

import gzip
import json
import shutil

from safetensors.numpy import load_file, save_file

from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.models.configs import TransformerConfig
from rlhf_jax.models.export import export_model
from rlhf_jax.models.parameters import init_model
from tests.trainers.test_course_setting import TEXTS, dialogue, distilbert, gpt2

FUNCTIONS = """
def raises(prompts, responses):
    return 1 / 0

def score(prompts, responses):
    return [float(len(response)) for response in responses]

number = 3
"""
ROWS = [json.dumps({side: dialogue(i, side) for side in ("chosen", "rejected")}) for i in range(64)]
EQUAL = json.dumps({"chosen": dialogue(1, "chosen"), "rejected": dialogue(1, "chosen")})
OTHER_PROMPT = json.dumps({"chosen": dialogue(1, "chosen"), "rejected": dialogue(2, "rejected")})
NO_ANSWER = json.dumps({"chosen": "\n\nHuman: a\n\nAssistant:", "rejected": "\n\nHuman: a\n\nAssistant: b"})


def with_row(number, row):
    rows = [line.encode() for line in ROWS]
    rows[number - 1] = row
    return b"\n".join(rows)


FILES = {
    "pairs.jsonl": "\n".join(ROWS).encode(),
    "empty.jsonl": b"",
    "cut.jsonl.gz": gzip.compress("\n".join(ROWS).encode())[:300],
    "plain.jsonl.gz": "\n".join(ROWS).encode(),
    "no_json.jsonl": with_row(4, b'{"chosen": '),
    "no_utf8.jsonl": with_row(5, b'{"chosen": "\xff"}'),
    "no_key.jsonl": with_row(3, b'{"chosen": "a"}'),
    "no_pair.jsonl": "\n".join([EQUAL, OTHER_PROMPT, NO_ANSWER]).encode(),
    "broken.parquet": b"PAR1",
    "table.csv": b"a,b",
    "functions_of_bad_input.py": FUNCTIONS.encode(),
    "broken_of_bad_input.py": b"def score(:\n",
    "empty.yaml": b"",
}


def llama(directory, *, head="lm", max_positions=128):
    tokenizer = train_tokenizer(TEXTS, 300)
    config = TransformerConfig(
        vocab_size=len(tokenizer), layers=1, embed=16, heads=2, kv_heads=2, head_dim=8, mlp=32,
        max_positions=max_positions,
    )  # fmt: skip
    export_model(directory, *init_model(config, head=head), tokenizer=tokenizer)


def changed(source, directory, **keys):
    """A copy with other keys in config.json."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text()) | keys
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def without_tensor(directory, name):
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def fewer_rows(directory, count):
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:count]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def without_eos(directory):
    (directory / "chat_template.jinja").unlink()
    (directory / "generation_config.json").unlink()
    path = directory / "tokenizer_config.json"
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key != "eos_token"}
    path.write_text(json.dumps(kept))


def make_world(folder):
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    llama(folder / "llama")
    llama(folder / "short_llama", max_positions=32)
    llama(folder / "reward_model", head="score", max_positions=48)
    gpt2(folder / "gpt2")
    distilbert(folder / "encoder")
    changed(folder / "llama", folder / "mamba", model_type="mamba", architectures=["MambaForCausalLM"])
    changed(folder / "llama", folder / "other_shape", hidden_size=32)
    changed(folder / "llama", folder / "more_layers", num_hidden_layers=2)
    without_tensor(changed(folder / "reward_model", folder / "no_head"), "score.weight")
    fewer_rows(changed(folder / "llama", folder / "few_rows", vocab_size=250), 250)
    without_eos(changed(folder / "llama", folder / "no_eos", eos_token_id=None))
    (changed(folder / "llama", folder / "no_weights") / "model.safetensors").unlink()
    weights = changed(folder / "llama", folder / "cut_weights") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (changed(folder / "llama", folder / "no_tokenizer") / "tokenizer.json").unlink()
    (folder / "no_tokenizer" / "tokenizer_config.json").unlink()
    (changed(folder / "llama", folder / "no_config") / "config.json").unlink()

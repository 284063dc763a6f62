"""A tiny model as a directory, and a file of pairs."""

import gzip
import json
import pathlib
import sys

import pytest

from rlhf_jax.data.synthetic import synthetic_preferences
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.models.configs import TransformerConfig
from rlhf_jax.models.export import export_model
from rlhf_jax.models.parameters import init_model
from rlhf_jax.trainers.inputs import texts_of

# The scripts import each other by name, as they do where they are started.
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    tokenizer = train_tokenizer(texts_of(synthetic_preferences(50, 0)), vocab_size=300)
    config = TransformerConfig(
        vocab_size=len(tokenizer),
        layers=1,
        embed=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        mlp=8,
        max_positions=512,
    )
    model, variables = init_model(config, head="lm", dtype="float32", seed=0)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    export_model(directory, model, variables, tokenizer=tokenizer)
    return directory


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory):
    """Sixty pairs as HH text, of lengths that differ."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl.gz"
    with gzip.open(file, "wt") as out:
        for i in range(60):
            start = f"\n\nHuman: {'why ' * (1 + i % 5)}{i}?\n\nAssistant:"
            print(
                json.dumps({"chosen": f"{start} yes{' yes' * (i % 7)}", "rejected": f"{start} no"}), file=out
            )
    return file

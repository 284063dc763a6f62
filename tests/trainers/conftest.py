"""A world small enough to train in a test: a tokenizer, pairs, and models of some thousand parameters."""

import pytest

from rlhf_jax.config import load_config

SHAPE = ["vocab_size=300", "layers=2", "embed=16", "heads=4", "kv_heads=2", "mlp=32", "max_positions=128"]
TINY = [
    *(f"policy.shape.{item}" for item in SHAPE),
    *(f"reward.shape.{item}" for item in SHAPE),
    "data.limit=64",
    "data.validation_fraction=0.2",
    "reward.batch_size=8",
    "reward.max_length=120",
    "reward.learning_rate=1e-2",
    "reward.eval_every=3",
    "sft.batch_size=8",
    "sft.max_length=120",
    "sft.learning_rate=1e-2",
    "sft.eval_every=3",
    "ppo.iterations=3",
    "ppo.batch_size=8",
    "ppo.minibatches=2",
    "ppo.learning_rate=1e-2",
    "critic.learning_rate=1e-2",
    "rollout.prompt_length=40",
    "rollout.response_length=8",
    "eval.prompts=6",
    "eval.batch_size=8",
    "placement.train.fsdp=2",
    "placement.train.tensor=2",
    "run.save_every=1",
    "run.profile_every=2",
]


@pytest.fixture
def tiny(tmp_path):
    """A function of `key=value` strings that gives the configuration of a tiny run in a folder of its own."""

    def configure(*overrides):
        return load_config(None, [*TINY, f"run.dir={tmp_path / 'run'}", *overrides])

    return configure

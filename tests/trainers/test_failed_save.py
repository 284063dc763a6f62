"""A save that fails in the background ends a run after the step being done, not at the next save."""

import json

import pytest

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.errors import InputError
from rlhf_jax.trainers import pipeline

REWARD = "reward.function=tests.trainers.test_pipeline:shortest"


@pytest.mark.parametrize(("phase", "logged"), [("sft", [1, 2]), ("ppo", [1])], ids=["sft", "ppo"])
def test_a_run_ends_between_two_saves(phase, logged, tiny, tmp_path, monkeypatch):
    """PPO logs an iteration while the next one runs, and both are done again by the run that goes on."""
    looked = []

    def look(checkpoints):
        looked.append(checkpoints.directory.name)
        if len(looked) == 2:
            raise InputError("no room for what was written in the background")

    monkeypatch.setattr(Checkpoints, "look", look)
    run = {"sft": pipeline.sft, "ppo": pipeline.ppo}[phase]
    with pytest.raises(InputError, match="no room"):
        run(tiny(REWARD, "run.save_every=0", f"sft.epochs={int(phase == 'sft')}", "sft.eval_every=100"))
    assert looked == [phase] * 2
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [record["step"] for record in map(json.loads, lines) if record["phase"] == phase] == logged

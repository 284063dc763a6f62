"""Rewards that fail in the middle of a run: what was done is saved, and the same command goes on exactly."""

import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.config import load_config
from rlhf_jax.metrics import read_metrics
from rlhf_jax.rollout.scored import RewardFault
from rlhf_jax.trainers import pipeline
from tests.trainers.conftest import TINY
from tests.trainers.test_dump import SMALL

CALLS, FAILING = [], set()


def may_fail(prompts, responses):
    """Lengths; a call of several responses whose number is in FAILING raises."""
    if len(responses) > 1:
        CALLS.append(len(responses))
        if len(CALLS) in FAILING:
            raise ConnectionError("the judge is away")
    return [float(len(response)) for response in responses]


def some_fail(prompts, responses):
    """Raises over responses of odd length."""
    if any(len(response) % 2 for response in responses):
        raise ValueError("odd")
    return [float(len(response)) for response in responses]


def start(directory, function="may_fail", *more):
    settings = [*TINY, *SMALL, f"reward.function={__name__}:{function}", "ppo.iterations=4", "eval.every=2"]
    settings += ["run.save_every=100", "run.profile_every=0", "ppo.kl_target=3.0", *more]
    pipeline.ppo(load_config(None, [*settings, f"run.dir={directory}"]))


def timeless(directory):
    return [
        {name: value for name, value in record.items() if not name.startswith(("timing_", "perf/"))}
        for record in read_metrics(directory)
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run of a reward that never fails: two rollouts, an evaluation, and both again."""
    directory = tmp_path_factory.mktemp("rewards") / "run"
    FAILING.clear()
    start(directory)
    return directory


@pytest.mark.slow
def test_a_run_whose_reward_failed_goes_on_bit_equal(undisturbed, tmp_path):
    """Once in the first evaluation, once in the last rollout, each after saving what was done."""
    CALLS.clear()
    FAILING.update({3, 6})
    directory = tmp_path / "run"
    for saved, what in ((2, "held-out prompt"), (3, "prompt")):
        with pytest.raises(RewardFault, match=f"the judge is away.* for {what}s "):
            start(directory)
        assert max(Checkpoints(directory, "ppo", keep=2).steps()) == saved
    start(directory)
    assert timeless(directory) == timeless(undisturbed)
    assert all(record["reward/failed"] == 0 for record in timeless(directory) if record["phase"] == "ppo")
    ours, theirs = (load_file(d / "best_policy" / "model.safetensors") for d in (directory, undisturbed))
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_a_reward_that_fails_at_once_leaves_nothing_behind(tmp_path):
    with pytest.raises(RewardFault, match="odd"):
        start(tmp_path / "run", "some_fail")
    assert not pathlib.Path(tmp_path / "run").exists()


@pytest.mark.slow
def test_responses_that_cannot_be_scored_get_the_fallback_and_are_counted(tmp_path, caplog):
    start(tmp_path / "run", "some_fail", "reward.fallback=-5", "ppo.iterations=1", "eval.every=1")
    (step, evaluation) = timeless(tmp_path / "run")
    assert 0 < step["reward/failed"] < 8
    assert evaluation["eval/failed"] > 0
    assert step["reward/score_mean"] != -5
    assert any("scored -5 (reward.fallback)" in record.getMessage() for record in caplog.records)

"""A run that is stopped goes on with another layout, or on other devices, with the same numbers."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.config import load_config, to_yaml
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.trainers import pipeline
from rlhf_jax.trainers.ppo_loop import train_ppo
from tests.trainers.conftest import TINY
from tests.two_processes import environment

ROOT = pathlib.Path(__file__).parents[2]
# A float32 sum over other shards may be added in another order; a ratio near 1 shows it most.
RTOL, ATOL = 2e-3, 2e-5


def layout(data, fsdp, tensor):
    return [f"placement.train.{k}={v}" for k, v in (("data", data), ("fsdp", fsdp), ("tensor", tensor))]


def settings(run_dir, iterations, sizes):
    return [
        *(line for line in TINY if not line.startswith("placement.")),
        f"run.dir={run_dir}",
        f"ppo.iterations={iterations}",
        "reward.function=tests.trainers.test_pipeline:shortest",
        "sft.epochs=0",
        "ppo.minibatches=1",
        "eval.every=2",
        "run.keep=3",
        "run.save_every=2",
        *layout(*sizes),
    ]


def go_on(run_dir, iterations, devices, sizes):
    file = run_dir.with_suffix(".yaml")
    file.write_text(to_yaml(load_config(None, settings(run_dir, iterations, sizes))))
    command = [sys.executable, "-m", "rlhf_jax", "ppo", str(file)]
    ended = subprocess.run(
        command, env=environment(devices), capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def numbers(run_dir):
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    timed = ("timing_", "perf/")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in records]


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """A run that went from 2 x 2 x 2 to 8 x 1 x 1 to one device, two iterations on each."""
    run_dir = tmp_path_factory.mktemp("runs") / "moved"
    for iterations, devices, sizes in ((2, 8, (2, 2, 2)), (4, 8, (8, 1, 1)), (6, 1, (1, 1, 1))):
        go_on(run_dir, iterations, devices, sizes)
    return run_dir


@pytest.mark.slow
def test_a_run_that_moves_gives_the_numbers_of_one_that_stays(moved, tmp_path):
    still = tmp_path / "still"
    go_on(still, 6, 8, (2, 2, 2))
    expected, found = numbers(still), numbers(moved)
    assert [(r["phase"], r["step"]) for r in found] == [(r["phase"], r["step"]) for r in expected]
    assert {r["step"] for r in found} == {1, 2, 3, 4, 5, 6}
    for ours, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            if not isinstance(value, str):
                np.testing.assert_allclose(
                    ours[name], value, rtol=RTOL, atol=ATOL, err_msg=f"{name} {theirs}"
                )


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_restored_state_is_the_same_to_the_bit_on_any_mesh(moved, step):
    states = []
    for count, sizes in ((8, (2, 2, 2)), (8, (8, 1, 1)), (1, (1, 1, 1))):
        config = load_config(None, settings(moved, 6, sizes if count > 1 else (-1, 1, 1)))
        with pipeline._job(config, "export") as job:
            views = make_views(load_config(None, settings(moved, 6, sizes)), jax.devices()[:count])
            task, _ = pipeline._ppo_task(dataclasses.replace(job, views=views))
        learner, _ = Checkpoints(moved, "ppo", keep=3).restore(step, task.steps.learner_shapes)
        for leaf, wanted in zip(
            jax.tree.leaves(learner), jax.tree.leaves(task.steps.learner_shapes), strict=True
        ):
            assert leaf.sharding == wanted.sharding
        states.append(learner)
    assert int(states[0].iteration) == step
    for other in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, states[0], other)


@pytest.mark.slow
def test_a_run_that_goes_on_makes_no_fresh_learner(moved):
    """It would lie beside the restored one, and take its memory once more."""
    config = load_config(None, settings(moved, 6, (1, 4, 2)))
    with pipeline._job(config, "ppo") as job:
        task, _ = pipeline._ppo_task(job)
        unwanted = lambda: pytest.fail("a fresh learner was made")  # noqa: E731
        learner = train_ppo(task, job.path, unwanted, job.metrics, job.clock)
    assert int(learner.iteration) == 6

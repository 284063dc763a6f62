"""Roles on devices of their own: the numbers of one shared grid, and what is in memory when."""

import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.sharding.placement import make_views
from rlhf_jax.sharding.reshard import to_devices
from rlhf_jax.sharding.rules import batch_sharding, in_view
from rlhf_jax.trainers import pipeline, ppo_loop
from tests.sharding.test_reshard import live_bytes

from .conftest import TINY
from .test_ppo import assert_equal_runs, configure, on_one_device, one_iteration

TRAIN = ["placement.train.devices=0-3", "placement.train.fsdp=2", "placement.train.tensor=2"]
SPLITS = {
    "generation apart": [*TRAIN, "placement.generate.devices=4-7", "placement.generate.tensor=2"],
    "each role apart": [
        "placement.train.devices=0-1",
        "placement.train.fsdp=2",
        "placement.generate.devices=2-3",
        "placement.generate.tensor=2",
        "placement.critic.devices=4-5",
        "placement.critic.tensor=2",
        "placement.reference.devices=6-7",
        "placement.reward.devices=6-7",
    ],
    "generation on fewer": [
        "placement.train.devices=0-3",
        "placement.generate.devices=4-5",
        "placement.critic.devices=6",
    ],
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_split_roles_give_the_numbers_of_one_device(split):
    """Tokens are equal, advantages and parameters within rounding; every role's arrays stay where it is."""
    result = one_iteration(configure(*split))
    assert_equal_runs(jax.device_get(result), on_one_device())
    trained = {device for leaf in jax.tree.leaves(result["actor"]) for device in leaf.sharding.device_set}
    learnt = {device for leaf in jax.tree.leaves(result["critic"]) for device in leaf.sharding.device_set}
    assert max(device.id for device in trained) < 4
    if any(item.startswith("placement.critic") for item in split):
        assert not trained & learnt


def test_work_on_disjoint_devices_overlaps():
    """What is dispatched later on other devices is done first, with a move between the two still to come.

    A step or a move that stopped the host would leave half of the devices idle. The long work is on one
    device, because the CPU runtime launches programs of several devices one after another.
    """
    placement = [f"placement.{role}.devices=0-3" for role in ("train", "critic", "reference", "reward")]
    views = make_views(configure(*placement, "placement.generate.devices=4"))

    def chain(x_BT):
        return jax.lax.fori_loop(0, 1000, lambda _, y: jnp.tanh(y @ y.T @ y), x_BT)

    rows = jax.device_put(np.ones((256, 256), np.float32), batch_sharding(views.train))
    there = to_devices(rows, batch_sharding(views.generate))
    long = in_view(views.generate, chain, out_shardings=batch_sharding(views.generate))
    short = in_view(views.train, lambda x_BT: x_BT + 1.0)
    jax.block_until_ready((to_devices(long(there), batch_sharding(views.train)), short(rows)))

    started = time.perf_counter()
    generated = long(there)
    moved = to_devices(generated, batch_sharding(views.train))
    jax.block_until_ready(short(rows))
    first_done = time.perf_counter() - started
    assert not generated.is_ready()
    jax.block_until_ready(moved)
    assert first_done < 0.5 * (time.perf_counter() - started)


def test_the_generation_copy_is_gone_before_the_policy_learns(tiny, monkeypatch, tmp_path):
    """A copy that lives on beside the update costs as much as the parameters."""
    live, whole = {}, ppo_loop.iterate_with_batch

    def watched(task, learner, iteration, timed):
        def phase(name, function, *args):
            live[name] = live_bytes()
            return timed(name, function, *args)

        return whole(task, learner, iteration, phase)

    monkeypatch.setattr(ppo_loop, "iterate_with_batch", watched)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "lengths_of_test_split.py").write_text(LENGTHS)
    shape = ["policy.shape.embed=64", "policy.shape.mlp=256"]  # parameters that outweigh a rollout
    settings = ["ppo.iterations=2", "run.save_every=100"]  # no copy of a state that is being saved
    pipeline.ppo(tiny("reward.function=lengths_of_test_split:score", *settings, *shape))
    copy = live["gen"] - live["reshard"]
    assert copy > 500_000
    assert live["old"] - live["reshard"] < 0.2 * copy
    assert live["update_actor"] - live["reshard"] < 0.2 * copy


LENGTHS = """
def score(prompts, responses):
    return [float(len(response)) for response in responses]
"""


def test_the_command_line_runs_a_split_placement(tmp_path):
    """`reward`, then `ppo`, each role on its own devices of eight."""
    placement = [
        "placement.train.devices=0-3",
        "placement.generate.devices=4-5",
        "placement.reference.devices=6-7",
        "placement.reward.devices=6-7",
        "eval.every=1",
        "ppo.iterations=2",
        "reward.epochs=1",
    ]
    environment = {**os.environ, "RLHF_JAX_CACHE": "off"}
    for command in ("reward", "ppo"):
        model = [f"reward.model={tmp_path / 'reward' / 'best_reward_model'}"] if command == "ppo" else []
        arguments = [*TINY, *placement, *model, f"run.dir={tmp_path / command}"]
        (tmp_path / "empty.yaml").write_text("")
        done = subprocess.run(
            [sys.executable, "-m", "rlhf_jax", command, tmp_path / "empty.yaml", *arguments],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "ematerialization" not in done.stderr
    lines = pathlib.Path(tmp_path, "ppo", "metrics.jsonl").read_text().splitlines()
    last = [record for record in map(json.loads, lines) if record["phase"] == "ppo"][-1]
    assert last["step"] == 2
    assert np.isfinite(last["actor/pg_loss"])
    assert last["perf/reshard_bytes"] > 0
    assert (tmp_path / "ppo" / "best_policy" / "config.json").exists()

"""What is compiled when: once in the first iterations, never again, and said in the log."""

import json
import logging
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.rollout.scored import Scored
from rlhf_jax.trainers import pipeline
from rlhf_jax.trainers.timing import CompileClock, PhaseTimer, give_back_memory

ONE_WIDTH = ["rollout.prompt_length=24", "rollout.response_length=40", "policy.shape.vocab_size=260"]


def test_nothing_is_compiled_after_the_first_iterations(tiny, tmp_path, caplog):
    """A Python number, a new shape or a lost sharding in the loop compiles a step again."""
    caplog.set_level(logging.INFO, "rlhf_jax")
    function = "reward.function=tests.trainers.test_pipeline:shortest"
    quiet = ["run.save_every=100", "run.profile_every=5"]
    pipeline.ppo(tiny(function, *ONE_WIDTH, *quiet, "ppo.iterations=14"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if record["phase"] == "ppo"]
    compiled = [record["timing_s/compile"] for record in steps]
    assert compiled[0] > 0
    assert compiled[3:] == [0] * 11
    assert len({record["response_length/mean"] for record in steps}) > 5  # rows end at different lengths
    (line,) = re.findall(
        r"ppo: ([\d.]+) s to the first step's end, ([\d.]+) s of them compilation", caplog.text
    )
    assert 0 < float(line[1]) < float(line[0])


def test_the_seconds_of_a_phase_are_those_until_its_scores_are_there():
    """Scores of a reward model were dispatched and not waited for: its seconds were in another phase."""
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, x: jnp.tanh(x @ x), x))
    x = jax.block_until_ready(busy(jnp.eye(400)))
    timed = PhaseTimer(CompileClock(), enabled=True)
    scored = timed("reward", lambda: Scored(busy(x)))
    assert scored.scores_B.is_ready()
    assert timed.seconds["timing_s/reward"] > 0


def test_freed_memory_goes_back_to_the_system():
    """Freed blocks below one that is in use stay with the process until it is asked for them."""
    statm = pathlib.Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs Linux")

    def resident_mib():
        return int(statm.read_text().split()[1]) * 4096 / 2**20

    blocks = [bytearray(100_000) for _ in range(3000)]
    last = bytearray(100_000)
    del blocks
    before = resident_mib()
    give_back_memory()
    assert resident_mib() < before - 100
    del last

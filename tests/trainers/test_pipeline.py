"""Whole runs of a tiny job: what they leave, and that a stopped one goes on as if it had not stopped."""

import gzip
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_jax.config import load_config, to_yaml
from rlhf_jax.errors import InputError
from rlhf_jax.trainers import pipeline
from tests.trainers.conftest import TINY

RUN = [
    *TINY,
    "sft.epochs=1",
    "reward.epochs=1",
    "eval.every=2",
    "ppo.kl_target=3.0",
    "critic.warmup_iterations=1",
]


def records(directory, phase=None):
    lines = pathlib.Path(directory, "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if phase in (None, record["phase"])]


def timeless(record):
    """Without what depends on clock or machine."""
    return {key: value for key, value in record.items() if not key.startswith(("timing_", "perf/"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run from beginning to end."""
    directory = tmp_path_factory.mktemp("pipeline") / "run"
    pipeline.run(load_config(None, [*RUN, "run.profile=1", f"run.dir={directory}"]))
    return directory


def test_everything_that_a_run_promises_is_there(finished):
    for name in [
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "eval.json",
        "report.html",
        "rlhf_training_curves.png",
        "reward_comparison.png",
        "sft_policy/model.safetensors",
        "best_reward_model/config.json",
        "best_policy/tokenizer.json",
        "checkpoints/ppo",
    ]:
        assert (finished / name).exists(), name


def test_the_profiler_traces_the_steps_that_were_asked_for(finished):
    (trace,) = (finished / "profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert any("update_actor" in name for name in names)  # a step, and not what came before


def test_eval_json_has_the_promised_fields(finished):
    result = json.loads((finished / "eval.json").read_text())
    assert set(result) == {"reward_model", "policy", "gold"}
    assert set(result["reward_model"]) == {"validation_accuracy", "validation_pairs", "train_accuracy"}
    assert all(number is not None for number in result["reward_model"].values())
    policy = result["policy"]
    assert set(policy) == {
        "prompts", "before", "after", "paired_difference", "win_rate", "kl", "response_length",
    }  # fmt: skip
    assert set(policy["paired_difference"]) == {"mean", "ci95_low", "ci95_high"}
    difference = policy["after"]["mean"] - policy["before"]["mean"]
    assert policy["paired_difference"]["mean"] == pytest.approx(difference, abs=1e-6)
    assert policy["paired_difference"]["ci95_low"] <= difference <= policy["paired_difference"]["ci95_high"]


def test_ppo_metrics_have_the_names_of_the_field(finished):
    steps = records(finished, "ppo")
    assert [record["step"] for record in steps] == [1, 2, 3]
    names = [
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vf_explained_var",
        "critic/grad_norm",
        "reward/score_mean",
        "reward/kl",
        "reward/total_mean",
        "response_length/mean",
        "response_length/clip_ratio",
        "timing_s/step",
        "perf/samples_per_s",
        "perf/tokens_per_s",
        "perf/reshard_bytes",
        "perf/mfu",
    ]
    actor = [
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/ppo_kl",
        "actor/entropy",
        "actor/grad_norm",
        "actor/lr",
    ]
    phases = ["gen", "reward", "ref", "values", "adv", "update_actor", "update_critic", "reshard"]
    assert not [name for name in names for record in steps if name not in record]
    assert not [name for name in actor if name not in steps[1]]
    assert not [phase for phase in phases if f"timing_s/{phase}" not in steps[1]]
    assert "timing_s/gen" not in steps[2]
    assert all(np.isfinite(value) for record in steps for key, value in record.items() if key != "phase")


def test_the_actor_waits_while_the_critic_warms_up(finished):
    first, second, _ = records(finished, "ppo")
    assert "actor/pg_loss" not in first
    assert first["reward/kl"] == pytest.approx(0, abs=1e-4)
    assert second["reward/kl"] == pytest.approx(0, abs=1e-4)


def test_adaptive_kl_moves_the_coefficient(finished):
    coefficients = [record["reward/kl_coef"] for record in records(finished, "ppo")]
    assert coefficients[0] == pytest.approx(0.05 * (1 - 0.2 * 8 / 10000))
    assert len(set(coefficients)) == 3


def test_samples_are_paired_by_prompt_and_key(finished):
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    before, after = ([s for s in samples if s["when"] == when] for when in ("before", "after"))
    assert [(s["prompt_id"], s["sample"], s["prompt"]) for s in before] == [
        (s["prompt_id"], s["sample"], s["prompt"]) for s in after
    ]
    assert all(abs(s["kl"]) < 1e-3 for s in before)


def test_evaluation_again_gives_the_same_numbers(finished):
    """Improvement was measured on unpaired, fresh samples."""
    first = json.loads((finished / "eval.json").read_text())
    pipeline.evaluate(load_config(str(finished / "config.yaml"), []))
    assert json.loads((finished / "eval.json").read_text()) == first


def test_a_finished_run_started_again_does_nothing_more(finished):
    before = [timeless(record) for record in records(finished)]
    weights = load_file(finished / "best_policy" / "model.safetensors")
    pipeline.run(load_config(str(finished / "config.yaml"), []))
    assert [timeless(record) for record in records(finished)] == before
    again = load_file(finished / "best_policy" / "model.safetensors")
    assert all((again[name] == weights[name]).all() for name in weights)


def test_a_directory_of_another_configuration_is_refused(finished):
    with pytest.raises(InputError, match=r"ppo\.gamma: 1\.0 -> 0\.5"):
        pipeline.run(load_config(str(finished / "config.yaml"), ["ppo.gamma=0.5"]))


def command(config, *overrides):
    return [sys.executable, "-m", "rlhf_jax", "run", str(config), *overrides]


def wait_for_step(directory, phase, step, process):
    for _ in range(1200):
        if pathlib.Path(directory, "metrics.jsonl").exists() and any(
            r["phase"] == phase and r["step"] >= step for r in records(directory)
        ):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"{phase} never came to step {step}")


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_a_stopped_run_goes_on_bit_equal(finished, tmp_path, sign):
    """Resume repeated or skipped data, or lost the KL coefficient, the critic, the optimizer or the keys."""
    config = tmp_path / "config.yaml"
    directory = tmp_path / "run"
    config.write_text(to_yaml(load_config(None, [*RUN, f"run.dir={directory}"])))
    environment = {**os.environ, "RLHF_JAX_CACHE": "off"}
    for phase, step in (("sft", 2), ("reward", 4), ("ppo", 1)):
        process = subprocess.Popen(
            command(config), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
        )
        wait_for_step(directory, phase, step, process)
        process.send_signal(sign)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == (143 if sign == signal.SIGTERM else -9), (phase, errors)
    subprocess.run(command(config), check=True, env=environment, timeout=600, capture_output=True)
    assert [timeless(r) for r in records(directory)] == [timeless(r) for r in records(finished)]
    for name in ("best_policy", "best_reward_model", "sft_policy"):
        ours, theirs = (load_file(d / name / "model.safetensors") for d in (directory, finished))
        assert all((ours[key] == theirs[key]).all() for key in theirs), name
    assert (directory / "samples.jsonl").read_text() == (finished / "samples.jsonl").read_text()
    assert (directory / "eval.json").read_text() == (finished / "eval.json").read_text()


@pytest.mark.parametrize(
    "phase",
    ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reward", "ppo"))],
)
def test_a_damaged_checkpoint_costs_its_steps_and_nothing_else(finished, tmp_path, phase, caplog):
    """The one before is used, and the metrics are rewound to it."""
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    newest = max((directory / "checkpoints" / phase).iterdir(), key=lambda entry: int(entry.name))
    file = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    config = load_config(str(finished / "config.yaml"), [f"run.dir={directory}"])
    getattr(pipeline, phase)(config)
    (line,) = (message for message in caplog.messages if "is damaged" in message)
    assert f"checkpoints/{phase}/{newest.name} is damaged: " in line
    again = [record for record in records(directory, phase) if "timing_s/compile" in record]
    redone = [a["step"] for a, b in zip(again, records(finished, phase), strict=True) if a != b]  # times
    assert redone
    assert redone == list(range(redone[0], int(newest.name) + 1))
    for each in ("sft", "reward", "ppo", "eval"):
        assert [timeless(r) for r in records(directory, each)] == [
            timeless(r) for r in records(finished, each)
        ], each
    for name in ("best_policy", "best_reward_model", "sft_policy"):
        for file in ("model.safetensors", "config.json"):
            assert (directory / name / file).read_bytes() == (finished / name / file).read_bytes(), name


def shortest(prompts, responses):
    """A reward function: one word is best."""
    return [-len(response.split()) for response in responses]


def test_a_python_function_takes_the_reward_models_place(tiny, tmp_path):
    pipeline.ppo(tiny("reward.function=tests.trainers.test_pipeline:shortest", "ppo.iterations=1"))
    pipeline.evaluate(tiny("reward.function=tests.trainers.test_pipeline:shortest", "ppo.iterations=1"))
    result = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert result["policy"]["before"]["mean"] <= 0
    assert result["reward_model"]["validation_accuracy"] is None


def test_a_function_that_fails_names_itself(tiny):
    with pytest.raises(InputError, match=r"reward\.function='nowhere:f' cannot be imported"):
        pipeline.ppo(tiny("reward.function=nowhere:f"))

"""A whole run whose directory is on an object store, seen through the calls that epath makes."""

import json

import pytest
from etils import epath

from rlhf_jax.config import load_config
from rlhf_jax.models import load_model, load_tokenizer, read_hf_config
from rlhf_jax.trainers import pipeline
from tests import bucket
from tests.trainers.conftest import TINY

RUN = [*TINY, "sft.epochs=1", "reward.epochs=1", "eval.every=2", "ppo.iterations=2"]


def records(directory):
    lines = (epath.Path(directory) / "metrics.jsonl").read_text().splitlines()
    timed = ("timing_", "perf/")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]


@pytest.fixture
def store(monkeypatch, tmp_path):
    (tmp_path / "store").mkdir()
    bucket.mount(monkeypatch, tmp_path)


def names(directory):
    return sorted(entry.name for entry in epath.Path(directory).iterdir() if entry.name != ".lock")


@pytest.mark.slow
def test_ppo_in_a_bucket_goes_on_and_gives_the_numbers_of_a_local_folder(store, tmp_path):
    there, here = "gs://store/run", str(tmp_path / "local")
    function = "reward.function=tests.trainers.test_pipeline:shortest"
    configure = lambda place, n: load_config(  # noqa: E731
        None, [*TINY, "sft.epochs=0", function, "eval.every=1", f"ppo.iterations={n}", f"run.dir={place}"]
    )
    pipeline.ppo(configure(there, 1))
    pipeline.ppo(configure(there, 2))  # from the checkpoint
    pipeline.ppo(configure(here, 2))
    assert records(there) == records(here)
    assert [r["step"] for r in records(there) if r["phase"] == "ppo"] == [1, 2]
    assert names(there) == names(here)
    files = [{f.name: f.read_bytes() for f in epath.Path(d, "best_policy").iterdir()} for d in (there, here)]
    assert files[0] == files[1]
    pipeline.export(configure(there, 2))
    model, variables = load_model(f"{there}/best_policy")
    assert read_hf_config(f"{there}/best_policy")["rlhf_jax"]["step"] == 2
    assert len(load_tokenizer(f"{there}/best_policy")) == model.config.vocab_size
    assert variables["params"]["embed"]["embedding"].shape[0] == model.config.vocab_size


@pytest.mark.slow
def test_a_whole_run_in_a_bucket_leaves_what_a_local_one_does(store):
    pipeline.run(load_config(None, [*RUN, "run.dir=gs://store/run"]))
    left = names("gs://store/run")
    for name in (
        "sft_policy",
        "best_reward_model",
        "best_policy",
        "report.html",
        "eval.json",
        "samples.jsonl",
    ):
        assert name in left
    assert json.loads(epath.Path("gs://store/run/eval.json").read_text())["policy"]["prompts"] == 6
    notes = read_hf_config("gs://store/run/best_reward_model")["rlhf_jax"]
    assert {"gain", "bias", "train_accuracy", "validation_accuracy"} <= notes.keys()

"""Adapters are what learns: the state holds nothing else, the base is in memory once, exports are merged."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_jax.models import load_model
from rlhf_jax.models.lora import merged
from rlhf_jax.models.parameters import flatten
from rlhf_jax.trainers import pipeline, ppo_loop

REWARD = "reward.function=tests.trainers.test_pipeline:shortest"
LORA = ["lora.rank=2", "lora.alpha=8", "lora.targets=q,o,down"]


def records(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def tasks(monkeypatch):
    """The (task, learner) of each iteration."""
    seen, iterate = [], ppo_loop.iterate_with_batch

    def watched(task, learner, *rest):
        result = iterate(task, learner, *rest)
        seen.append((task, result[0]))
        return result

    monkeypatch.setattr(ppo_loop, "iterate_with_batch", watched)
    return seen


def test_ppo_learns_adapters_and_exports_the_sum(tiny, tmp_path, tasks):
    pipeline.ppo(tiny(REWARD, *LORA, "ppo.iterations=2", "policy.shape.tied=false"))
    task, learner = tasks[-1]
    names = [f"layers/{place}/lora_{x}" for place in ("attention/q", "attention/o", "mlp/down") for x in "ab"]
    assert set(flatten(learner.actor.params)) == set(names)
    assert set(flatten(learner.critic.params)) == {*names, "head/kernel"}
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(learner.actor.params))

    reference = flatten(task.evaluator.reference_params)
    for path, leaf in flatten(task.actor_params(learner)).items():
        assert path in names or leaf is reference[path]
    for path, leaf in flatten(task.critic_params(learner)).items():
        assert path in names or path == "head/kernel" or leaf is reference[path]

    lora_a = learner.actor.params["layers"]["attention"]["q"]["lora_a"]
    assert lora_a.shape == (2, 16, 2)
    assert lora_a.addressable_shards[0].data.shape == (2, 8, 2)  # fsdp 2 along the width, the rank whole

    model, variables = load_model(tmp_path / "run" / "best_policy")
    assert model.lora is None
    expected = flatten(merged(task.actor_params(learner), task.config.lora))
    for path, leaf in flatten(variables["params"]).items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)
    assert np.abs(expected["layers/mlp/down/kernel"] - reference["layers/mlp/down/kernel"]).max() > 1e-4

    first, second = records(tmp_path / "run")
    assert abs(first["reward/kl"]) < 1e-4  # fresh adapters change nothing
    assert abs(second["reward/kl"]) > 1e-4


def test_what_generates_is_what_learns(tiny, tmp_path, tasks):
    """The merged matrices give the log-probabilities of the adapters beside their base."""
    pipeline.ppo(tiny(REWARD, *LORA, "ppo.iterations=2", "ppo.old_logprobs=recompute", "critic.shared=true"))
    task, learner = tasks[-1]
    assert records(tmp_path / "run")[-1]["rollout/logprob_diff_max"] < 1e-4
    assert set(flatten(learner.critic.params)) == {"head/kernel"}
    assert task.bases.critic is None


@pytest.mark.slow
def test_roles_on_devices_of_their_own_have_bases_of_their_own(tiny, tmp_path, tasks):
    places = {"train": "0-3", "generate": "0-3", "critic": "4-5", "reference": "6-7", "reward": "6-7"}
    split = [f"placement.{role}.devices={devices}" for role, devices in places.items()]
    pipeline.ppo(tiny(REWARD, *LORA, *split, "ppo.iterations=2"))
    task, learner = tasks[-1]
    reference = flatten(task.evaluator.reference_params)
    for base, first, last in ((task.bases.actor, 0, 3), (task.bases.critic, 4, 5)):
        for path, leaf in flatten(base).items():
            assert {device.id for device in leaf.sharding.device_set} == set(range(first, last + 1))
            np.testing.assert_array_equal(leaf, reference[path])
    assert "head/kernel" in flatten(learner.critic.params)
    assert abs(records(tmp_path / "run")[-1]["reward/kl"]) > 1e-4


@pytest.mark.slow
def test_a_whole_run_goes_on_bit_equal(tiny, tmp_path):
    settings = [*LORA, "sft.epochs=1", "reward.model=policy", "eval.every=1"]
    pipeline.run(tiny(*settings))
    other = f"run.dir={tmp_path / 'stopped'}"
    pipeline.run(tiny(*settings, "ppo.iterations=2", other))
    pipeline.run(tiny(*settings, other))
    for name in ("sft_policy", "best_reward_model", "best_policy"):
        ours, theirs = (load_file(tmp_path / d / name / "model.safetensors") for d in ("stopped", "run"))
        assert all((ours[key] == theirs[key]).all() for key in theirs), name

"""A critic on the policy's trunk: the joint gradient by its parts, and whole runs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlhf_jax.errors import InputError
from rlhf_jax.losses.masked import counts
from rlhf_jax.models import load_model
from rlhf_jax.rollout.score import response_logprobs, response_logprobs_and_values, response_values
from rlhf_jax.settings import Ppo
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.trainers import pipeline
from rlhf_jax.trainers.ppo import actor_loss, critic_loss, joint_loss
from rlhf_jax.trainers.ppo_steps import make_policy_steps, make_ppo_steps
from rlhf_jax.trainers.roles import place
from tests.trainers.test_own_policy import Constant
from tests.trainers.test_ppo import actor, configure, critic, on_one_device

REWARD = "reward.function=tests.trainers.test_pipeline:shortest"
SHARED = [REWARD, "critic.shared=true", "critic.coef=0.5", "critic.warmup_iterations=1"]


def head():
    """(critic module, its head alone, scaled so that values are far from 0)."""
    model, params = critic()
    return model, {"head": {"kernel": 30 * params["head"]["kernel"]}}


def test_one_pass_gives_what_two_give():
    (model, params), (value_model, own) = actor(), head()
    rollout = on_one_device()["rollout"]
    logprobs, entropy, values, final = response_logprobs_and_values(
        model, params, value_model, own, rollout, temperature=0.8
    )
    expected = response_logprobs(model, params, rollout, temperature=0.8)
    expected += response_values(value_model, {**params, **own}, rollout)
    for ours, theirs in zip((logprobs, entropy, values, final), expected, strict=True):
        mask = rollout.mask_BT if ours.ndim == 2 else slice(None)
        np.testing.assert_allclose(ours[mask], theirs[mask], atol=1e-5)
    assert np.std(values) > 0.1


def test_the_joint_gradient_is_the_sum_of_the_two():
    (model, params), (value_model, own) = actor(), head()
    experience = on_one_device()["experience"]
    settings = {"ppo": Ppo(entropy_coef=0.01), "denominator": counts(experience.rollout.mask_BT)}
    policy = {"model": model, "kl_coef": jnp.float32(0.1), "temperature": 0.8}

    def joint(both):
        return joint_loss(both, experience, critic=value_model, coef=0.3, **policy, **settings)

    def of_policy(params):
        return actor_loss(params, experience, **policy, **settings)[0]

    def of_values(params, own):
        return critic_loss({**params, **own}, experience, model=value_model, **settings)[0]

    grads, metrics = jax.jit(jax.grad(joint, has_aux=True))((params, own))
    first = jax.jit(jax.grad(of_policy))(params)
    second, of_head = jax.jit(jax.grad(of_values, (0, 1)))(params, own)
    expected = jax.tree.map(lambda a, b: a + 0.3 * b, first, second), jax.tree.map(lambda b: 0.3 * b, of_head)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(second)) > 1e-3
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-6)  # sums over 60 tokens, in two orders
    assert {"pg_loss", "entropy", "vf_loss", "vf_clipfrac"} <= set(metrics)


def records(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["phase"] == "ppo"]


def test_a_run_warms_the_head_up_then_teaches_both(tiny, tmp_path):
    pipeline.ppo(tiny(*SHARED))
    first, second, third = records(tmp_path / "run")
    assert "actor/pg_loss" not in first
    assert first["critic/grad_norm"] > 0
    assert second["reward/kl"] == pytest.approx(0, abs=1e-4)  # the trunk stood still
    assert abs(third["reward/kl"]) > 1e-4
    assert {"actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/vf_loss", "critic/lr"} <= set(third)
    assert (third["actor/lr"], third["critic/lr"]) == (pytest.approx(1e-2), pytest.approx(1e-2))
    assert third["critic/optimizer_steps"] == third["actor/optimizer_steps"] == 4
    model, _ = load_model(tmp_path / "run" / "best_policy")
    assert model.head == "lm"


@pytest.mark.slow
def test_a_run_goes_on_bit_equal(tiny, tmp_path):
    pipeline.ppo(tiny(*SHARED))
    other = f"run.dir={tmp_path / 'stopped'}"
    pipeline.ppo(tiny(*SHARED, "ppo.iterations=2", other))
    pipeline.ppo(tiny(*SHARED, other))
    ours, theirs = (load_file(tmp_path / d / "best_policy/model.safetensors") for d in ("stopped", "run"))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


def test_the_state_is_one_trunk_and_a_head():
    config = configure("critic.shared=true", "placement.train.fsdp=2", "placement.train.tensor=2")
    views = make_views(config)
    (model, params), (value_model, own) = actor(), head()
    policy = make_policy_steps(config, views, model, params, eos_ids=(3,))
    steps = make_ppo_steps(config, policy, value_model, own)
    learner = steps.init_learner(place(model, params, views.train), place(value_model, own, views.critic))
    assert list(learner.critic.params) == ["head"]
    for shape, array in zip(jax.tree.leaves(steps.learner_shapes), jax.tree.leaves(learner), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)


def test_modules_that_cannot_share_are_refused_by_name():
    config = configure("critic.shared=true")
    policy = make_policy_steps(config, make_views(config), Constant(4), {"bias": jnp.zeros(4)}, eos_ids=(3,))
    with pytest.raises(InputError, match=r"critic\.shared=true needs a method `hidden` of Constant"):
        make_ppo_steps(config, policy, Constant(1), {"bias": jnp.zeros(1)})

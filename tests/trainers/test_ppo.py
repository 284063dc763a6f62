"""Experience by hand, passes by count, and the whole iteration on one device and on eight."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.config import load_config
from rlhf_jax.losses import kl_estimate
from rlhf_jax.losses.masked import counts
from rlhf_jax.models.configs import TransformerConfig
from rlhf_jax.models.flops import forward_flops
from rlhf_jax.models.parameters import init_model
from rlhf_jax.models.weights import FreshWeights
from rlhf_jax.rollout.prompt_batch import prompt_batch
from rlhf_jax.rollout.score import response_logprobs, response_values
from rlhf_jax.settings import Critic, Ppo
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.trainers import ppo_steps
from rlhf_jax.trainers.optimizer import init_state, make_optimizer, make_schedule, state_shardings
from rlhf_jax.trainers.ppo import (
    Statistics,
    actor_loss,
    critic_loss,
    make_experience,
    minibatch_order,
    passes,
)
from rlhf_jax.trainers.ppo_setup import iteration_flops
from rlhf_jax.trainers.ppo_steps import make_policy_steps, make_ppo_steps, recomputes_old_logprobs
from rlhf_jax.trainers.roles import LoadedModel, load_critic, place, shardings_of
from rlhf_jax.types import Rollout

B, P, T, V = 16, 4, 6, 32


def rollout_of(lengths, *, truncated=None, seed=0):
    rng = np.random.default_rng(seed)
    mask_BT = np.arange(T)[None, :] < np.asarray(lengths)[:, None]
    prompt_BP = np.ones((len(lengths), P), bool)
    return Rollout(
        tokens_BS=jnp.asarray(rng.integers(1, V, (len(lengths), P + T)), jnp.int32),
        mask_BS=jnp.asarray(np.concatenate([prompt_BP, mask_BT], axis=1)),
        mask_BT=jnp.asarray(mask_BT),
        logprobs_BT=jnp.zeros((len(lengths), T)),
        truncated_B=jnp.asarray(np.zeros(len(lengths), bool) if truncated is None else truncated),
    )


def statistics_of(rollout, *, scores, policy=-1.0, reference=-1.0, values=0.0, final=0.0):
    shape = rollout.mask_BT.shape
    return Statistics(
        scores_B=jnp.asarray(scores, jnp.float32),
        old_logprobs_BT=jnp.full(shape, policy),
        ref_logprobs_BT=jnp.full(shape, reference),
        values_BT=jnp.full(shape, values),
        final_values_B=jnp.full(shape[0], final),
    )


PLAIN = Ppo(whiten_advantages=False, gamma=1.0, lam=1.0, kl_coef=0.1)


def experience_of(rollout, statistics, ppo=PLAIN, kl_coef=0.1):
    return make_experience(rollout, statistics, jnp.float32(kl_coef), ppo=ppo)


def test_a_reward_of_one_half_stays_one_half():
    """Fractional rewards became integers on the way to the advantages."""
    rollout = rollout_of([3])
    experience, metrics = experience_of(rollout, statistics_of(rollout, scores=[0.5], values=0.25))
    np.testing.assert_allclose(experience.advantages_BT, [[0.25, 0.25, 0.25, 0, 0, 0]])
    np.testing.assert_allclose(experience.returns_BT[0, :3], 0.5)
    assert metrics["reward/score_mean"] == 0.5


def test_kl_in_the_reward_by_hand():
    """KL had the wrong sign, or was applied in two places."""
    rollout = rollout_of([2])
    statistics = statistics_of(rollout, scores=[1.0], policy=-1.0, reference=-1.5)
    experience, metrics = experience_of(rollout, statistics)
    np.testing.assert_allclose(experience.returns_BT[0, :2], [0.9, 0.95], rtol=1e-6)
    assert metrics["reward/kl"] == pytest.approx(1.0)
    assert metrics["reward/total_mean"] == pytest.approx(0.9)


def test_kl_in_the_loss_leaves_the_reward_alone():
    rollout = rollout_of([2])
    statistics = statistics_of(rollout, scores=[1.0], policy=-1.0, reference=-1.5)
    ppo = dataclasses.replace(PLAIN, kl_placement="loss", kl_kind="k3")
    experience, _ = experience_of(rollout, statistics, ppo)
    np.testing.assert_allclose(experience.returns_BT[0, :2], [1.0, 1.0])


def test_switches_of_the_reward():
    rollout = rollout_of([6, 2], truncated=[True, False])
    statistics = statistics_of(rollout, scores=[3.0, -3.0], final=7.0)
    ends = lambda ppo: np.asarray(experience_of(rollout, statistics, ppo)[0].returns_BT)[[0, 1], [5, 1]]  # noqa: E731
    np.testing.assert_allclose(ends(PLAIN), [3.0, -3.0])
    np.testing.assert_allclose(ends(dataclasses.replace(PLAIN, missing_eos_penalty=1.0)), [2.0, -3.0])
    np.testing.assert_allclose(ends(dataclasses.replace(PLAIN, reward_clip=2.0)), [2.0, -2.0])
    np.testing.assert_allclose(ends(dataclasses.replace(PLAIN, bootstrap_truncated=True)), [10.0, -3.0])


def test_advantages_are_whitened_over_the_whole_rollout():
    rollout = rollout_of([3, 6, 1, 5])
    statistics = statistics_of(rollout, scores=[1.0, -2.0, 0.5, 3.0])
    experience, _ = experience_of(rollout, statistics, dataclasses.replace(PLAIN, whiten_advantages=True))
    valid = np.asarray(experience.advantages_BT)[np.asarray(rollout.mask_BT)]
    assert valid.mean() == pytest.approx(0, abs=1e-6)
    assert valid.var(ddof=1) == pytest.approx(1, rel=1e-4)


def test_each_epoch_visits_every_row_once_in_another_order():
    order = np.asarray(minibatch_order(jax.random.key(0), 12, epochs=3, minibatches=4))
    assert order.shape == (12, 3)
    epochs = order.reshape(3, 12)
    assert (np.sort(epochs, axis=1) == np.arange(12)).all()
    assert len({tuple(row) for row in epochs}) == 3


# ---- with a model ------------------------------------------------------------------------------------------

SHAPE = TransformerConfig(
    vocab_size=V, layers=2, embed=16, heads=4, kv_heads=4, head_dim=4, mlp=32, max_positions=64
)


@functools.cache
def actor():
    model, variables = init_model(SHAPE, head="lm", seed=1)
    # larger weights than at the start of training, so that probabilities are far from uniform
    return model, jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, variables["params"])


@functools.cache
def critic():
    model, variables = init_model(SHAPE, head="value", seed=2)
    return model, variables["params"]


def configure(*overrides):
    return load_config(
        None,
        [
            f"ppo.batch_size={B}",
            "ppo.minibatches=2",
            "ppo.epochs=2",
            "ppo.learning_rate=1e-2",
            "critic.learning_rate=1e-2",
            f"rollout.prompt_length={P}",
            f"rollout.response_length={T}",
            "rollout.temperature=0.8",
            *overrides,
        ],
    )


def one_iteration(config, devices=None):
    """Generate, score by a rule, update: everything of an iteration but the text."""
    views = make_views(config, devices)
    (model, params), (critic_model, critic_params) = actor(), critic()
    policy = make_policy_steps(config, views, model, params, eos_ids=(3, 5))
    steps = make_ppo_steps(config, policy, critic_model, critic_params)
    learner = steps.init_learner(
        place(model, params, views.train), place(critic_model, critic_params, views.critic)
    )
    reference = place(model, params, views.reference)
    rows = [[int(t) for t in np.random.default_rng(i).integers(6, V, 1 + i % P)] for i in range(B)]
    prompts = prompt_batch(rows.__getitem__, np.arange(B), limit=P, view=views.generate)
    rollout = policy.to_train(
        policy.sampler.generate(policy.sampler.reshard(learner.actor.params), prompts, jax.random.key(0))
    )
    old = steps.old_logprobs(learner.actor.params, rollout)
    ref = policy.reference_logprobs(reference, rollout)
    values, final = steps.values(learner.critic.params, rollout)
    scores = (rollout.response_BT * rollout.mask_BT).sum(-1) / 50.0
    experience, metrics = steps.experience(
        rollout, Statistics(scores, old, ref, values, final), learner.kl_coef
    )
    critic_state, critic_metrics = steps.update_critic(learner.critic, experience, jax.random.key(1))
    actor_state, actor_metrics = steps.update_actor(
        learner.actor, experience, learner.kl_coef, jax.random.key(1)
    )
    return {
        "rollout": rollout,
        "experience": experience,
        "metrics": metrics | {f"critic/{k}": v for k, v in critic_metrics.items()} | actor_metrics,
        "actor": actor_state.params,
        "critic": critic_state.params,
        "state": actor_state,
    }


def test_the_steps_describe_the_arrays_that_they_take():
    """What is compiled from shapes alone is what runs."""
    config = configure("placement.train.fsdp=2", "placement.train.tensor=2", "placement.generate.tensor=4")
    views = make_views(config)
    (model, params), (critic_model, critic_params) = actor(), critic()
    policy = make_policy_steps(config, views, model, params, eos_ids=(3,))
    steps = make_ppo_steps(config, policy, critic_model, critic_params)
    learner = steps.init_learner(
        place(model, params, views.train), place(critic_model, critic_params, views.critic)
    )
    generation_params = policy.sampler.reshard(learner.actor.params)
    described = [steps.learner_shapes, policy.sampler.shapes]
    for shapes, arrays in zip(described, [learner, generation_params], strict=True):
        assert jax.tree.structure(shapes) == jax.tree.structure(arrays)
        for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(arrays), strict=True):
            assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
            assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)


def test_sampling_goes_by_the_settings(monkeypatch):
    asked = {}
    monkeypatch.setattr(ppo_steps, "generate", lambda *_, **settings: asked.update(settings))
    config = configure("rollout.top_k=7", "rollout.top_p=0.9", "rollout.slots=3", "eval.samples=2")
    policy = make_policy_steps(config, make_views(config), *actor(), eos_ids=[3, 5])
    policy.sampler.generate(None, None, None)
    common = {"response_length": T, "eos_ids": (3, 5), "temperature": 0.8, "top_k": 7, "top_p": 0.9}
    assert asked == common | {"slots": 3}
    policy.sampler.generate_samples(None, None, None)
    assert asked == common | {"slots": 3, "samples": 2}


@functools.cache
def on_one_device(*overrides):
    return jax.device_get(one_iteration(configure(*overrides), jax.devices()[:1]))


def test_generation_in_bfloat16_changes_what_is_sampled_and_not_what_is_learnt_from_it():
    """Old log-probabilities of another precision than the new ones would make every ratio differ from 1."""
    result = jax.device_get(one_iteration(configure("rollout.dtype=bfloat16")))
    drift, mask = result["metrics"]["rollout/logprob_diff_max"], result["rollout"].mask_BT
    assert 1e-4 < drift < 0.2  # bfloat16 has 8 bits, log-probabilities here are about -3
    model, params = actor()
    again, _ = response_logprobs(model, params, result["rollout"], temperature=0.8)
    np.testing.assert_allclose(again[mask], result["experience"].old_logprobs_BT[mask], atol=1e-5)


def test_before_the_first_update_the_ratio_is_one_and_the_kl_is_zero():
    """Old and new log-probabilities differed at equal weights."""
    result = on_one_device("ppo.old_logprobs=recompute")
    experience, mask = result["experience"], result["rollout"].mask_BT
    model, params = actor()
    again, _ = response_logprobs(model, params, result["rollout"], temperature=0.8)
    ratio = np.exp(np.where(mask, again - experience.old_logprobs_BT, 0.0))
    np.testing.assert_allclose(ratio, 1.0, atol=1e-5)  # float32 rounding of two compilations
    np.testing.assert_allclose(result["metrics"]["reward/kl"], 0.0, atol=1e-4)
    assert result["metrics"]["rollout/logprob_diff_max"] <= 1e-4


def test_sampled_log_probabilities_teach_what_recomputed_ones_do():
    """In float32 they are the same numbers, and a forward pass is saved."""
    sampled, recomputed = on_one_device(), on_one_device("ppo.old_logprobs=recompute")
    np.testing.assert_array_equal(sampled["experience"].old_logprobs_BT, sampled["rollout"].logprobs_BT)
    drift = recomputed["metrics"]["rollout/logprob_diff_max"]
    assert 0 < drift <= 1e-4  # two programs, and not one array twice
    assert "rollout/logprob_diff_max" not in sampled["metrics"]
    assert_equal_runs(recomputed, sampled)


@pytest.mark.parametrize(
    ("overrides", "dtype", "recomputes"),
    [
        ((), "float32", False),
        (("rollout.dtype=bfloat16",), "float32", True),
        ((), "bfloat16", True),
        (("rollout.dtype=float32",), "bfloat16", True),
        (("ppo.old_logprobs=rollout",), "bfloat16", False),
        (("ppo.old_logprobs=recompute",), "float32", True),
    ],
    ids=["float32", "samples in bfloat16", "bfloat16", "trains in bfloat16", "as sampled", "recomputed"],
)
def test_when_old_log_probabilities_are_recomputed(overrides, dtype, recomputes):
    model = actor()[0].clone(dtype=jnp.dtype(dtype))
    config = configure(*overrides)
    assert recomputes_old_logprobs(config, model) == recomputes
    assert recomputes_old_logprobs(config, nn.Dense(1)) == (config.ppo.old_logprobs != "rollout")
    # a prompt of 3 tokens and a response of 2: generation, reference and perhaps old, three for each epoch
    lengths = np.array([3]), np.array([2])
    one = forward_flops(SHAPE, [5], unembed_positions=2)
    value = forward_flops(SHAPE, [5])
    flops = iteration_flops(config, model, critic()[0])
    assert flops is not None
    assert flops(*lengths) == (2 + recomputes + 6) * one + 7 * value


def test_optimizer_steps_are_epochs_times_minibatches():
    """Accumulation swallowed optimizer steps."""
    for result in (on_one_device(), on_one_device("ppo.micro_batch_size=2")):
        assert result["state"].steps == 4
        assert result["metrics"]["optimizer_steps"] == 4


def test_micro_batches_change_nothing_but_rounding():
    """Loss or metrics depended on the size of the micro-batch."""
    assert_equal_runs(on_one_device("ppo.micro_batch_size=2"), on_one_device())


@pytest.mark.parametrize(
    ("train", "generate", "others"),
    [
        ("data=8", "data=8", ()),
        ("data=2,fsdp=4", "data=4,tensor=2", ()),
        ("data=1,fsdp=2,tensor=4", "data=4,tensor=2", ("placement.critic.fsdp=8", "placement.critic.data=1")),
        ("data=2,fsdp=2,tensor=2", "data=8", ("ppo.micro_batch_size=4",)),
    ],
    ids=["data 8", "fsdp 4 to tensor 2", "tensor 4 to 2, critic fsdp 8", "2 x 2 x 2, micro-batches"],
)
def test_eight_devices_give_the_numbers_of_one(train, generate, others):
    """Loss, whitening and metrics depended on the number of devices."""
    layout = [f"placement.train.{item}" for item in train.split(",")]
    layout += [f"placement.generate.{item}" for item in generate.split(",")]
    assert_equal_runs(jax.device_get(one_iteration(configure(*layout, *others))), on_one_device())


def assert_equal_runs(result, expected):
    for name in ("tokens_BS", "mask_BT", "truncated_B"):
        np.testing.assert_array_equal(getattr(result["rollout"], name), getattr(expected["rollout"], name))
    mask = expected["rollout"].mask_BT
    for name in ("old_logprobs_BT", "advantages_BT", "returns_BT"):
        ours, theirs = (getattr(run["experience"], name)[mask] for run in (result, expected))
        np.testing.assert_allclose(ours, theirs, atol=2e-5, err_msg=name)
    for name, number in expected["metrics"].items():
        np.testing.assert_allclose(result["metrics"][name], number, rtol=2e-3, atol=2e-4, err_msg=name)
    for name in ("actor", "critic"):
        # Adam divides by the root of the second moment: where a gradient is nearly 0 its rounding is
        # magnified, so that single parameters may differ by a good part of the learning rate (1e-2);
        # their mean must not
        pairs = zip(jax.tree.leaves(result[name]), jax.tree.leaves(expected[name]), strict=True)
        difference = np.concatenate([np.abs(a - b).ravel() for a, b in pairs])
        assert difference.mean() < 1e-5, name
        assert np.quantile(difference, 0.999) < 1e-3, name


def test_early_stop_skips_the_remaining_steps():
    result = on_one_device("ppo.stop_kl=1e-9")
    assert 1 <= result["metrics"]["optimizer_steps"] < 4
    assert result["state"].steps == result["metrics"]["optimizer_steps"]


def loss_at(ppo, params=None):
    result = on_one_device()
    model, own = actor()
    return actor_loss(
        own if params is None else params,
        result["experience"],
        kl_coef=jnp.float32(0.3),
        model=model,
        ppo=ppo,
        temperature=0.8,
        denominator=counts(result["rollout"].mask_BT),
    )


def test_the_entropy_bonus_lowers_the_loss_by_its_coefficient():
    plain, metrics = loss_at(Ppo(entropy_coef=0.0))
    bonus, _ = loss_at(Ppo(entropy_coef=0.1))
    assert metrics["entropy"] > 0.1
    np.testing.assert_allclose(plain - bonus, 0.1 * metrics["entropy"], rtol=1e-4)


def test_kl_in_the_loss_is_the_estimator_of_the_settings():
    model, params = actor()
    moved = jax.tree.map(lambda x: 1.02 * x, params)
    plain, _ = loss_at(Ppo(), moved)
    with_kl, metrics = loss_at(Ppo(kl_placement="loss", kl_kind="k3"), moved)
    result = on_one_device()
    logprobs, _ = response_logprobs(model, moved, result["rollout"], temperature=0.8)
    mask = result["rollout"].mask_BT
    expected = np.asarray(kl_estimate(logprobs, result["experience"].ref_logprobs_BT, "k3"))[mask].mean()
    assert expected > 0
    np.testing.assert_allclose(metrics["kl_loss"], expected, rtol=1e-4)
    np.testing.assert_allclose(with_kl - plain, 0.3 * expected, rtol=2e-3)  # a difference of float32 losses


def test_the_critic_learns_its_returns():
    result, (model, params) = on_one_device(), critic()
    loss = functools.partial(
        critic_loss, model=model, ppo=Ppo(value_clip=None), denominator=counts(result["rollout"].mask_BT)
    )
    (before, _), (after, _) = (loss(p, result["experience"]) for p in (params, result["critic"]))
    assert after < before


def test_the_critic_sees_the_state_before_the_token():
    """Values were shifted by one: the value of a token must not depend on that token."""
    model, params = critic()
    rollout = on_one_device()["rollout"]
    changed = dataclasses.replace(rollout, tokens_BS=rollout.tokens_BS.copy())
    changed.tokens_BS[:, P + 2] = (changed.tokens_BS[:, P + 2] + 1) % V
    before, _ = response_values(model, params, rollout)
    after, _ = response_values(model, params, changed)
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert (np.asarray(before != after)[:, 3] & np.asarray(rollout.mask_BT)[:, 3]).any()


def test_a_kl_that_is_not_finite_leaves_the_coefficient_alone():
    """One bad rollout made it NaN, and with it every reward from then on."""
    ppo = Ppo(kl_target=3.0)
    for observed in (np.nan, np.inf):
        assert ppo_steps._next_kl_coef(ppo, jnp.float32(0.1), jnp.float32(observed)) == jnp.float32(0.1)
    assert ppo_steps._next_kl_coef(ppo, jnp.float32(0.1), jnp.float32(9.0)) > 0.1


def test_passes_do_not_recompile():
    """Each jitted step is traced once for a shape."""
    config = configure()
    views = make_views(config, jax.devices()[:1])
    (model, params), (critic_model, critic_params) = actor(), critic()
    steps = make_ppo_steps(
        config, make_policy_steps(config, views, model, params, eos_ids=(3,)), critic_model, critic_params
    )
    state = steps.init_learner(
        place(model, params, views.train), place(critic_model, critic_params, views.critic)
    )
    experience = jax.device_put(on_one_device()["experience"], state.kl_coef.sharding)
    traced = 0
    actor_state = state.actor
    for seed in range(3):
        actor_state, _ = steps.update_actor(actor_state, experience, state.kl_coef, jax.random.key(seed))
        traced = steps.update_actor._cache_size()
    assert traced == 1


def test_a_fresh_critic_has_the_policys_trunk():
    model, variables = init_model(SHAPE, head="lm", seed=1)
    params = variables["params"]
    critic = load_critic(Critic(), LoadedModel(model, FreshWeights(model, 1), None), None, seed=0)
    critic_params = critic.place(make_views(configure(), jax.devices()[:1]).critic)
    assert critic.model.head == "value"
    np.testing.assert_array_equal(critic_params["embed"]["embedding"], params["embed"]["embedding"])
    assert critic_params["head"]["kernel"].shape == (16, 1)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"])
def test_losses_of_single_rows_add_up(aggregation):
    """Every aggregation divides by the whole minibatch's count, not by a row's own."""
    result, (model, params) = on_one_device(), actor()
    experience = result["experience"]
    loss = functools.partial(
        actor_loss,
        params,
        kl_coef=jnp.float32(0.0),
        model=model,
        ppo=Ppo(aggregation=aggregation),
        temperature=0.8,
        denominator=counts(experience.rollout.mask_BT),
    )
    loss = jax.jit(loss)
    whole, _ = loss(experience)
    rows = [loss(jax.tree.map(lambda x, b=b: x[b : b + 1], experience))[0] for b in range(B)]
    np.testing.assert_allclose(sum(rows), whole, rtol=1e-4, atol=1e-5)


def test_passes_count_what_they_skip():
    result, (model, params) = on_one_device(), actor()
    tx = make_optimizer(
        make_schedule(1e-3, steps=4, warmup_steps=0, schedule="constant"), weight_decay=0.0, max_grad_norm=1.0
    )
    views = make_views(configure(), jax.devices()[:1])
    places = state_shardings(tx, params, shardings_of(model, params, views.train), views.train)
    state = init_state(tx, params, places)
    broken = dataclasses.replace(
        result["experience"], advantages_BT=jnp.full_like(result["experience"].advantages_BT, jnp.nan)
    )
    broken = jax.tree.map(jnp.asarray, broken)
    loss = functools.partial(actor_loss, kl_coef=jnp.float32(0.0), model=model, ppo=Ppo(), temperature=0.8)
    order = minibatch_order(jax.random.key(0), B, epochs=1, minibatches=2)
    state, metrics = passes(tx, loss, state, broken, order, ppo=Ppo())
    assert (metrics["skipped"], metrics["optimizer_steps"], state.bad_steps) == (2, 0, 2)
    np.testing.assert_array_equal(state.params["embed"]["embedding"], params["embed"]["embedding"])

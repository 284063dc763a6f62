"""The two PPO losses: by hand, by loop, by slope, and the same for every split of a batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.losses import AGGREGATIONS, counts, ppo_policy_loss, ppo_value_loss

from . import oracles
from .oracles import MASK, B, T

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


policy_loss = jax.jit(ppo_policy_loss)


def policy_of(ratio, advantage, **settings):
    """Loss and metrics of one token with this ratio, as plain numbers."""
    one = np.ones((1, 1), np.float32)
    loss, metrics = policy_loss(np.log(ratio) * one, 0 * one, advantage * one, one, **{**CLIP, **settings})
    return float(loss), {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "settings", "loss", "clipped", "bound"),
    [
        pytest.param(1.1, 2, {}, -2.2, 0, 0, id="inside the range"),
        pytest.param(1.5, 1, {}, -1.2, 1, 0, id="good token already likelier"),
        pytest.param(1.5, -1, {}, 1.5, 0, 0, id="bad token likelier keeps its slope"),
        pytest.param(0.5, 1, {}, -0.5, 0, 0, id="good token unlikelier keeps its slope"),
        pytest.param(0.5, -1, {}, 0.8, 1, 0, id="bad token already unlikelier"),
        pytest.param(1.25, 1, {"clip_high": 0.3}, -1.25, 0, 0, id="higher upper bound"),
        pytest.param(0.85, -1, {"clip_low": 0.1}, 0.9, 1, 0, id="tighter lower bound"),
        pytest.param(5, -1, {}, 5, 0, 0, id="no bound without dual clip"),
        pytest.param(5, -1, {"dual_clip": 3.0}, 3, 0, 1, id="dual clip binds"),
        pytest.param(2, -1, {"dual_clip": 3.0}, 2, 0, 0, id="dual clip does not bind yet"),
        pytest.param(5, 1, {"dual_clip": 3.0}, -1.2, 1, 0, id="dual clip leaves good tokens alone"),
        pytest.param(5, 0, {"dual_clip": 3.0}, 0, 0, 0, id="no advantage"),
    ],
)
def test_policy_loss_by_hand(ratio, advantage, settings, loss, clipped, bound):
    got, metrics = policy_of(ratio, advantage, **settings)
    assert got == pytest.approx(loss, rel=1e-6)
    assert metrics == pytest.approx(
        {"pg_clipfrac": clipped, "pg_clipfrac_lower": bound, "ppo_kl": -np.log(ratio)}, rel=1e-6, abs=1e-7
    )


def test_huge_ratios_stay_finite():
    for difference in (100.0, -100.0):
        loss, metrics = policy_of(np.exp(difference), -1.0)
        assert np.isfinite(loss)
        assert metrics["ppo_kl"] == -np.clip(difference, -20, 20)


def test_equal_policies_have_ratio_1():
    """The first minibatch has equal log-probs: the loss is -mean(A), its slope -A / n, the KL 0."""
    with oracles.x64():
        logprobs, advantages = oracles.normal(0, B, T), oracles.normal(1, B, T)
        f = lambda x: policy_loss(x, logprobs, advantages, MASK, dual_clip=3.0, **CLIP)  # noqa: E731
        (loss, metrics), slope = jax.value_and_grad(f, has_aux=True)(logprobs)
        np.testing.assert_allclose(loss, -advantages[MASK].mean(), rtol=1e-12)
        np.testing.assert_allclose(slope, np.where(MASK, -advantages / MASK.sum(), 0), rtol=1e-12)
        assert {k: float(v) for k, v in metrics.items()} == {
            "pg_clipfrac": 0,
            "pg_clipfrac_lower": 0,
            "ppo_kl": 0,
        }


def test_clipped_tokens_have_no_slope():
    f = jax.grad(lambda x, a: policy_loss(x, 0 * x, a, np.ones((1, 4)), dual_clip=3.0, **CLIP)[0])
    slope = f(jnp.log(jnp.array([[1.5, 0.5, 5.0, 1.1]])), jnp.array([[1.0, -1.0, -1.0, 1.0]]))
    np.testing.assert_allclose(slope, [[0, 0, 0, -1.1 / 4]], rtol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dual_clip", [None, 1.3], ids=["single clip", "dual clip"])
def test_policy_loss_by_loop_and_slope(aggregation, dual_clip):
    with oracles.x64():
        new, old, advantages = oracles.normal(2, 3, B, T) / 2
        options = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": dual_clip, "aggregation": aggregation}
        f = jax.jit(
            jax.value_and_grad(lambda x: ppo_policy_loss(x, old, advantages, MASK, **options), has_aux=True)
        )
        loss, clipped, bound, kl = oracles.policy_tokens(new, old, advantages, 0.2, 0.3, dual_clip)
        (got, metrics), slope = f(new)
        np.testing.assert_allclose(got, oracles.aggregate(loss, MASK, aggregation), rtol=1e-12)
        expected = {"pg_clipfrac": clipped, "pg_clipfrac_lower": bound, "ppo_kl": kl}
        assert clipped[MASK].any()
        assert bound[MASK].any() == (dual_clip is not None)
        for name, x in expected.items():  # means over tokens whatever the aggregation
            np.testing.assert_allclose(metrics[name], x[MASK].mean(), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(slope, oracles.slope(lambda x: f(x)[0][0], new), atol=1e-8)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "clipped"),
    [
        pytest.param(1, 0, 3, None, 2.0, 0, id="no clip"),
        pytest.param(1, 0, 2, 0.2, 1.62, 1, id="moved towards the target too fast"),
        pytest.param(0.1, 0, 2, 0.2, 1.805, 0, id="inside the range"),
        pytest.param(-1, 0, 2, 0.2, 4.5, 0, id="moved away keeps its slope"),
    ],
)
def test_value_loss_by_hand(value, old, target, clip, loss, clipped):
    one = np.ones((1, 1), np.float32)
    got, metrics = ppo_value_loss(value * one, old * one, target * one, one, clip=clip)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
        {"vf_clipfrac": clipped, "vf_mean": value}
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("clip", [None, 0.3], ids=["no clip", "clip"])
def test_value_loss_by_loop_and_slope(aggregation, clip):
    with oracles.x64():
        values, old, returns = oracles.normal(3, 3, B, T)
        options = {"clip": clip, "aggregation": aggregation}
        f = jax.jit(
            jax.value_and_grad(lambda v: ppo_value_loss(v, old, returns, MASK, **options), has_aux=True)
        )
        loss, clipped = oracles.value_tokens(values, old, returns, clip)
        (got, metrics), slope = f(values)
        np.testing.assert_allclose(got, oracles.aggregate(loss, MASK, aggregation), rtol=1e-12)
        np.testing.assert_allclose(metrics["vf_clipfrac"], clipped[MASK].mean(), rtol=1e-12)
        np.testing.assert_allclose(metrics["vf_mean"], values[MASK].mean(), rtol=1e-12)
        np.testing.assert_allclose(slope, oracles.slope(lambda v: f(v)[0][0], values), atol=1e-8)


@pytest.mark.parametrize("loss", [ppo_policy_loss, ppo_value_loss])
def test_wrong_aggregation_names_the_right_ones(loss):
    settings = CLIP if loss is ppo_policy_loss else {}
    with pytest.raises(
        ValueError, match="'sum' is unknown; use token_mean, seq_mean_token_sum, seq_mean_token_mean"
    ):
        loss(*np.zeros((3, B, T)), MASK, aggregation="sum", **settings)


# ---- the same numbers for every split ----

ROWS = 8
SPLIT_MASK = np.arange(T) < np.array([[6], [1], [0], [3], [5], [2], [0], [4]])


def losses_and_slopes(x, old, target, mask, denominator, aggregation):
    """Both losses with all metrics, and both slopes."""
    policy = functools.partial(
        ppo_policy_loss, dual_clip=1.3, aggregation=aggregation, denominator=denominator, **CLIP
    )
    value = functools.partial(ppo_value_loss, clip=0.3, aggregation=aggregation, denominator=denominator)
    return [jax.value_and_grad(f, has_aux=True)(x, old, target, mask) for f in (policy, value)]


split = jax.jit(losses_and_slopes, static_argnames="aggregation")


def add_up(parts):
    """Values are added; the slopes of each part's rows are laid end to end."""
    values = jax.tree.map(lambda *x: sum(x), *[[v for v, _ in part] for part in parts])
    slopes = [np.concatenate(x) for x in zip(*[[s for _, s in part] for part in parts], strict=True)]
    return values, slopes


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_add_up_to_the_whole(aggregation):
    """Loss and metrics depended on the micro-batch size. Rows are ragged, some parts have no valid token."""
    with oracles.x64():
        arrays = oracles.normal(4, 3, ROWS, T) / 2
        whole = split(*arrays, SPLIT_MASK, None, aggregation)
        for size in (1, 4, ROWS):
            parts = [
                split(*arrays[:, i : i + size], SPLIT_MASK[i : i + size], counts(SPLIT_MASK), aggregation)
                for i in range(0, ROWS, size)
            ]
            for x, y in zip(jax.tree.leaves(add_up(parts)), jax.tree.leaves(add_up([whole])), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_sum"])
def test_a_bare_number_is_the_count_that_the_aggregation_divides_by(aggregation):
    arrays = oracles.normal(5, 3, ROWS, T).astype(np.float32)
    whole = counts(SPLIT_MASK)
    number = whole["tokens" if aggregation == "token_mean" else "rows"]
    with_number = split(*arrays, SPLIT_MASK, number, aggregation)
    with_counts = split(*arrays, SPLIT_MASK, whole, aggregation)
    for (value, slope), (value2, slope2) in zip(with_number, with_counts, strict=True):
        np.testing.assert_array_equal(value[0], value2[0])
        np.testing.assert_array_equal(slope, slope2)
        for name in value[1]:
            assert 0 <= value[1][name] <= 1 or name in ("ppo_kl", "vf_mean")


def test_one_device_equals_eight():
    """Loss and metrics depended on the device count. Each device holds one row, two of them an empty one."""
    arrays = oracles.normal(6, 3, ROWS, T).astype(np.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    sharded = split(*(jax.device_put(x, place) for x in (*arrays, SPLIT_MASK)), None, "token_mean")
    for x, y in zip(
        jax.tree.leaves(sharded), jax.tree.leaves(split(*arrays, SPLIT_MASK, None, "token_mean")), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)  # float32 sums in another order

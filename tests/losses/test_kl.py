"""KL estimators, the reward that carries the KL, and the adaptive coefficient."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.losses import adaptive_kl_coef, kl_estimate, kl_shaped_rewards, masked_mean

from . import oracles
from .oracles import MASK, B, T

POLICY, REFERENCE = np.array([0.9, 0.1]), np.array([0.5, 0.5])


def expected(kind):
    """E[kind] over tokens drawn from the policy."""
    return float((POLICY * kl_estimate(np.log(POLICY), np.log(REFERENCE), kind)).sum())


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_average_to_the_true_kl_of_two_tokens(kind):
    """KL with the wrong sign, or k3 flipped: exp(d) - 1 - d averages to 0.272 here, the true KL is 0.368."""
    true = sum(p * math.log(p / q) for p, q in zip(POLICY, REFERENCE, strict=True))
    assert round(true, 3) == 0.368
    assert expected(kind) == pytest.approx(true, rel=1e-6)


def test_k2_and_abs_by_hand():
    d = np.log(POLICY / REFERENCE)
    assert expected("k2") == pytest.approx(float((POLICY * d**2 / 2).sum()), rel=1e-6)
    assert expected("abs") == pytest.approx(float((POLICY * abs(d)).sum()), rel=1e-6)


def test_k1_is_negative_where_the_reference_finds_the_token_likelier():
    assert kl_estimate(math.log(0.1), math.log(0.5), "k1") < 0
    for kind in ("k2", "k3", "abs"):
        assert kl_estimate(math.log(0.1), math.log(0.5), kind) > 0


def test_k3_keeps_its_digits_at_small_differences():
    """exp(-d) - 1 + d in float32 is rounding noise below d = 1e-3, where most tokens are."""
    d = np.float32(1e-4)
    np.testing.assert_allclose(kl_estimate(d, np.float32(0), "k3"), float(d) ** 2 / 2, rtol=1e-2)


@settings(max_examples=40, deadline=None)
@given(st.floats(-10, 0, width=32), st.floats(-10, 0, width=32))
def test_properties_of_the_estimators(logprob, ref_logprob):
    with oracles.x64():
        kl = {k: float(kl_estimate(logprob, ref_logprob, k)) for k in ("k1", "k2", "k3", "abs")}
    assert kl["abs"] == abs(kl["k1"])
    assert min(kl["k2"], kl["abs"]) >= 0
    assert kl["k3"] >= -1e-12  # rounding
    if logprob == ref_logprob:
        assert set(kl.values()) == {0.0}


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_slopes(kind):
    with oracles.x64():
        logprobs, ref = oracles.normal(0, B, T), oracles.normal(1, B, T)
        f = jax.jit(lambda x: masked_mean(kl_estimate(x, ref, kind, MASK), MASK))
        np.testing.assert_allclose(jax.grad(f)(logprobs), oracles.slope(f, logprobs), atol=1e-8)


def test_wrong_kind_names_the_right_ones():
    with pytest.raises(ValueError, match="'k4' is unknown; use k1, k2, k3, abs"):
        kl_estimate(np.zeros(3), np.zeros(3), "k4")


def test_the_score_sits_on_the_last_valid_token():
    """The score was put on the pad after the end of sequence, or read at the wrong token."""
    mask = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]], bool)
    rewards = kl_shaped_rewards(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.ones((4, 4)), mask, 0.25)
    np.testing.assert_array_equal(
        rewards,
        [[-0.25, -0.25, -0.25, 0.75], [-0.25, 1.75, 0, 0], [0, -0.25, 0, 2.75], [0, 0, 0, 0]],
    )


def test_shaped_rewards_by_loop():
    with oracles.x64():
        scores, kl = oracles.normal(2, B), oracles.normal(3, B, T)
        for mask in (MASK, MASK[:, ::-1], MASK.astype(np.float32)):
            rewards = kl_shaped_rewards(scores, kl, mask, 0.3)
            np.testing.assert_allclose(
                rewards, oracles.shaped_rewards(scores, kl, mask != 0, 0.3), rtol=1e-12, atol=1e-15
            )


def test_moving_away_from_the_reference_is_punished_once():
    """KL applied twice or with the wrong sign: a response's rewards add up to score - beta * KL."""
    logprobs, ref = np.log(np.full((1, T), 0.8)), np.log(np.full((1, T), 0.4))
    rewards = kl_shaped_rewards(np.array([2.0]), kl_estimate(logprobs, ref, "k1"), np.ones((1, T)), 0.1)
    np.testing.assert_allclose(rewards.sum(), 2.0 - 0.1 * T * math.log(2), rtol=1e-6)


def test_fractional_scores_survive_integer_company():
    """Fractional rewards became integers."""
    rewards = kl_shaped_rewards(np.array([0.5]), np.zeros((1, 2), np.int32), np.ones((1, 2), np.int32), 0.1)
    np.testing.assert_array_equal(rewards, [[0, 0.5]])


@pytest.mark.parametrize(
    ("observed", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (5.4, 0.99), (60.0, 1.02), (0.0, 0.98), (-5.0, 0.98)],
    ids=["on target", "above", "below", "far above is clipped", "at 0 is clipped", "negative"],
)
def test_adaptive_coefficient_by_hand(observed, factor):
    beta = adaptive_kl_coef(0.2, observed, target=6.0, horizon=1000, n=100)
    np.testing.assert_allclose(beta, 0.2 * factor, rtol=1e-6)


def test_adaptive_coefficient_is_a_fixed_type_for_saving_and_jit():
    beta = adaptive_kl_coef(0.2, 3, 6, 1000, 16)
    assert beta.dtype == jnp.float32
    assert not beta.weak_type
    np.testing.assert_array_equal(jax.jit(adaptive_kl_coef)(0.2, 3, 6, 1000, 16), beta)

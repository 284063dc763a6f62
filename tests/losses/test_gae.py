"""Advantages: by hand, by the definition as a loop, by property."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.losses import gae

from . import oracles


def test_by_hand():
    advantages, returns = gae(
        jnp.array([0.0, 0, 1]), jnp.array([0.2, 0.4, 0.8]), jnp.ones(3), gamma=1.0, lam=0.5
    )
    # d = (0.2, 0.4, 0.2): A_2 = 0.2, A_1 = 0.4 + 0.1, A_0 = 0.2 + 0.25
    np.testing.assert_allclose(advantages, [0.45, 0.5, 0.2], rtol=1e-6)
    np.testing.assert_allclose(returns, [0.65, 0.9, 1.0], rtol=1e-6)


def test_fractional_rewards_by_hand():
    """Fractional rewards became integers: here a reward of 0.5 meets integer values."""
    advantages, returns = gae(
        np.array([0, 0.5]), np.array([0, 0], np.int32), np.ones(2, bool), gamma=1.0, lam=0.5
    )
    np.testing.assert_array_equal(advantages, [0.25, 0.5])
    np.testing.assert_array_equal(returns, [0.25, 0.5])


def test_a_discount_other_than_1_by_hand():
    advantages, _ = gae(jnp.array([1.0, 1]), jnp.array([2.0, 3]), jnp.ones(2), gamma=0.5, lam=0.5)
    np.testing.assert_array_equal(advantages, [1 + 1.5 - 2 + 0.25 * (1 - 3), -2])


def test_a_hole_is_skipped_not_a_step():
    """One discount between the neighbours of a hole, and the value after it is the next valid one's."""
    full, _ = gae(jnp.array([1.0, 2]), jnp.array([3.0, 4]), jnp.ones(2), gamma=0.9, lam=0.8)
    holed, _ = gae(jnp.array([1.0, 9, 2]), jnp.array([3.0, 9, 4]), jnp.array([1, 0, 1]), gamma=0.9, lam=0.8)
    np.testing.assert_array_equal(holed, [full[0], 0, full[1]])


def test_truncated_responses_can_go_on_with_the_critic():
    r, v, m = jnp.array([0.0, 0, 9]), jnp.array([1.0, 2, 9]), jnp.array([1, 1, 0])
    advantages, returns = gae(r, v, m, gamma=0.5, lam=0.0, bootstrap_value=4.0)
    np.testing.assert_array_equal(advantages, [0 + 0.5 * 2 - 1, 0 + 0.5 * 4 - 2, 0])
    np.testing.assert_array_equal(returns, [1, 2, 0])


def test_limits_of_lambda():
    with oracles.x64():
        r, v, m = oracles.normal(0, 5), oracles.normal(1, 5), np.ones(5)
        _, returns = gae(r, v, m, gamma=1.0, lam=1.0)
        np.testing.assert_allclose(returns, r[::-1].cumsum()[::-1], rtol=1e-12)  # Monte Carlo
        advantages, _ = gae(r, v, m, gamma=0.9, lam=0.0)
        np.testing.assert_allclose(advantages, r + 0.9 * np.append(v[1:], 0) - v, rtol=1e-12)  # one step


jitted = jax.jit(gae)
floats = st.floats(-10, 10, width=32)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(floats, floats, st.booleans()), min_size=6, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    floats,
)
def test_equals_the_definition(steps, gamma, lam, bootstrap_value):
    with oracles.x64():
        r, v, m = (np.array(x) for x in zip(*steps, strict=True))
        got = jitted(r, v, m, gamma=gamma, lam=lam, bootstrap_value=bootstrap_value)
        for x, y in zip(got, oracles.gae(r, v, m, gamma, lam, bootstrap_value), strict=True):
            assert x.dtype == np.float64
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def test_advantages_know_the_future_only():
    """Causality by gradient: no advantage depends on an earlier reward or value."""
    m = jnp.ones(5)
    f = lambda r, v: gae(r, v, m, gamma=0.9, lam=0.8)[0]  # noqa: E731
    for jacobian in jax.jacobian(f, (0, 1))(jnp.arange(5.0), jnp.ones(5)):
        np.testing.assert_array_equal(jacobian, np.triu(jacobian))
        assert (np.diag(jacobian) != 0).all()


def test_a_thousand_tokens_in_both_precisions():
    T = 1000
    r, v, m = oracles.normal(3, T), oracles.normal(4, T), np.arange(T) < 900
    expected, _ = oracles.gae(r, v, m, 1.0, 0.95)
    got, _ = jitted(r.astype(np.float32), v.astype(np.float32), m, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(
        got, expected, atol=2e-5
    )  # 20 steps of memory, float32 rounding of numbers near 10
    with oracles.x64():
        np.testing.assert_allclose(jitted(r, v, m, gamma=1.0, lam=0.95)[0], expected, atol=1e-12)


def test_slopes():
    with oracles.x64():
        v, m, w = oracles.normal(5, 6), oracles.MASK[2], oracles.normal(6, 2, 6)
        f = jax.jit(
            lambda r: sum((x * w).sum() for x, w in zip(gae(r, v, m, gamma=0.9, lam=0.8), w, strict=True))
        )
        r = oracles.normal(7, 6)
        np.testing.assert_allclose(jax.grad(f)(r), oracles.slope(f, r), atol=1e-8)


def test_one_response_at_a_time():
    with pytest.raises(AssertionError, match="rank"):
        gae(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3)), gamma=1.0, lam=1.0)
    batch = jax.vmap(functools.partial(gae, gamma=1.0, lam=1.0))
    assert batch(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.ones((2, 3)))[0].shape == (2, 3)

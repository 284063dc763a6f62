"""Masked statistics: by hand, by loop, by slope."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.losses import AGGREGATIONS, counts, masked_mean, masked_whiten, token_weights, weighted_sum

from . import oracles
from .oracles import MASK, B, T

whiten = jax.jit(masked_whiten)


def test_masked_mean_by_hand():
    x, mask = jnp.array([[1.0, 2.0, 100.0], [5.0, 100.0, 100.0]]), jnp.array([[1, 1, 0], [0, 0, 0]], bool)
    assert masked_mean(x, mask) == 1.5
    np.testing.assert_array_equal(masked_mean(x, mask, axis=1), [1.5, 0])
    np.testing.assert_array_equal(masked_mean(x, mask, axis=0), [1, 2, 0])
    np.testing.assert_array_equal(masked_mean(x, mask, axis=(0, 1)), 1.5)


def test_masked_mean_of_nothing_is_0_with_zero_slope():
    value, slope = jax.value_and_grad(masked_mean)(jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3)))
    assert value == 0
    np.testing.assert_array_equal(slope, np.zeros((2, 3)))


@pytest.mark.parametrize("kind", [bool, np.float32, np.int32], ids=["bool mask", "float mask", "int mask"])
def test_mask_kinds_are_equal(kind):
    x = oracles.normal(0, B, T).astype(np.float32)
    np.testing.assert_allclose(masked_mean(x, MASK.astype(kind)), x[MASK].mean(), rtol=1e-6)
    np.testing.assert_array_equal(whiten(x, MASK.astype(kind)), whiten(x, MASK))
    assert {k: int(v) for k, v in counts(MASK.astype(kind)).items()} == {"tokens": 11, "rows": 3}


def test_long_masks_in_bfloat16_are_counted_exactly():
    """bfloat16 cannot count past 256."""
    mask = jnp.ones((3, 1001), jnp.bfloat16)
    assert counts(mask)["tokens"] == 3003
    assert masked_mean(jnp.ones((3, 1001)), mask) == 1


def test_whiten_by_hand():
    whitened = whiten(jnp.array([1.0, 7.0, 3.0]), jnp.array([True, False, True]))  # mean 2, variance 2
    np.testing.assert_allclose(whitened, [-(0.5**0.5), 0, 0.5**0.5], rtol=1e-6)


def test_whiten_uses_the_unbiased_variance():
    with oracles.x64():
        x = oracles.normal(1, B, T) * 3 + 5
        valid = x[MASK]
        expected = np.where(MASK, (x - valid.mean()) / np.sqrt(valid.var(ddof=1) + 1e-8), 0)
        np.testing.assert_allclose(whiten(x, MASK), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("valid", [0, 1])
def test_whiten_of_fewer_than_two_entries_is_0(valid):
    mask = jnp.arange(5) < valid
    value, slope = jax.value_and_grad(lambda x: whiten(x, mask).sum())(jnp.array([3.0, 1, 4, 1, 5]))
    np.testing.assert_array_equal(whiten(jnp.array([3.0, 1, 4, 1, 5]), mask), np.zeros(5))
    assert value == 0
    assert np.isfinite(slope).all()


def test_whiten_of_equal_entries_is_0():
    """The float32 mean of 1000 times 100.1 is off by 1e-5, which dividing by sqrt(1e-8) made 0.1."""
    whitened = whiten(jnp.full(1000, 100.1), jnp.ones(1000))
    np.testing.assert_allclose(whitened, np.zeros(1000), atol=1e-6)


def test_whiten_slope():
    with oracles.x64():
        weights, x = oracles.normal(2, B, T), oracles.normal(3, B, T)
        f = jax.jit(lambda x: (whiten(x, MASK) * weights).sum())
        np.testing.assert_allclose(jax.grad(f)(x), oracles.slope(f, x), atol=1e-8)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=6, max_size=6),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.floats(-100, 100, width=32),
    st.floats(1, 10, width=32),
)
def test_whitened_entries_have_mean_0_and_ignore_shift_and_scale(x, mask, shift, scale):
    with oracles.x64():
        x, mask = np.array(x, np.float64), np.array(mask)
        whitened = np.asarray(whiten(x, mask))
        assert (whitened[~mask] == 0).all()
        np.testing.assert_allclose(whitened[mask].sum(), 0, atol=1e-6)
        if mask.sum() > 1 and x[mask].std() > 1:  # else 1e-8 is not small beside the variance
            np.testing.assert_allclose(whitened[mask].var(ddof=1), 1, rtol=1e-6)
            np.testing.assert_allclose(whiten(x * scale + shift, mask), whitened, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_make_the_aggregation(aggregation):
    with oracles.x64():
        x = oracles.normal(4, B, T)
        weights = token_weights(MASK, aggregation, **counts(MASK), dtype=x.dtype)
        np.testing.assert_allclose(
            weighted_sum(x, weights), oracles.aggregate(x, MASK, aggregation), rtol=1e-12
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_of_an_empty_batch_are_0(aggregation):
    empty = np.zeros((2, 3), bool)
    weights = token_weights(empty, aggregation, **counts(empty), dtype=jnp.float32)
    np.testing.assert_array_equal(weights, np.zeros((2, 3)))
    assert weighted_sum(np.full((2, 3), np.nan), weights) == 0


def test_wrong_aggregation_names_the_right_ones():
    with pytest.raises(
        ValueError, match="'mean' is unknown; use token_mean, seq_mean_token_sum, seq_mean_tok"
    ):
        token_weights(MASK, "mean", **counts(MASK), dtype=jnp.float32)

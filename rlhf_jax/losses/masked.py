"""Means over valid tokens only. What stands in a masked position reaches neither the value nor the gradient.

The rule everywhere: x is replaced by 0 where the mask is 0 *before* anything is computed from it. Multiplying
by the mask afterwards is not enough, because NaN * 0 is NaN, in the value and again in the gradient.
"""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.errors import InputError
from rlhf_jax.losses.precision import at_least_float32

AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean")


def masked_mean(x, mask, axis=None) -> jax.Array:
    """Mean of the valid entries.

        sum(x * m) / max(sum(m), 1)

    Args:
      x: numbers of any shape.   mask: bool or float, same shape, 1 on valid entries.
      axis: the axis or axes to reduce; None reduces all.
    Returns:
      The mean, in the unit of x; 0 where nothing is valid.
    """
    x, mask = at_least_float32(x), jnp.asarray(mask)
    chex.assert_equal_shape([x, mask])
    m = mask.astype(x.dtype)
    return (jnp.where(m != 0, x, 0) * m).sum(axis) / jnp.maximum(m.sum(axis), 1)


def masked_whiten(x, mask) -> jax.Array:
    """Valid entries with mean 0 and variance 1 over the whole array.

        (x - mu) / sqrt(sigma^2 + 1e-8),   sigma^2 = sum((x - mu)^2) / (n - 1)

    Call it on the whole rollout batch, before that is split: the statistics are of what this function gets.

    Args:
      x: numbers of any shape.   mask: bool or float, same shape, 1 on valid entries.
    Returns:
      The whitened array, without unit: 0 where masked, 0 everywhere when fewer than two entries are valid.
    """
    x, valid = at_least_float32(x), jnp.asarray(mask) != 0
    mean = masked_mean(x, valid)
    centred = jnp.where(valid, x - mean, 0)
    # The mean of equal numbers is off by a rounding, which 1 / sqrt(1e-8) would blow up: centre what is left.
    centred = jnp.where(valid, centred - masked_mean(centred, valid), 0)
    variance = (centred**2).sum() / jnp.maximum(valid.sum() - 1, 1)
    return centred / jnp.sqrt(variance + 1e-8)


def counts(mask_BT) -> dict[str, jax.Array]:
    """Valid tokens, and rows that have one: what `denominator=` takes, from a whole minibatch."""
    m_BT = at_least_float32(mask_BT)
    return {"tokens": m_BT.sum(), "rows": (m_BT != 0).any(-1).sum()}


def token_weights(mask_BT, aggregation: str, *, tokens, rows, dtype) -> jax.Array:
    """Weights w with loss = sum(w * x): the aggregation over tokens as an array.

        token_mean            w = m / tokens
        seq_mean_token_sum    w = m / rows
        seq_mean_token_mean   w = m / (valid tokens of the row) / rows

    Args:
      mask_BT: bool or float, 1 on response tokens.
      aggregation: one of the three names.
      tokens, rows: `counts` of the *whole* minibatch, so that its micro-batches' sums add up to its mean.
      dtype: that of x; the weights are float32 at least.
    Returns:
      weights_BT, 0 where masked; all 0 where nothing is valid.
    """
    m_BT = jnp.asarray(mask_BT).astype(jnp.promote_types(dtype, jnp.float32))
    if aggregation == "token_mean":
        return m_BT / jnp.maximum(tokens, 1)
    if aggregation == "seq_mean_token_sum":
        return m_BT / jnp.maximum(rows, 1)
    if aggregation == "seq_mean_token_mean":
        return m_BT / jnp.maximum(m_BT.sum(-1, keepdims=True), 1) / jnp.maximum(rows, 1)
    raise InputError(f"aggregation {aggregation!r} is unknown; use {', '.join(AGGREGATIONS)}")


def weighted_sum(x, weights) -> jax.Array:
    """sum(w * x), where x counts only if w is not 0."""
    return (jnp.where(weights != 0, at_least_float32(x), 0) * weights).sum()

"""The two losses of proximal policy optimisation.

Both are weighted sums over tokens with the denominators of the whole minibatch, loss and metrics alike: what
micro-batches give is added up, and nothing is divided afterwards.
"""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.losses.masked import counts, token_weights, weighted_sum
from rlhf_jax.losses.precision import at_least_float32

Metrics = dict[str, jax.Array]


def ppo_policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    mask,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    aggregation: str = "token_mean",
    denominator=None,
) -> tuple[jax.Array, Metrics]:
    """Clipped surrogate loss of the policy.

        l = clip(log pi - log pi_old, -20, 20),   rho = exp(l)
        L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))
        L = min(L, -A c)   where A < 0 and c = dual_clip is given

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 7; dual clip: Ye et al. 2020,
    https://arxiv.org/abs/1912.09729, eq. 5.

    Args:
      logprobs: [B, T] nats, of the policy that learns.
      old_logprobs: [B, T] nats, of the policy that sampled.
      advantages: [B, T], whitened or not; no gradient is meant to flow through them.
      mask: [B, T] bool or float, 1 on response tokens.
      clip_low, clip_high: how far rho may fall below and rise above 1.   dual_clip: above 1, or None.
      aggregation: token_mean, seq_mean_token_sum or seq_mean_token_mean.
      denominator: `counts(mask)` of the whole minibatch; None: of this batch. A number is the count that the
        aggregation divides by, of tokens or of rows.
    Returns:
      (loss, metrics), metrics as means over valid tokens: pg_clipfrac, the clipped term is the larger;
      pg_clipfrac_lower, the dual clip binds; ppo_kl = mean(-l), nats per token.
    """
    logprobs, old_logprobs, advantages = _valid(mask, logprobs, old_logprobs, advantages)
    loss_weights, metric_weights = _weights(mask, aggregation, denominator, logprobs.dtype)

    log_ratio = jnp.clip(logprobs - old_logprobs, -20, 20)
    ratio = jnp.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(unclipped, clipped)
    bound = -advantages * dual_clip if dual_clip is not None else jnp.full_like(loss, jnp.inf)
    binds = (advantages < 0) & (loss > bound)
    loss = jnp.where(binds, bound, loss)

    return weighted_sum(loss, loss_weights), {
        "pg_clipfrac": weighted_sum(clipped > unclipped, metric_weights),
        "pg_clipfrac_lower": weighted_sum(binds, metric_weights),
        "ppo_kl": weighted_sum(-log_ratio, metric_weights),
    }


def ppo_value_loss(
    values,
    old_values,
    returns,
    mask,
    *,
    clip: float | None = None,
    aggregation: str = "token_mean",
    denominator=None,
) -> tuple[jax.Array, Metrics]:
    """Squared error of the critic, pessimistic about large moves.

        L = 1/2 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2)        without clip: 1/2 (v - R)^2

    The squared error is L^VF of Schulman et al. 2017, https://arxiv.org/abs/1707.06347, eq. 9, times 1/2. The
    clipping is in that paper's code only: Engstrom et al. 2020, https://arxiv.org/abs/2005.12729, section 3.

    Args:
      values: [B, T], of the critic that learns.   old_values: [B, T], of the critic at rollout.
      returns: [B, T], the targets.   mask: [B, T] bool or float, 1 on response tokens.
      clip: the range around old_values, in the unit of the reward; None: off.
      aggregation, denominator: as in `ppo_policy_loss`.
    Returns:
      (loss, metrics), metrics as means over valid tokens: vf_clipfrac, the clipped term is the larger;
      vf_mean, the value.
    """
    values, old_values, returns = _valid(mask, values, old_values, returns)
    loss_weights, metric_weights = _weights(mask, aggregation, denominator, values.dtype)

    unclipped = (values - returns) ** 2
    clipped = unclipped
    if clip is not None:
        clipped = (jnp.clip(values, old_values - clip, old_values + clip) - returns) ** 2
    loss = 0.5 * jnp.maximum(unclipped, clipped)

    return weighted_sum(loss, loss_weights), {
        "vf_clipfrac": weighted_sum(clipped > unclipped, metric_weights),
        "vf_mean": weighted_sum(values, metric_weights),
    }


def _valid(mask, *arrays) -> list[jax.Array]:
    """The arrays in float32 at least, 0 where masked."""
    mask = jnp.asarray(mask)
    arrays = [at_least_float32(x) for x in arrays]
    chex.assert_equal_shape([mask, *arrays])
    return [jnp.where(mask != 0, x, 0) for x in arrays]


def _weights(mask, aggregation, denominator, dtype) -> tuple[jax.Array, jax.Array]:
    """Weights of the loss, and of the metrics, which are means over tokens whatever the aggregation.

    With a bare row count the number of tokens is unknown: metrics then are means over rows of their means.
    """
    metric_aggregation = "token_mean"
    if denominator is None:
        denominator = counts(mask)
    elif not isinstance(denominator, dict):
        if aggregation != "token_mean":
            metric_aggregation = "seq_mean_token_mean"
        denominator = {"tokens": denominator, "rows": denominator}
    return (
        token_weights(mask, aggregation, **denominator, dtype=dtype),
        token_weights(mask, metric_aggregation, **denominator, dtype=dtype),
    )

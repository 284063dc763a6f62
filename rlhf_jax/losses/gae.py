"""Generalised advantage estimation."""

import chex
import jax
import jax.numpy as jnp
from jax import lax


def gae(rewards_T, values_T, mask_T, *, gamma, lam, bootstrap_value=0.0) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimates of one response.

        A_t = d_t + gamma * lam * A_{t+1},   d_t = r_t + gamma * V_{t+1} - V_t

    Masked steps are skipped: they pass A and V of the next valid step through, and get A = 0.
    Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16.

    Args:
      rewards_T: per-token reward.   values_T: V(s_t), the state *before* token t is emitted.
      mask_T: bool or float, 1 on response tokens.
      gamma: discount in [0, 1].   lam: trace decay in [0, 1]; both per token.
      bootstrap_value: V after the last valid step; 0 where the response ended.
    Returns:
      (advantages_T, returns_T) in the unit of the reward, not whitened; returns = A + V. Both 0 where masked.
    """
    rewards_T, values_T, valid_T = jnp.asarray(rewards_T), jnp.asarray(values_T), jnp.asarray(mask_T) != 0
    chex.assert_rank([rewards_T, values_T, valid_T], 1)
    chex.assert_equal_shape([rewards_T, values_T, valid_T])
    dtype = jnp.promote_types(jnp.promote_types(rewards_T.dtype, values_T.dtype), jnp.float32)
    rewards_T, values_T = (jnp.where(valid_T, x.astype(dtype), 0) for x in (rewards_T, values_T))
    gamma, lam, bootstrap_value = (jnp.asarray(x, dtype) for x in (gamma, lam, bootstrap_value))

    def backward(carry, step):
        next_advantage, next_value = carry
        reward, value, valid = step
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        carry = jnp.where(valid, advantage, next_advantage), jnp.where(valid, value, next_value)
        return carry, jnp.where(valid, advantage, 0)

    end = jnp.zeros((), dtype), bootstrap_value
    _, advantages_T = lax.scan(backward, end, (rewards_T, values_T, valid_T), reverse=True)
    return advantages_T, advantages_T + values_T

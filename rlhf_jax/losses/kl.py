"""The anchor to the reference: estimators of the KL, the reward that carries it, and its adaptive weight."""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.errors import InputError
from rlhf_jax.losses.precision import at_least_float32

KL_KINDS = ("k1", "k2", "k3", "abs")


def kl_estimate(logprobs, ref_logprobs, kind: str, mask=None) -> jax.Array:
    """Estimate of KL(policy || reference) from tokens sampled from the policy.

        d = log pi - log pi_ref
        k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d      abs = |d|

    k1 and k3 are unbiased: E[k1] = E[k3] = KL. k1 is negative where the reference finds the token likelier,
    so the mean of a batch can be; k2, k3 and abs never are. k2 and abs do not equal the KL in expectation.
    Schulman 2020, http://joschu.net/blog/kl-approx.html, where r = pi_ref / pi = exp(-d), k3 = r - 1 - log r.

    Args:
      logprobs, ref_logprobs: of the sampled tokens, nats, same shape.
      kind: k1, k2, k3 or abs.
      mask: bool or float; where given, masked positions are 0. Give it when the estimate is differentiated:
        the slope of k3 at a masked NaN or overflow is NaN, and a masked mean taken later does not undo that.
    Returns:
      The estimate per token, nats.
    """
    if kind not in KL_KINDS:
        raise InputError(f"KL estimator {kind!r} is unknown; use {', '.join(KL_KINDS)}")
    logprobs, ref_logprobs = at_least_float32(logprobs), at_least_float32(ref_logprobs)
    chex.assert_equal_shape([logprobs, ref_logprobs])
    d = logprobs - ref_logprobs
    if mask is not None:
        d = jnp.where(jnp.asarray(mask) != 0, d, 0)
    if kind == "k1":
        return d
    if kind == "k2":
        return d**2 / 2
    if kind == "k3":
        return jnp.expm1(-d) + d  # exp(-d) - 1 without the cancellation at small d
    return jnp.abs(d)


def kl_shaped_rewards(scores_B, kl_BT, mask_BT, kl_coef) -> jax.Array:
    """Per-token rewards: the KL penalty on every valid token, the score on the last one.

        r_t = -beta * kl_t + score * [t is the last valid token]

    The last valid token is the end of sequence itself where there is one. A row without a valid token gets 0.
    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, eq. 2.

    Args:
      scores_B: reward-model score of each response.   kl_BT: nats per token.
      mask_BT: bool or float, 1 on response tokens.   kl_coef: beta, reward per nat.
    Returns:
      rewards_BT, 0 where masked.
    """
    scores_B, kl_BT, valid_BT = at_least_float32(scores_B), at_least_float32(kl_BT), jnp.asarray(mask_BT) != 0
    chex.assert_equal_shape([kl_BT, valid_BT])
    chex.assert_shape(scores_B, kl_BT.shape[:-1])
    valid_from_here_BT = jnp.cumsum(valid_BT[..., ::-1], -1)[..., ::-1]
    last_BT = valid_BT & (valid_from_here_BT == 1)
    return -kl_coef * jnp.where(valid_BT, kl_BT, 0) + jnp.where(last_BT, scores_B[..., None], 0)


def adaptive_kl_coef(kl_coef, observed_kl, target, horizon, n) -> jax.Array:
    """The KL coefficient after n more responses, steered towards a target KL.

        e = clip(kl / target - 1, -0.2, 0.2),   beta <- beta * (1 + e * n / horizon)

    Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2.

    Args:
      kl_coef: beta, reward per nat.
      observed_kl: nats per response, summed over its tokens, averaged over responses.   target: likewise.
      horizon: responses over which beta can change by about a fifth.   n: responses since the last call.
    Returns:
      The new beta.
    """
    error = jnp.clip(at_least_float32(observed_kl) / target - 1, -0.2, 0.2)
    return at_least_float32(kl_coef) * (1 + error * n / horizon)

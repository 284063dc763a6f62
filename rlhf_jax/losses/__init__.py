"""The mathematics: arrays in, arrays out, jax and chex only. docs/losses.md lists every equation and test."""

from rlhf_jax.losses.gae import gae
from rlhf_jax.losses.kl import KL_KINDS, adaptive_kl_coef, kl_estimate, kl_shaped_rewards
from rlhf_jax.losses.logprobs import chunked_logprobs, entropy_from_logits, token_logprobs
from rlhf_jax.losses.masked import (
    AGGREGATIONS,
    counts,
    masked_mean,
    masked_whiten,
    token_weights,
    weighted_sum,
)
from rlhf_jax.losses.ppo import ppo_policy_loss, ppo_value_loss
from rlhf_jax.losses.precision import at_least_float32
from rlhf_jax.losses.ranking import RANKING_KINDS, ranking_loss

__all__ = [
    "AGGREGATIONS",
    "KL_KINDS",
    "RANKING_KINDS",
    "adaptive_kl_coef",
    "at_least_float32",
    "chunked_logprobs",
    "counts",
    "entropy_from_logits",
    "gae",
    "kl_estimate",
    "kl_shaped_rewards",
    "masked_mean",
    "masked_whiten",
    "ppo_policy_loss",
    "ppo_value_loss",
    "ranking_loss",
    "token_logprobs",
    "token_weights",
    "weighted_sum",
]

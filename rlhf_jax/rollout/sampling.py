"""One token a row, by inverting the distribution function at one uniform number.

`jax.random.categorical` draws a Gumbel number for every entry of the vocabulary; one uniform a row gives the
same distribution for a fraction of the work, and makes a row's sample independent of the batch it lies in.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

BLOCK = 256  # the distribution function is searched in two levels: among blocks, then inside one


def row_uniforms(key: jax.Array, row_B: jax.Array, t_B: jax.Array) -> jax.Array:
    """A uniform number in [0, 1) for each row at its response position; it depends on (key, row, t) alone.

    Args:
      t_B: response positions, or one for all rows.
    """

    def uniform(row, t):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, row), t))

    return jax.vmap(uniform)(row_B, jnp.broadcast_to(t_B, row_B.shape))


def truncate(logits_BV: jax.Array, *, top_k: int = 0, top_p: float = 1.0) -> jax.Array:
    """Logits with -inf outside the top-k and the top-p (nucleus) set; ties at the edge are kept.

    Nucleus: the smallest set of likeliest tokens whose probability reaches top_p, after top-k
    (Holtzman et al. 2020, https://arxiv.org/abs/1904.09751, eq. 2 and 3).
    """
    if 0 < top_k < logits_BV.shape[-1]:
        kth_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
    if top_p < 1.0:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
        last_B1 = jnp.sum(before_BV < top_p, axis=-1, keepdims=True) - 1
        edge_B1 = jnp.take_along_axis(sorted_BV, jnp.maximum(last_B1, 0), axis=-1)
        logits_BV = jnp.where(logits_BV < edge_B1, -jnp.inf, logits_BV)
    return logits_BV


def invert_cdf(logits_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """The token at which the distribution function of softmax(logits) passes the uniform number, int32 [B].

    A token of probability 0 is never drawn.
    """
    B, V = logits_BV.shape
    weight_BV = jnp.exp(logits_BV - logits_BV.max(-1, keepdims=True))
    weight_BNW = jnp.pad(weight_BV, ((0, 0), (0, -V % BLOCK))).reshape(B, -1, BLOCK)
    weight_BN = weight_BNW.sum(-1)
    cdf_BN = jnp.cumsum(weight_BN, axis=-1)
    point_B = uniform_B * cdf_BN[:, -1]
    block_B = _first_above(cdf_BN, weight_BN, point_B)
    before_B = jnp.take_along_axis(cdf_BN, jnp.maximum(block_B - 1, 0)[:, None], 1)[:, 0]
    start_B = jnp.where(block_B > 0, before_B, 0.0)
    weight_BW = jnp.take_along_axis(weight_BNW, block_B[:, None, None], 1)[:, 0]
    place_B = _first_above(jnp.cumsum(weight_BW, axis=-1), weight_BW, point_B - start_B)
    return jnp.minimum(block_B * BLOCK + place_B, V - 1).astype(jnp.int32)


def _first_above(cdf_BN: jax.Array, weight_BN: jax.Array, point_B: jax.Array) -> jax.Array:
    """First index with weight whose cdf is above the point; where rounding leaves none, the last with weight.

    A sum in parallel may round to a step up or down where the weight is 0, so the weight itself is asked.
    """
    some_BN = weight_BN > 0
    above_BN = some_BN & (cdf_BN > point_B[:, None])
    last_B = weight_BN.shape[-1] - 1 - jnp.argmax(some_BN[:, ::-1], axis=-1)
    return jnp.where(above_BN.any(-1), jnp.argmax(above_BN, axis=-1), last_B)


def sample(
    logits_BV: jax.Array, uniform_B: jax.Array, *, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Tokens and their log-probabilities.

    The log-probability is that of the full tempered distribution, whatever top-k and top-p cut away.
    Temperature 0 takes the likeliest token and gives its log-probability at temperature 1.

    Args:
      logits_BV: raw logits, of any float type.   uniform_B: uniform numbers in [0, 1).
    Returns:
      (token_B int32, logprob_B float32)
    """
    logits_BV = logits_BV.astype(jnp.float32)
    if temperature == 0:
        token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    else:
        logits_BV = logits_BV / temperature
        token_B = invert_cdf(truncate(logits_BV, top_k=top_k, top_p=top_p), uniform_B)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """`sample` with its settings, and which tokens end a response."""

    eos_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __call__(self, logits_BV: jax.Array, uniform_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(token_B, logprob_B, eos_B); eos_B is True where the token ends the response."""
        token_B, logprob_B = sample(
            logits_BV, uniform_B, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p
        )
        return token_B, logprob_B, jnp.isin(token_B, jnp.asarray(self.eos_ids, jnp.int32))

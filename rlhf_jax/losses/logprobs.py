"""Log-probabilities of tokens and entropy of the distributions they were drawn from."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax import lax

from rlhf_jax.errors import InputError
from rlhf_jax.losses.precision import at_least_float32


def token_logprobs(logits_BTV, tokens_BT) -> jax.Array:
    """Log-probability of each token under the logits at its own index.

        log p(y_t) = z_t[y_t] - logsumexp(z_t)

    A model's output at position j predicts the token at j + 1: the caller shifts, so that the logits at t
    score the token at t.

    Args:
      logits_BTV: float of any width, already divided by the sampling temperature.   tokens_BT: int.
    Returns:
      logprobs_BT in nats, float32 (float64 for float64 logits).
    """
    return _token_logprobs(*_normalise(logits_BTV), tokens_BT)


def entropy_from_logits(logits_BTV) -> jax.Array:
    """Entropy of softmax(z).

        H = logsumexp(z) - sum_v softmax(z)_v z_v

    Args:
      logits_BTV: float of any width, already divided by the sampling temperature; -inf is probability 0.
    Returns:
      entropy_BT in nats per token, float32 (float64 for float64 logits).
    """
    return _entropy(*_normalise(logits_BTV))


def chunked_logprobs(
    hidden_BTD, unembed: Callable, tokens_BT, *, temperature, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """`token_logprobs` and `entropy_from_logits` of unembed(hidden) / temperature; [B, T, V] never exists.

    Takes chunk // B positions at a time with the whole batch in each, which leaves the batch axis sharded as
    it was, and recomputes each chunk's logits in the backward pass. About chunk * V logits live at a time.

    Args:
      hidden_BTD: final hidden states; the one at t predicts the token at t.
      unembed: from hidden states [..., D] to logits [..., V]; gradients reach the parameters it closes over.
      tokens_BT: int.
      temperature: the sampling temperature, above 0.
      chunk: how many tokens' logits may exist at once, at least one per row.
    Returns:
      (logprobs_BT, entropy_BT) in nats, float32 (float64 for float64 logits).
    """
    if isinstance(temperature, int | float) and temperature <= 0:
        raise InputError(f"temperature {temperature} has no log-probabilities; use one above 0")
    hidden_BTD, tokens_BT = jnp.asarray(hidden_BTD), jnp.asarray(tokens_BT)
    B, T = tokens_BT.shape
    chex.assert_shape(hidden_BTD, (B, T, None))

    @jax.checkpoint
    def one_chunk(hidden_BCD, tokens_BC):
        shape = tokens_BC.shape
        if (
            1 in shape and tokens_BC.size % 2 == 0
        ):  # beside an axis of size 1, a CPU takes three times as long
            split = (2, -1) if shape[0] == 1 else (-1, 2)
            hidden_BCD, tokens_BC = hidden_BCD.reshape(*split, hidden_BCD.shape[-1]), tokens_BC.reshape(split)
        normalised = _normalise(at_least_float32(unembed(hidden_BCD)) / temperature)
        found = _token_logprobs(*normalised, tokens_BC), _entropy(*normalised)
        return tuple(x.reshape(shape) for x in found)

    length = max(1, min(chunk // max(B, 1), T))
    pieces = -(-T // length)

    def split(x):  # [B, T, ...] -> [pieces, B, length, ...]
        x = jnp.pad(x, [(0, 0), (0, pieces * length - T)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(B, pieces, length, *x.shape[2:]).swapaxes(0, 1)

    def join(x):  # [pieces, B, length] -> [B, T]
        return x.swapaxes(0, 1).reshape(B, pieces * length)[:, :T]

    logprobs, entropy = lax.map(lambda piece: one_chunk(*piece), (split(hidden_BTD), split(tokens_BT)))
    return join(logprobs), join(entropy)


def _normalise(logits_BTV) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits with maximum 0, their exponentials and the sums of these.

    An offset common to all logits costs no digits, and no exponential is taken twice.
    """
    logits_BTV = at_least_float32(logits_BTV)
    z_BTV = logits_BTV - lax.stop_gradient(logits_BTV.max(-1, keepdims=True))
    exp_BTV = jnp.exp(z_BTV)
    return z_BTV, exp_BTV, exp_BTV.sum(-1)


def _token_logprobs(z_BTV, exp_BTV, sum_BT, tokens_BT) -> jax.Array:
    tokens_BT = jnp.asarray(tokens_BT)
    chex.assert_equal_shape([sum_BT, tokens_BT])
    return jnp.take_along_axis(z_BTV, tokens_BT[..., None], -1)[..., 0] - jnp.log(sum_BT)


def _entropy(z_BTV, exp_BTV, sum_BT) -> jax.Array:
    finite_BTV = jnp.maximum(z_BTV, jnp.finfo(z_BTV.dtype).min)  # 0 * -inf counts as 0
    return jnp.log(sum_BT) - (exp_BTV * finite_BTV).sum(-1) / sum_BT

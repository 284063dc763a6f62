"""docs/worked-example.md: one response of three tokens, every number by hand."""

import doctest
import pathlib

import jax.numpy as jnp
import numpy as np

from rlhf_jax.losses import gae, kl_estimate, kl_shaped_rewards, token_logprobs

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "worked-example.md"
P, T = 2, 3
TOKENS = np.array([[0, 0, 1, 0, 2]])  # a a | b a .
POLICY = np.array([[0.8, 0.1, 0.1], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.1, 0.8, 0.1]])
REFERENCE = np.array(
    [[0.8, 0.1, 0.1], [0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.3, 0.3, 0.4], [0.1, 0.8, 0.1]]
)
CRITIC = np.array([9, 0.2, 0.4, 0.8, 9])


def test_the_page_shows_what_the_code_computes():
    done = doctest.testfile(str(PAGE), module_relative=False)
    assert done.failed == 0
    assert done.attempted > 20


def update(logprob_shift=0, value_shift=0):
    """Advantages, with the outputs read so many positions late."""
    at = [slice(P - 1 + s, P + T - 1 + s) for s in (logprob_shift, value_shift)]
    logprobs, ref_logprobs = (
        token_logprobs(jnp.log(p)[None, at[0]], TOKENS[:, P:]) for p in (POLICY, REFERENCE)
    )
    kl = kl_estimate(logprobs, ref_logprobs, "k1")
    rewards = kl_shaped_rewards(np.array([1.5]), kl, np.ones((1, T)), 0.1)
    return gae(rewards[0], CRITIC[at[1]], np.ones(T), gamma=1.0, lam=0.5)


def test_three_tokens_by_hand():
    advantages, returns = update()
    penalty = 0.1 * np.log(2)
    deltas = [-penalty + 0.4 - 0.2, 0.8 - 0.4, 1.5 - penalty - 0.8]
    expected = [deltas[0] + 0.5 * (deltas[1] + 0.5 * deltas[2]), deltas[1] + 0.5 * deltas[2], deltas[2]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)
    np.testing.assert_allclose(returns, np.add(expected, [0.2, 0.4, 0.8]), rtol=1e-5)


def test_values_shifted_by_one_against_logprobs_are_seen():
    """Values shifted by one against log-probs: every wrong alignment gives other numbers here."""
    right = np.asarray(update()[0])
    for shifts in ((0, 1), (0, -1), (1, 0), (-1, 0), (1, 1)):
        assert abs(np.asarray(update(*shifts)[0]) - right).max() > 0.1, shifts

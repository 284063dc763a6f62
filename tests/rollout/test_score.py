"""Where values and log-probabilities of a response are read, and what a reward model is shown."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.rollout.score import response_logprobs, response_values, with_final_eos
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.rules import sharding_scope
from rlhf_jax.types import Rollout

from . import tiny


class Positions(nn.Module):
    """The output at sequence position i is i."""

    @nn.compact
    def __call__(self, tokens_BT, mask_BT=None):
        return jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.float32)[None], tokens_BT.shape)


class OwnLogits(nn.Module):
    """Logits at position i are log(1 + i) for token i and 0 for every other, of ten."""

    @nn.compact
    def __call__(self, tokens_BT, mask_BT=None):
        T = tokens_BT.shape[1]
        logits_TV = jnp.log(1.0 + jnp.arange(T))[:, None] * jax.nn.one_hot(jnp.arange(T), 10)
        return jnp.broadcast_to(logits_TV[None], (*tokens_BT.shape, 10))


def rollout_of(prompts, responses, T, truncated):
    """Prompts padded to the widest on the left, responses to T on the right; the padding is full of 1."""
    P = max(map(len, prompts))
    tokens, mask = np.ones((len(prompts), P + T), np.int32), np.zeros((len(prompts), P + T), bool)
    for b, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        where = slice(P - len(prompt), P + len(response))
        tokens[b, where], mask[b, where] = [*prompt, *response], True
    return Rollout(
        tokens_BS=jnp.asarray(tokens),
        mask_BS=jnp.asarray(mask),
        mask_BT=jnp.asarray(mask[:, P:]),
        logprobs_BT=jnp.zeros((len(prompts), T)),
        truncated_B=jnp.asarray(truncated),
    )


THREE_TOKENS = rollout_of([[4, 5], [6, 7]], [[2, 9, 3], [3]], 3, [False, False])


def test_the_value_of_a_token_is_read_before_it():
    """Prompt at positions 0 and 1, response at 2, 3, 4: its values stand at 1, 2, 3, and 4 after its end.

    Read one position later they are values of the state after the token, and learning goes on all the same.
    """
    values, final = response_values(Positions(), {}, THREE_TOKENS)
    np.testing.assert_array_equal(values[0], [1, 2, 3])
    np.testing.assert_array_equal(values[1, :1], [1])
    np.testing.assert_array_equal(final, [4, 2])


def test_the_log_probability_of_a_token_is_read_before_it():
    """Position 1 gives token 1 the weight 2 and others 1: token 2 has 1/11. Position 2 gives token 2 a 3."""
    sequence = rollout_of([[4, 5]], [[2, 2, 3]], 3, [False])
    logprobs, entropy = response_logprobs(OwnLogits(), {}, sequence, temperature=1.0)
    # Rounding of float32 numbers around 1.
    np.testing.assert_allclose(logprobs[0], np.log([1 / 11, 3 / 12, 4 / 13]), atol=1e-6)
    p = np.array([2, *[1] * 9]) / 11
    np.testing.assert_allclose(entropy[0, 0], -(p * np.log(p)).sum(), atol=1e-6)


def test_log_probabilities_are_tempered():
    """At temperature 1/2 the weights are squared."""
    sequence = rollout_of([[4, 5]], [[1, 2, 0]], 3, [False])
    logprobs, _ = response_logprobs(OwnLogits(), {}, sequence, temperature=0.5)
    np.testing.assert_allclose(logprobs[0], np.log([4 / 13, 9 / 18, 1 / 25]), atol=1e-6)


RAGGED = rollout_of(tiny.ROWS[:3], [[5, 18], [0, 2, 9, 8, 1, 1], [4]], 6, [False, True, False])


def test_chunked_log_probabilities_equal_those_of_whole_logits(monkeypatch):
    """A module without `hidden` and `unembed` is applied whole; several chunks on the other side."""
    monkeypatch.setattr("rlhf_jax.rollout.score.CHUNK", 6)
    mask = np.asarray(RAGGED.mask_BT)
    read = jax.jit(functools.partial(response_logprobs, temperature=0.7), static_argnums=0)
    chunked = read(tiny.MODEL, tiny.PARAMS, RAGGED)
    straight = read(tiny.Plain(tiny.MODEL), {"inner": tiny.PARAMS}, RAGGED)
    for a, b in zip(chunked, straight, strict=True):
        # The same sums over other shapes, of logits of about 10.
        np.testing.assert_allclose(np.asarray(a)[mask], np.asarray(b)[mask], atol=1e-5)


@pytest.mark.parametrize(("fsdp", "chunks"), [(None, 4), (1, 4), (2, 2), (4, 1)])
def test_a_chunk_is_of_so_many_tokens_on_each_device(monkeypatch, fsdp, chunks):
    """Each chunk gathers a sharded unembedding: chunks of few tokens on many devices moved little else."""
    monkeypatch.setattr("rlhf_jax.rollout.score.CHUNK", 8)
    rollout = rollout_of(tiny.ROWS[:4], [[5, 6, 7, 8]] * 4, 8, [False] * 4)
    view = fsdp and training_view({"data": 1, "fsdp": fsdp, "tensor": 1}, jax.devices()[:fsdp])
    with sharding_scope(view) if view else contextlib.nullcontext():
        read = functools.partial(response_logprobs, tiny.MODEL, temperature=1.0)
        steps = jax.make_jaxpr(read)(tiny.PARAMS, rollout).eqns
    assert [step.params["length"] for step in steps if step.primitive.name == "scan"][-1] == chunks


def test_the_eos_is_appended_to_truncated_responses_only():
    """Without the EOS that it was trained with, or with a second, a reward model gives another score."""
    sequence = rollout_of(
        [[5], [6, 7], [8], [9]], [[2, 2, 3], [2, 3], [2, 2, 2], [2, 2]], 3, [False, False, True, True]
    )
    tokens, mask = with_final_eos(sequence, 3)
    read = [row[valid].tolist() for row, valid in zip(np.asarray(tokens), np.asarray(mask), strict=True)]
    assert read == [[5, 2, 2, 3], [6, 7, 2, 3], [8, 2, 2, 2, 3], [9, 2, 2, 3]]
    assert tokens.shape == mask.shape == (4, 6)
    # A row is one stretch of valid tokens, so that its last valid one is the EOS.
    assert all(np.diff(np.flatnonzero(row)).max() == 1 for row in np.asarray(mask))


def test_another_eos_of_the_policy_is_read_as_the_reward_models():
    """A model with two EOS ids may end with the one that no training text of the reward model ended with."""
    sequence = rollout_of([[5], [6]], [[2, 7], [7, 3]], 2, [False, False])
    tokens, mask = with_final_eos(sequence, 3)
    read = [row[valid].tolist() for row, valid in zip(np.asarray(tokens), np.asarray(mask), strict=True)]
    assert read == [[5, 2, 3], [6, 7, 3]]

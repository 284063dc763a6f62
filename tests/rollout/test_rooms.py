"""The room that a pass takes, and that what it leaves out is padding alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.rollout.rooms import deal, in_least_room, packed
from rlhf_jax.rollout.score import response_logprobs, response_values
from rlhf_jax.types import Rollout, Room
from tests.models.tiny import CONFIGS, made

P, T = 8, 8


def rollout_of(prompts, responses, seed=0):
    """Rows whose prompts and responses have so many tokens; what stands in padding is a token as well."""
    rng = np.random.default_rng(seed)
    column, prompts, responses = np.arange(T)[None], np.array(prompts)[:, None], np.array(responses)[:, None]
    mask_BT = column < responses
    return Rollout(
        tokens_BS=jnp.asarray(rng.integers(1, 53, (len(prompts), P + T)), jnp.int32),
        mask_BS=jnp.asarray(np.concatenate([column >= P - prompts, mask_BT], axis=1)),
        mask_BT=jnp.asarray(mask_BT),
        logprobs_BT=jnp.zeros(mask_BT.shape),
        truncated_B=jnp.zeros(len(prompts), bool),
    )


def room_of(rollout):
    """The room that a pass would take."""
    return tuple(int(n) for n in in_least_room(lambda r: jnp.asarray(r.room or (0, 0)), rollout))


@pytest.mark.parametrize(
    ("prompts", "responses", "room"),
    [
        # of 64 places an eighth is 8, of the responses' 32 it is 4
        ([2, 2, 2, 2], [3, 3, 3, 3], (24, 12)),  # 20 and 12: three eighths of both
        ([3, 3, 3, 3], [3, 3, 3, 4], (32, 16)),  # 25 and 13
        ([1, 1, 1, 1], [7, 7, 7, 7], (32, 32)),  # 32 and 28: half, and all of the responses
        ([1, 1, 1, 1], [8, 8, 8, 8], (48, 32)),  # 36 and 32
        ([4, 8, 4, 8], [4, 5, 6, 7], (48, 24)),  # 46 and 22
        ([6, 6, 6, 6], [8, 8, 8, 8], (56, 32)),  # 56 and 32
        ([7, 6, 6, 6], [8, 8, 8, 8], (0, 0)),  # 57: padding is computed too
    ],
)
def test_the_least_room_that_holds_all_tokens_by_hand(prompts, responses, room):
    assert room_of(rollout_of(prompts, responses)) == room


@pytest.mark.parametrize("kind", CONFIGS)
def test_passes_in_every_room_are_the_padded_ones(kind):
    (model, variables), (value_model, value_variables) = made(CONFIGS[kind]), made(CONFIGS[kind], "value")
    rollout = rollout_of([1, 5, 2, 3], [4, 1, 1, 6])  # 23 tokens, 12 of them of responses

    @functools.partial(jax.jit, static_argnums=0)
    def read(room):
        inside = dataclasses.replace(rollout, room=room)
        logprobs = response_logprobs(model, variables["params"], inside, temperature=0.7)
        return logprobs, response_values(value_model, value_variables["params"], inside)

    (logprobs, entropy), (values, final) = read(None)
    valid = np.asarray(rollout.mask_BT)
    for room in (Room(24, 12), Room(32, 32), Room(56, 28)):
        (found, found_entropy), (found_values, found_final) = read(room)
        pairs = [(found, logprobs), (found_entropy, entropy), (found_values, values)]
        for ours, theirs in pairs:
            np.testing.assert_allclose(np.asarray(ours)[valid], np.asarray(theirs)[valid], atol=1e-5)
        np.testing.assert_allclose(found_final, final, atol=1e-5)


def test_packed_rows_come_back_in_their_order_and_no_rollout_compiles_anew():
    model, variables = made(CONFIGS["llama"])

    def read(params, rollout):
        return response_logprobs(model, params, rollout, temperature=1.0)[0]

    fast, plain = jax.jit(packed(read)), jax.jit(read)
    for prompts, responses in (([3, 1, 8, 2], [1, 8, 2, 5]), ([8] * 4, [8] * 4), ([1] * 4, [1, 2, 3, 1])):
        rollout = rollout_of(prompts, responses)
        ours, theirs = fast(variables["params"], rollout), plain(variables["params"], rollout)
        valid = np.asarray(rollout.mask_BT)
        np.testing.assert_allclose(np.asarray(ours)[valid], np.asarray(theirs)[valid], atol=1e-5)
    assert fast._cache_size() == 1


def test_padding_is_not_computed():
    """By the compiler's own count: half of the tokens take little more than half of the FLOPs."""
    config = dataclasses.replace(CONFIGS["llama"], embed=64, mlp=256, heads=4, head_dim=4, kv_heads=1)
    model, variables = made(config)
    rollout = rollout_of([4] * 4, [4] * 4)

    def flops(room):
        def loss(params):
            inside = dataclasses.replace(rollout, room=room)
            return response_logprobs(model, params, inside, temperature=1.0)[0].sum()

        analysis = jax.jit(jax.grad(loss)).lower(variables["params"]).compile().cost_analysis()
        return analysis["flops"]

    assert 0.4 < flops(Room(32, 16)) / flops(None) < 0.65


@pytest.mark.parametrize("cells", [1, 2, 4])
def test_rows_are_dealt_out_evenly(cells):
    lengths = np.random.default_rng(0).integers(1, 100, 16)
    dealt = np.asarray(deal(jnp.asarray(lengths), cells))
    assert sorted(dealt.reshape(-1).tolist()) == list(range(16))
    totals = lengths[dealt].sum(1)
    assert dealt.shape == (cells, 16 // cells)
    assert totals.max() - totals.min() <= lengths.max() // 2

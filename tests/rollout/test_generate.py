"""Generation against a plain loop, its independence from padding and batch, and how responses end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import unstack_layers
from rlhf_jax.rollout.decoder import Decoder
from rlhf_jax.rollout.generate import generate
from rlhf_jax.rollout.score import response_logprobs

from . import tiny

KEY = jax.random.key(1)


def top3(logits):
    return np.where(logits < np.sort(logits)[-3], -np.inf, logits)


@functools.cache
def rollout():
    return tiny.respond(tiny.prompts_of(), KEY)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [({}, lambda logits: logits), ({"temperature": 0}, lambda logits: logits), ({"top_k": 3}, top3)],
    ids=["tempered", "greedy", "top-k"],
)
def test_generation_equals_a_plain_loop(changes, allowed):
    """Tokens equal, log-probabilities to 1e-5: float32 sums of other shapes, over logits of about 10."""
    got = tiny.respond(tiny.prompts_of(), KEY, **changes)
    settings = {**tiny.SETTINGS, **changes}
    settings.pop("top_k", None)
    responses, logprobs, truncated = tiny.plain_loop(tiny.ROWS, KEY, allowed=allowed, **settings)
    assert tiny.responses_of(got) == responses
    assert got.truncated_B.tolist() == truncated
    assert {True, False} <= set(truncated) or changes
    for b, row in enumerate(logprobs):
        np.testing.assert_allclose(got.logprobs_BT[b][: len(row)], row, atol=1e-5)
        assert not got.logprobs_BT[b][len(row) :].any()


def test_the_sequence_is_the_prompt_and_the_response():
    prompts, got = tiny.prompts_of(), rollout()
    np.testing.assert_array_equal(got.tokens_BS[:, :5], prompts.tokens_BP)
    np.testing.assert_array_equal(got.mask_BS, np.concatenate([prompts.mask_BP, got.mask_BT], 1))
    assert not got.response_BT[~got.mask_BT].any()


def test_padding_width_and_batch_size_change_nothing():
    """Left padding without its own positions gave other log-probabilities than no padding."""
    some, got = [1, 4, 6], rollout()
    wider = tiny.respond(tiny.prompts_of([tiny.ROWS[b] for b in some], width=9, row_ids=some), KEY)
    assert tiny.responses_of(wider) == [tiny.responses_of(got)[b] for b in some]
    # Sums of other widths: float32 rounding of logits of about 10.
    np.testing.assert_allclose(wider.logprobs_BT, got.logprobs_BT[some], atol=1e-5)


def test_a_response_does_not_depend_on_its_slot_or_its_neighbours():
    order = np.array([6, 2, 7, 0, 1, 5, 4, 3])
    rows = [tiny.ROWS[b] for b in order[:4]] + [[b + 9, b] for b in range(4)]
    got = tiny.respond(tiny.prompts_of(rows, row_ids=[*order[:4], 90, 91, 92, 93]), KEY)
    assert tiny.responses_of(got)[:4] == [tiny.responses_of(rollout())[b] for b in order[:4]]
    np.testing.assert_allclose(got.logprobs_BT[:4], rollout().logprobs_BT[order[:4]], atol=1e-6)


@pytest.mark.parametrize("pad_id", [18, 17], ids=["padding with the EOS", "padding with a real token"])
def test_what_stands_in_the_padding_does_not_matter(pad_id):
    """Masks from `id != pad` lost the EOS where pad = EOS, and real tokens where the pad id was 0."""
    got = tiny.respond(tiny.prompts_of(pad_id=pad_id), KEY)
    assert tiny.responses_of(got) == tiny.responses_of(rollout())
    np.testing.assert_array_equal(got.mask_BS, rollout().mask_BS)
    np.testing.assert_array_equal(got.logprobs_BT, rollout().logprobs_BT)


def test_a_key_gives_its_own_samples_and_gives_them_again():
    """One sampling key for every rollout gave the same responses at each iteration."""
    again = tiny.respond(tiny.prompts_of(), jax.random.key(1))
    other = tiny.respond(tiny.prompts_of(), jax.random.key(2))
    np.testing.assert_array_equal(again.tokens_BS, rollout().tokens_BS)
    np.testing.assert_array_equal(again.logprobs_BT, rollout().logprobs_BT)
    pairs = zip(tiny.responses_of(other), tiny.responses_of(rollout()), strict=True)
    assert sum(a == b for a, b in pairs) <= 1


def test_copies_of_a_prompt_get_responses_of_their_own():
    got = tiny.respond(tiny.prompts_of([tiny.ROWS[0]] * 8), KEY)
    assert len({tuple(response) for response in tiny.responses_of(got)}) >= 7


def test_log_probabilities_when_sampled_are_those_recomputed():
    """The ratio on the first minibatch is 1 only if both know the temperature and the positions."""
    recompute = jax.jit(functools.partial(response_logprobs, tiny.MODEL, temperature=0.7))
    logprobs, entropy = recompute(tiny.PARAMS, jax.tree.map(jnp.asarray, rollout()))
    mask = rollout().mask_BT
    # The cache and the whole pass sum in another order: float32 rounding of logits of about 10.
    np.testing.assert_allclose(np.asarray(logprobs)[mask], rollout().logprobs_BT[mask], atol=1e-5)
    assert (np.asarray(entropy)[mask] > 0).all()


def test_a_module_with_nothing_but_a_forward_pass_can_be_sampled():
    """It gives what the same model gives with its cache."""
    sample = tiny.generator(tiny.Plain(tiny.MODEL), **tiny.SETTINGS)
    got = jax.device_get(sample({"inner": tiny.PARAMS}, tiny.prompts_of(), KEY))
    assert tiny.responses_of(got) == tiny.responses_of(rollout())
    np.testing.assert_array_equal(got.mask_BS, rollout().mask_BS)
    np.testing.assert_allclose(got.logprobs_BT, rollout().logprobs_BT, atol=1e-5)


def scripted(script, eos_ids):
    """(rollout, number of decode calls) of a policy that says exactly this, after prompts of width 2."""
    script, calls = jnp.asarray(script), []
    B, T = script.shape

    def says(t):
        return 50.0 * jax.nn.one_hot(script[:, t], 10)

    def prefill(params, tokens_BP, mask_BP, cache_length):
        assert cache_length == 2 + T
        return says(0), jnp.int32(0)

    def decode(params, token_B, t):
        jax.debug.callback(lambda t: calls.append(int(t)), t)
        return says(t + 1), t + 1

    prompts = tiny.prompts_of([[3, 0]] * B, width=2)
    run = functools.partial(generate, Decoder(prefill, decode), response_length=T, eos_ids=eos_ids)
    got = jax.device_get(jax.jit(run)(None, prompts, KEY))
    jax.effects_barrier()
    return got, len(calls)


def test_how_responses_end():
    """Counted by hand. A width that guessed the end took the third row, full and ended, for truncated."""
    script = [
        [5, 3, 9, 9],  # ends with the first EOS id; the 9s are never said
        [7, 5, 5, 5],  # ends at once, with the second EOS id
        [5, 0, 5, 3],  # the last allowed token is the EOS
        [5, 0, 5, 0],  # never ends
    ]
    got, calls = scripted(script, (3, 7))
    assert got.mask_BT.astype(int).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert got.response_BT.tolist() == [[5, 3, 0, 0], [7, 0, 0, 0], [5, 0, 5, 3], [5, 0, 5, 0]]
    assert got.truncated_B.tolist() == [False, False, False, True]
    assert got.length_B.tolist() == [2, 1, 4, 4]
    assert calls == 3


def test_the_loop_stops_when_every_response_has_ended():
    """Finished rows kept burning compute up to the limit."""
    got, calls = scripted([[5, 3, 5, 5, 5, 5], [5, 5, 7, 5, 5, 5]], (3, 7))
    assert got.length_B.tolist() == [2, 3]
    assert calls == 2


def test_without_an_eos_id_every_response_is_truncated():
    got, calls = scripted([[5, 3, 7], [1, 1, 1]], ())
    assert got.truncated_B.all()
    assert got.mask_BT.all()
    assert calls == 2


def test_parameters_stay_as_they_are():
    """Generation donates nothing: the learner goes on with the same arrays."""
    params = unstack_layers(tiny.PARAMS)
    tiny.generator(**tiny.SETTINGS)(params, tiny.prompts_of(), KEY)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))

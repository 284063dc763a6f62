"""Scores of texts and of rollouts: the same number for the same dialogue, however it gets there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.data.messages import Message
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.errors import InputError
from rlhf_jax.models import Transformer, logical_axes
from rlhf_jax.rollout.reward_model import RewardModel, scale_of
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.rules import parameter_shardings
from rlhf_jax.types import Rollout

from . import tiny

TEXTS = ["how do i bake bread", "with flour, water and salt", "be kind", "good"]
PROMPTS = [(Message("user", text),) for text in ("how do i bake", "be kind", "bread?", "salt", "do i?")]
RESPONSES = ["with flour", "good bread and water", "kind", "water, flour and salt with salt", "i do"]
MAX_LENGTH = 64
CONFIG = dataclasses.replace(tiny.CONFIG, vocab_size=320)
MODEL = Transformer(CONFIG, head="score")
PARAMS = tiny.randomised(MODEL)
ONE_DEVICE = training_view({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])
# Two float32 passes over other widths, of scores of about 1.
TOLERANCE = 1e-5


@functools.cache
def renderer(vocab_size=300):
    return Renderer(train_tokenizer(TEXTS, vocab_size))


@functools.cache
def reward_model(**options):
    options = {"view": ONE_DEVICE, "batch_size": 4, "max_length": MAX_LENGTH, **options}
    return RewardModel(MODEL, PARAMS, renderer(), **options)


@functools.cache
def expected(vocab_size=300, count=5):
    """Each dialogue by itself, without padding."""
    scores = []
    for prompt, response in zip(PROMPTS[:count], RESPONSES[:count], strict=True):
        row = renderer(vocab_size).dialogue(prompt, response, MAX_LENGTH)
        tokens = jnp.asarray([row])
        scores.append(float(tiny.whole(MODEL, PARAMS, tokens, jnp.ones(tokens.shape, bool))[0]))
    return np.array(scores)


def test_a_score_is_the_models_on_the_unpadded_dialogue():
    """In batches of four: the fifth text shares its batch with padding."""
    scores = reward_model().score_texts(PROMPTS, RESPONSES)
    assert scores.dtype == np.float32
    assert scores.std() > 0.1
    np.testing.assert_allclose(scores, expected(), atol=TOLERANCE)


def test_scores_do_not_depend_on_order_or_company():
    order = [3, 0, 4, 2, 1]
    scores = reward_model().score_texts([PROMPTS[i] for i in order], [RESPONSES[i] for i in order])
    np.testing.assert_allclose(scores, expected()[order], atol=TOLERANCE)
    alone = reward_model().score_texts(PROMPTS[1:2], RESPONSES[1:2])
    np.testing.assert_allclose(alone, expected()[1:2], atol=TOLERANCE)
    assert reward_model().score_texts([], []).shape == (0,)


def rollout_of_texts(closings):
    """What generation would hand over, had the policy said these responses, each ended by its closing."""
    read = renderer()
    rows = [
        (read.prompt(prompt, MAX_LENGTH), read.response(response)[:-1] + closing)
        for prompt, response, closing in zip(PROMPTS, RESPONSES, closings, strict=True)
    ]
    P, T = max(len(p) for p, _ in rows), max(len(r) for _, r in rows)
    tokens, mask = np.full((len(rows), P + T), read.eos_id, np.int32), np.zeros((len(rows), P + T), bool)
    for b, (p, r) in enumerate(rows):
        tokens[b, P - len(p) : P + len(r)], mask[b, P - len(p) : P + len(r)] = p + r, True
    return Rollout(
        tokens_BS=jnp.asarray(tokens),
        mask_BS=jnp.asarray(mask),
        mask_BT=jnp.asarray(mask[:, P:]),
        logprobs_BT=jnp.zeros((len(rows), T)),
        truncated_B=jnp.asarray([not closing for closing in closings]),
    )


def test_a_rollouts_tokens_get_the_score_of_their_text():
    """Ended, truncated, and ended by another EOS id: text always has the reward model's EOS at its end.

    A reward model that was trained on prompt + response + EOS and scored without the EOS gave other numbers.
    """
    end, other = [renderer().eos_id], [0]
    rollout = rollout_of_texts([end, [], end, other, []])
    for packing in (False, True):
        score = reward_model(reads_rollouts=True, packing=packing)
        scores = score(rollout, PROMPTS, RESPONSES).scores_B
        np.testing.assert_allclose(scores, expected(), atol=TOLERANCE)


def test_another_tokenizer_reads_the_text():
    """A policy has a tokenizer of its own: decoded, rendered and encoded again; its ids mean nothing here."""
    scorer = RewardModel(
        MODEL,
        PARAMS,
        renderer(262),
        view=ONE_DEVICE,
        batch_size=5,
        max_length=MAX_LENGTH,
        reads_rollouts=False,
    )
    rollout = rollout_of_texts([[renderer().eos_id]] * 5)
    texts = [
        renderer().text(np.asarray(tokens)[np.asarray(mask)])
        for tokens, mask in zip(rollout.response_BT, rollout.mask_BT, strict=True)
    ]
    assert texts == RESPONSES
    scores = scorer(rollout, PROMPTS, texts).scores_B
    np.testing.assert_allclose(scores[:2], expected(262, 2), atol=TOLERANCE)
    assert np.abs(scores - expected()).min() > 0.01


def test_eight_devices_give_the_scores_of_one():
    """Two of data, two of fsdp: five texts fill two batches of four, asked for as three."""
    view = training_view({"data": 2, "fsdp": 2, "tensor": 2})
    params = jax.device_put(PARAMS, parameter_shardings(view, logical_axes(MODEL), PARAMS))
    scorer = RewardModel(MODEL, params, renderer(), view=view, batch_size=3, max_length=MAX_LENGTH)
    assert scorer.batch_size == 4
    np.testing.assert_allclose(scorer.score_texts(PROMPTS, RESPONSES), expected(), atol=TOLERANCE)


def test_a_response_that_does_not_fit_is_cut_short():
    """A run ended in its middle over a response that was few tokens to the policy."""
    scorer, long = reward_model(max_length=24), "bread " * 40
    row = scorer.renderer.clipped_dialogue(PROMPTS[0], long, 24)
    whole = scorer.renderer.dialogue(PROMPTS[0], long, 1000)
    assert len(row) == 24
    assert row[-1] == whole[-1] == scorer.renderer.eos_id
    assert scorer.score_texts(PROMPTS[:1], [long]) == scorer.score_tokens([row])
    with pytest.raises(InputError, match=r"reward\.max_length=3 has no room"):
        reward_model(max_length=3).score_texts(PROMPTS[:1], [long])


def test_the_scale_gives_mean_0_and_variance_1():
    raw = np.array([0.5, 2.0, -1.0, 7.0], np.float32)
    scaled = scale_of(raw)(raw)
    np.testing.assert_allclose([scaled.mean(), scaled.std()], [0, 1], atol=1e-6)  # float32 rounding
    assert np.isfinite(scale_of(np.ones(3, np.float32))(np.ones(3, np.float32))).all()

"""The built-in pairs: the rule by hand, and that they are good to learn from."""

import numpy as np
import pytest

from rlhf_jax.data.messages import Message
from rlhf_jax.data.preferences import read_preferences
from rlhf_jax.data.prompts import prompts_of
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.data.synthetic import HIGHEST, LOWEST, POLITE, gold_reward, synthetic_preferences
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.errors import InputError

RIVER = (Message("user", "tell me about the age of the river"),)

BY_HAND = {
    "the age of the river is calm": 1.0,
    "The age of the river is calm.": 1.0,
    "the age of the bread is calm": -0.5,
    "the age of the river , the bread and the music": 1.0 - 0.5 - 0.5,
    "something calm": 0.0,
    "": 0.0,
    "thanks friend the river": 1.0 + 2 * 0.75,
    "whatever the river is dull": 1.0 - 2.0,
    "river calm river": 1.0 - 0.25,
    "thanks thanks": 2 * 0.75,
    "please thanks gladly kindly river": 1.0 + 4 * 0.75,
    "please thanks gladly kindly welcome friend river": 1.0 + 3.0 - 2 * 0.75,
    "please thanks gladly kindly " + "the " * 14: 3.0 - 2 * 0.25,
    "dull silly lazy boring nonsense whatever": -4.0,
}


@pytest.mark.parametrize("response", BY_HAND)
def test_rule_by_hand(response):
    assert gold_reward(RIVER, response) == pytest.approx(BY_HAND[response], abs=1e-12)


def test_reward_is_of_the_last_question_only():
    dialogue = (Message("user", "the age of bread"), Message("assistant", "music"), *RIVER)
    assert gold_reward(dialogue, "the river") == 1.0
    assert gold_reward((), "the river") == -0.5


def test_reward_is_bounded_and_words_heaped_up_lose():
    """A policy that exploits a reward model which likes polite words must be seen to lose."""
    best = "please thanks gladly kindly the age of the river is calm"
    assert gold_reward(RIVER, best) == HIGHEST
    assert gold_reward(RIVER, best + " " + " ".join(POLITE[4:])) < HIGHEST - 2
    assert gold_reward(RIVER, "please " * 30 + "river") == LOWEST


def test_pairs_are_a_function_of_the_seed():
    assert synthetic_preferences(20, 3) == synthetic_preferences(30, 3)[:20]
    assert synthetic_preferences(20, 3) != synthetic_preferences(20, 4)
    assert len(read_preferences("synthetic")[0]) == 2000
    assert read_preferences("synthetic", limit=7, seed=3)[0] == synthetic_preferences(7, 3)
    with pytest.raises(InputError, match=r"data\.limit=0"):
        read_preferences("synthetic", limit=0)


def test_pairs_leave_room_to_learn_and_to_improve():
    preferences = synthetic_preferences(2000, 0)
    chosen, rejected = (
        np.array([gold_reward(pair.prompt, getattr(pair, side)) for pair in preferences])
        for side in ("chosen", "rejected")
    )
    assert 0.85 < np.mean(chosen > rejected) < 0.95  # labels are noisy, but no coin tosses
    assert np.abs(chosen - rejected).min() >= 0.25
    assert np.mean(chosen) + 2 * np.std(chosen) < HIGHEST
    assert np.mean(chosen - rejected) > 1
    assert len(prompts_of(preferences)) > 900
    # The prompt matters: the same responses score worse after other prompts.
    moved = [gold_reward(preferences[n - 1].prompt, pair.chosen) for n, pair in enumerate(preferences)]
    assert np.mean(chosen) - np.mean(moved) > 0.25


def test_texts_are_short_under_a_tokenizer_of_their_own():
    preferences = synthetic_preferences(500, 0)
    texts = [text for pair in preferences for text in (pair.prompt[0].content, pair.chosen, pair.rejected)]
    renderer = Renderer(train_tokenizer(texts, 512))
    assert max(len(renderer.prompt(pair.prompt, 1000)) for pair in preferences) <= 32
    assert max(len(renderer.response(text)) for text in texts) <= 32

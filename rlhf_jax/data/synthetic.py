"""Built-in preference data, made from a rule, so that the true reward of any response is known.

A prompt asks about one aspect of one topic ("describe the smell of the bread"). A response states something
about an aspect of a topic, politely or rudely. Its true reward, `gold_reward`, is a sum:

    +1.0    if the topic that was asked for occurs
    -0.5    for each other topic
    +0.75   for each polite word, four at most
    -0.75   for each polite word beyond four
    -1.0    for each rude word, four at most
    -0.25   for each repetition of another word (articles and the like may repeat)
    -0.25   for each word beyond 16

It is at most 4 and at least -6. It depends on the prompt; a policy that imitates the better responses is far
below the top; and a policy that only exploits a reward model loses, since words heaped up or repeated cost
more than they bring.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from rlhf_jax.data.messages import Dialogue, Message, Preference
from rlhf_jax.errors import InputError

SYNTHETIC_PAIRS = 2000

TOPICS = ("bread", "music", "river", "winter")
ASPECTS = ("age", "colour", "cost", "history", "name", "shape", "smell", "sound", "taste", "use")
QUESTIONS = (
    "what is the {aspect} of the {topic} like",
    "tell me about the {aspect} of the {topic}",
    "describe the {aspect} of the {topic}",
    "i want to know the {aspect} of the {topic}",
    "can you explain the {aspect} of the {topic}",
    "how is the {aspect} of the {topic}",
    "say something on the {topic} and its {aspect}",
    "about the {topic} , what is its {aspect}",
)
ENDINGS = ("", " for a child", " in short", " today")
POLITE = ("please", "thanks", "gladly", "kindly", "welcome", "friend", "certainly", "enjoy")
RUDE = ("boring", "dull", "lazy", "nonsense", "silly", "whatever")
FACTS = (
    "bright",
    "calm",
    "deep",
    "famous",
    "gentle",
    "heavy",
    "old",
    "quiet",
    "rare",
    "simple",
    "strange",
    "warm",
)
MAY_REPEAT = frozenset(("the", "of", "is", "and", "it", "a", *POLITE))
HIGHEST, LOWEST = 4.0, -6.0

_RIGHT_TOPIC = 0.4  # how often the topic is the one asked for, apart from chance
_POLITE_WORDS = (0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05)  # probability of 0, 1, ... 7 polite words
_MAY_HEAP = 0.5  # how often the same polite word may come again
_RUDE_WORDS = (0.3, 0.35, 0.35)  # of 0, 1, 2 rude words
_NO_STATEMENT = 0.2  # how often a response is nothing but polite and rude words
_LEAST_DIFFERENCE = 0.25
_CERTAINTY = 2.0  # of the labels: the slope of the Bradley-Terry model


def gold_reward(prompt: Dialogue, response: str) -> float:
    """The true reward of a response, by the rule above. The question is the last message of the user."""
    question = next((message.content for message in reversed(prompt) if message.role == "user"), "")
    asked, words = set(_words(question)), _words(response)
    counts = Counter(words)
    reward = 0.0
    reward += sum(1.0 if topic in asked else -0.5 for topic in TOPICS if topic in counts)
    polite = sum(counts[word] for word in POLITE)
    reward += 0.75 * min(4, polite) - 0.75 * max(0, polite - 4)
    reward -= 1.0 * min(4, sum(counts[word] for word in RUDE))
    reward -= 0.25 * sum(count - 1 for word, count in counts.items() if word not in MAY_REPEAT)
    reward -= 0.25 * max(0, len(words) - 16)
    return float(np.clip(reward, LOWEST, HIGHEST))


def synthetic_preferences(count: int, seed: int) -> list[Preference]:
    """Pairs of sampled responses of different quality.

    Labels are noisy as a person's are (Bradley-Terry): the first is preferred with probability sigmoid(2 *
    difference of the true rewards), so that even the rule itself agrees with only about seven pairs in eight.
    The first n pairs of a longer list are the list of n.
    """
    if count < 1:
        raise InputError(f"data.limit={count} makes no synthetic pair; use at least 1")
    return list(itertools.islice(_pairs(np.random.default_rng(seed)), count))


def _pairs(rng: np.random.Generator) -> Iterator[Preference]:
    while True:
        topic, aspect = _one(rng, TOPICS), _one(rng, ASPECTS)
        question = (_one(rng, QUESTIONS) + _one(rng, ENDINGS)).format(topic=topic, aspect=aspect)
        prompt = (Message("user", question),)
        first, second = (_response(rng, topic, aspect) for _ in range(2))
        difference = gold_reward(prompt, first) - gold_reward(prompt, second)
        agrees = rng.random() < 1 / (1 + np.exp(-_CERTAINTY * difference))
        if abs(difference) >= _LEAST_DIFFERENCE:
            yield Preference(prompt, first, second) if agrees else Preference(prompt, second, first)


def _response(rng: np.random.Generator, topic: str, aspect: str) -> str:
    """A statement on an aspect of a topic, which may be the wrong one, among polite and rude words."""
    topic = topic if rng.random() < _RIGHT_TOPIC else _one(rng, TOPICS)
    facts = rng.choice(FACTS, size=rng.integers(1, 3), replace=False)
    statement = f"the {aspect} of the {topic} is {' and '.join(facts)}"
    around = [
        *rng.choice(
            POLITE, size=rng.choice(len(_POLITE_WORDS), p=_POLITE_WORDS), replace=rng.random() < _MAY_HEAP
        ),
        *rng.choice(RUDE, size=rng.choice(len(_RUDE_WORDS), p=_RUDE_WORDS), replace=False),
    ]
    before, after = [], []
    for word in rng.permutation(around):
        (before if rng.random() < 0.5 else after).append(word)
    if around and rng.random() < _NO_STATEMENT:
        return " ".join([*before, *after])
    return " ".join([*before, statement, *after])


def _one(rng: np.random.Generator, names: tuple[str, ...]) -> str:
    return names[int(rng.integers(len(names)))]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())

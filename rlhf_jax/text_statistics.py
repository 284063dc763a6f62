"""What responses look like: repetition, and the words and openings that one set has more than another."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
OPENING_WORDS = 3


class Excess(NamedTuple):
    """A feature that is more frequent in one set of responses than in another; shares of responses."""

    feature: str
    share: float
    share_before: float
    z: float


def words(text: str) -> list[str]:
    """Lower-case words, without punctuation."""
    return [word.lower() for word in WORD.findall(text)]


def repeated_share(text: str, n: int = 3) -> float:
    """Share of the word n-grams that occurred earlier in the same text; 0 where there is none."""
    found = words(text)
    grams = [tuple(found[i : i + n]) for i in range(len(found) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def vocabulary(text: str) -> set[str]:
    """The different words of a text."""
    return set(words(text))


def opening(text: str) -> set[str]:
    """The first words of a text, as one feature."""
    first = words(text)[:OPENING_WORDS]
    return {" ".join(first)} if first else set()


def over_represented(
    texts: Sequence[str],
    before: Sequence[str],
    features: Callable[[str], Iterable[str]],
    *,
    limit: int = 10,
    least_z: float = 2.0,
) -> list[Excess]:
    """Features that more responses of `texts` have than of `before`, most certain first.

    z compares the two shares with half a response added to each cell (a two-proportion test):
        z = (p - q) / sqrt(r (1 - r) (1/n + 1/m)),   r the pooled share.
    """
    if not texts or not before:
        return []
    found = Counter(feature for text in texts for feature in features(text))
    known = Counter(feature for text in before for feature in features(text))
    n, m = len(texts), len(before)
    excesses = []
    for feature, count in found.items():
        p, q = (count + 0.5) / (n + 1), (known[feature] + 0.5) / (m + 1)
        r = (count + known[feature] + 1) / (n + m + 2)
        z = (p - q) / math.sqrt(r * (1 - r) * (1 / n + 1 / m))
        if count >= 2 and z >= least_z:
            excesses.append(Excess(feature, count / n, known[feature] / m, z))
    return sorted(excesses, key=lambda excess: (-excess.z, excess.feature))[:limit]

"""Responses before and after, in pairs: what changed, and what a higher score may come from."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.text_statistics import opening, over_represented, repeated_share, vocabulary

TOP_SHARE = 0.25  # the highest-scored responses, whose words are compared with those before
Pair = tuple[Mapping[str, Any], Mapping[str, Any]]


def pair_samples(samples: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """Responses before and after, paired by prompt and sample; `after` is the last evaluation."""
    steps = [s["step"] for s in samples if s["phase"] == "eval" and s.get("when") == "after"]
    if not steps:
        return []
    sides: dict[str, dict] = {"before": {}, "after": {}}
    for sample in samples:
        when = sample.get("when")
        if sample["phase"] == "eval" and (
            when == "before" or (when == "after" and sample["step"] == max(steps))
        ):
            sides[when][sample["prompt_id"], sample["sample"]] = sample
    return [(sides["before"][key], sides["after"][key]) for key in sides["after"] if key in sides["before"]]


def aligned(pairs: Sequence[Pair], field: str) -> tuple[np.ndarray, np.ndarray] | None:
    """The field before and after, of the pairs where both sides have it."""
    values = [(a[field], b[field]) for a, b in pairs if a.get(field) is not None and b.get(field) is not None]
    if not values:
        return None
    before, after = np.array(values, float).T
    return before, after


def score(sample: Mapping[str, Any]) -> float:
    return -np.inf if sample.get("score") is None else sample["score"]


def summary(responses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The row of one side of the table."""

    def mean(field: str) -> float:
        values = [response[field] for response in responses if response.get(field) is not None]
        return float(np.mean(values)) if values else float("nan")

    texts = [response["response"] for response in responses]
    return {
        "score": mean("score"),
        "true reward": mean("gold"),
        "tokens": mean("length"),
        "cut off at the limit": mean("truncated"),
        "repeated 3-grams": float(np.mean([repeated_share(text) for text in texts])),
        "different responses": len(set(texts)) / len(texts),
        "KL, nats a response": mean("kl"),
    }


def table(pairs: Sequence[Pair]) -> list[tuple[str, str, str]]:
    if not pairs:
        return []
    before, after = (summary([pair[side] for pair in pairs]) for side in (0, 1))
    shares = ("cut off at the limit", "repeated 3-grams", "different responses")

    def shown(name: str, value: float) -> str:
        return "not recorded" if np.isnan(value) else f"{value:.1%}" if name in shares else f"{value:.2f}"

    rows = [(name, shown(name, before[name]), shown(name, after[name])) for name in before]
    return [row for row in rows if row[1:] != ("not recorded", "not recorded")]


def highest(pairs: Sequence[Pair]) -> list[Mapping[str, Any]]:
    """The highest-scored responses after."""
    best = sorted((after for _, after in pairs), key=lambda sample: -score(sample))
    return best[: max(1, round(TOP_SHARE * len(best)))]


def excesses(pairs: Sequence[Pair]) -> dict[str, list]:
    """Words and openings that the highest-scored responses have more often than those before."""
    before = [sample["response"] for sample, _ in pairs]
    best = [sample["response"] for sample in highest(pairs)] if pairs else []
    kinds = {"words": vocabulary, "openings": opening}
    return {name: over_represented(best, before, features) for name, features in kinds.items()}


def hints(pairs: Sequence[Pair], result: Mapping[str, Any]) -> list[str]:
    """Changes that a higher score may come from, each with its numbers. They are hints: read the samples."""
    if not pairs:
        return []
    before, after = (summary([pair[side] for pair in pairs]) for side in (0, 1))
    said = []
    ratio = after["tokens"] / before["tokens"] if before["tokens"] > 0 else 1.0
    if not 0.8 < ratio < 1.25:
        kind = "longer" if ratio > 1 else "shorter"
        said.append(f"Responses became {kind}: {before['tokens']:.0f} to {after['tokens']:.0f} tokens.")
    correlation = _length_correlation([new for _, new in pairs])
    if abs(correlation) > 0.4:
        kind = "longer" if correlation > 0 else "shorter"
        said.append(
            f"The reward model scores {kind} responses higher (correlation {correlation:+.2f} after)."
        )
    for name, least, words in (
        ("cut off at the limit", 0.1, "More responses are cut off at the limit"),
        ("repeated 3-grams", 0.03, "Responses repeat themselves more (repeated 3-grams)"),
    ):
        if after[name] - before[name] > least:
            said.append(f"{words}: {before[name]:.0%} to {after[name]:.0%}.")
    if before["different responses"] - after["different responses"] > 0.05:
        shares = f"{before['different responses']:.0%} to {after['different responses']:.0%}"
        said.append(f"Fewer responses are different from each other: {shares}.")
    for excess in excesses(pairs)["openings"][:3]:
        if excess.share > 0.15:
            said.append(
                f"“{excess.feature} …” opens {excess.share:.0%} of the highest-scored responses, "
                f"and {excess.share_before:.0%} of those before."
            )
    gold = result.get("gold")
    if gold and gold["after"]["mean"] < gold["before"]["mean"]:
        said.append("The true reward fell.")
    return said


def _length_correlation(responses: Sequence[Mapping[str, Any]]) -> float:
    """Pearson correlation of score and length; 0 where either is constant or unknown."""
    known = [(r["score"], r["length"]) for r in responses if None not in (r.get("score"), r.get("length"))]
    columns = np.array(known, float).reshape(-1, 2).T
    if len(known) < 3 or not columns.std(-1).all():
        return 0.0
    return float(np.corrcoef(columns)[0, 1])


def random_pairs(pairs: Sequence[Pair], count: int, seed: int) -> list[Pair]:
    """The same few pairs for the same seed."""
    return random.Random(seed).sample(list(pairs), min(count, len(pairs)))

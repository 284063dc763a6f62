"""Preference pairs: what is read, what is dropped, and how pairs are split.

Forms of a row:

    {"chosen", "rejected"}             two HH texts, or two whole lists of messages
    {"prompt", "chosen", "rejected"}   the prompt as text or messages, each side as text or as messages that end with the response

Contents lose the white space around them. A pair that cannot be used is dropped and counted by reason; a row of another
form stops with its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data.messages import (
    ASSISTANT,
    Dialogue,
    Message,
    Preference,
    asks_nothing,
    checked_text,
    messages_of,
    parse_turns,
    prompt_of_text,
    text_of,
)
from rlhf_jax.data.sources import Row, found, source_rows
from rlhf_jax.data.synthetic import SYNTHETIC_PAIRS, synthetic_preferences
from rlhf_jax.errors import InputError

__all__ = ["Message", "Preference", "pair_of_row", "read_preferences", "split_by_prompt"]

NO_PROMPT = "no prompt"
DIFFERENT_PROMPTS = "different prompts"
EMPTY_RESPONSE = "empty response"
EQUAL_SIDES = "equal sides"


def read_preferences(
    source: str, *, limit: int | None = None, seed: int = 0
) -> tuple[list[Preference], Counter[str]]:
    """All usable pairs of a source, in order, and how many rows were dropped for which reason.

    Args:
      source: a file or hub name (see `sources.py`), or `synthetic` for the built-in pairs.
      limit: read at most this many rows; for `synthetic`, make this many.
      seed: of the synthetic pairs; unused elsewhere.
    """
    if source == "synthetic":
        return synthetic_preferences(SYNTHETIC_PAIRS if limit is None else limit, seed), Counter()
    preferences: list[Preference] = []
    dropped: Counter[str] = Counter()
    for where, row in source_rows(source, limit=limit):
        pair = pair_of_row(row, where)
        if isinstance(pair, str):
            dropped[pair] += 1
        else:
            preferences.append(pair)
    if not preferences:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        raise InputError(f"{source}: no usable pair is left; dropped {reasons}")
    return preferences, dropped


def pair_of_row(row: Row, where: str) -> Preference | str:
    """The pair of a row, or the reason why it is dropped."""
    missing = [key for key in ("chosen", "rejected") if key not in row]
    if missing:
        raise InputError(f'{where}: expected the keys "chosen" and "rejected", found {sorted(map(str, row))}')
    sides = _sides_with_prompt(row, where) if "prompt" in row else _sides(row, where)
    (prompt, chosen), (other, rejected) = sides
    if asks_nothing(prompt) or asks_nothing(other):
        return NO_PROMPT
    if prompt != other:
        return DIFFERENT_PROMPTS
    if not chosen or not rejected:
        return EMPTY_RESPONSE
    if chosen == rejected:
        return EQUAL_SIDES
    return Preference(prompt, chosen, rejected)


def _sides(row: Row, where: str) -> list[tuple[Dialogue, str]]:
    """(prompt, response) of each side of a row without "prompt"."""
    if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
        raise InputError(
            f'{where}: expected "chosen" and "rejected" in one form, found {found(row["chosen"])} and {found(row["rejected"])}'
        )
    return [_whole_side(row[key], where, key) for key in ("chosen", "rejected")]


def _whole_side(value: Any, where: str, key: str) -> tuple[Dialogue, str]:
    """A side that holds its prompt. HH text ends its prompt with the last `\\n\\nAssistant:`."""
    if isinstance(value, str):
        prompt, marker, response = checked_text(value, where, key).rpartition(ASSISTANT)
        return (parse_turns(prompt), response.strip()) if marker else ((), value.strip())
    messages = messages_of(value, where, key)
    if not messages or messages[-1].role != "assistant":
        last = f"a last message of {messages[-1].role}" if messages else "an empty list"
        raise InputError(f'{where}: expected "{key}" to end with a message of assistant, found {last}')
    return messages[:-1], messages[-1].content


def _sides_with_prompt(row: Row, where: str) -> list[tuple[Dialogue, str]]:
    """(prompt, response) of each side of a row with "prompt". A list may repeat the prompt before its response."""
    prompt = read_prompt(row["prompt"], where)
    sides = []
    for key in ("chosen", "rejected"):
        if isinstance(row[key], str):
            sides.append((prompt, text_of(row[key], where, key)))
        else:
            before, response = _whole_side(row[key], where, key)
            sides.append((before or prompt, response))
    # A prompt that one side repeats otherwise is a difference, also where both sides repeat it alike.
    return [(prompt, sides[0][1]), sides[1]] if sides[0][0] == prompt else [sides[0], (prompt, sides[1][1])]


def read_prompt(value: Any, where: str) -> Dialogue:
    """The "prompt" of a row, as text or messages."""
    if isinstance(value, str):
        return prompt_of_text(checked_text(value, where, "prompt"))
    if isinstance(value, list):
        return messages_of(value, where, "prompt")
    raise InputError(f'{where}: expected "prompt" as text or a list of messages, found {found(value)}')


def split_by_prompt(
    preferences: Sequence[Preference], *, fraction: float, seed: int
) -> tuple[list[Preference], list[Preference]]:
    """(train, held out) with no prompt on both sides; about `fraction` of the distinct prompts are held out.

    Which prompts are held out depends on the set of prompts and the seed, not on the order of the rows.
    """
    prompts = sorted({prompt_key(preference.prompt) for preference in preferences})
    count = round(fraction * len(prompts))
    if not 0 < count < len(prompts):
        raise InputError(
            f"data.validation_fraction={fraction} holds out {count} of {len(prompts)} distinct prompts; "
            "both sides need at least one: use another fraction or more data"
        )
    chosen = np.random.default_rng(seed).permutation(len(prompts))[:count]
    held = {prompts[index] for index in chosen}
    train = [preference for preference in preferences if prompt_key(preference.prompt) not in held]
    held_out = [preference for preference in preferences if prompt_key(preference.prompt) in held]
    return train, held_out


def prompt_key(prompt: Iterable[Message]) -> tuple[tuple[str, str], ...]:
    """What makes two prompts the same prompt; sortable."""
    return tuple((message.role, message.content) for message in prompt)

"""Preference pairs: what is read, what is dropped, and how pairs are split.

Forms of a row:

    {"chosen", "rejected"}             two HH texts, or two whole lists of messages
    {"prompt", "chosen", "rejected"}   the prompt as text or messages; each side as text, or as messages
                                       that end with the response and may repeat the prompt before it

Contents lose the white space around them. A pair that cannot be used is dropped and counted by reason; a
row of another form stops with its place.
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
from rlhf_jax.data.sources import Row, found, keys_of, source_rows
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
        raise InputError(f'{where}: expected the keys "chosen" and "rejected", found {keys_of(row)}')
    if "prompt" not in row and isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
        kinds = f"{found(row['chosen'])} and {found(row['rejected'])}"
        raise InputError(f'{where}: expected "chosen" and "rejected" in one form, found {kinds}')
    prompts = [read_prompt(row["prompt"], where)] if "prompt" in row else []
    responses = []
    for key in ("chosen", "rejected"):
        if "prompt" in row and isinstance(row[key], str):
            responses.append(text_of(row[key], where, key))
        else:
            before, response = _whole_side(row[key], where, key)
            prompts += [before] if before or "prompt" not in row else []
            responses.append(response)
    chosen, rejected = responses
    if any(asks_nothing(prompt) for prompt in prompts):
        return NO_PROMPT
    if any(prompt != prompts[0] for prompt in prompts):
        return DIFFERENT_PROMPTS
    if not chosen or not rejected:
        return EMPTY_RESPONSE
    if chosen == rejected:
        return EQUAL_SIDES
    return Preference(prompts[0], chosen, rejected)


def _whole_side(value: Any, where: str, key: str) -> tuple[Dialogue, str]:
    """(prompt, response) of a side that holds both. The last `Assistant:` of HH text ends its prompt."""
    if isinstance(value, str):
        prompt, marker, response = checked_text(value, where, key).rpartition(ASSISTANT)
        return (parse_turns(prompt), response.strip()) if marker else ((), value.strip())
    messages = messages_of(value, where, key)
    if not messages or messages[-1].role != "assistant":
        last = f"a last message of {messages[-1].role}" if messages else "an empty list"
        raise InputError(f'{where}: expected "{key}" to end with a message of assistant, found {last}')
    return messages[:-1], messages[-1].content


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

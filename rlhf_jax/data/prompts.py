"""Prompts for PPO and evaluation, and how they are kept apart from held-out ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rlhf_jax.data.messages import Dialogue, Preference, asks_nothing, opening_turn
from rlhf_jax.data.preferences import NO_PROMPT, pair_of_row, read_preferences, read_prompt
from rlhf_jax.data.sources import Row, found, keys_of, source_rows
from rlhf_jax.errors import InputError


def read_prompts(
    source: str, *, limit: int | None = None, seed: int = 0
) -> tuple[list[Dialogue], Counter[str]]:
    """The prompts of a source, in order, and how many rows were dropped for which reason.

    A row is {"prompt"} as text or messages (a parquet row may carry a `reward_model` struct whose style is
    "model"), or a preference pair, of which the prompt is taken.

    Args:
      source: a file or hub name (see `sources.py`), or `synthetic`.
      limit: read at most this many rows.
      seed: of the synthetic prompts; unused elsewhere.
    """
    if source == "synthetic":
        return prompts_of(read_preferences(source, limit=limit, seed=seed)[0]), Counter()
    prompts: list[Dialogue] = []
    dropped: Counter[str] = Counter()
    for where, row in source_rows(source, limit=limit):
        prompt = _prompt_of_row(row, where)
        if isinstance(prompt, str):
            dropped[prompt] += 1
        else:
            prompts.append(prompt)
    if not prompts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        raise InputError(f"{source}: no usable prompt is left; dropped {reasons}")
    return prompts, dropped


def _prompt_of_row(row: Row, where: str) -> Dialogue | str:
    """The prompt of a row, or the reason why it is dropped."""
    if "prompt" in row:
        _check_reward_model(row, where)
        prompt = read_prompt(row["prompt"], where)
        return NO_PROMPT if asks_nothing(prompt) else prompt
    if "chosen" not in row or "rejected" not in row:
        raise InputError(
            f'{where}: expected the key "prompt", or "chosen" and "rejected", found {keys_of(row)}'
        )
    pair = pair_of_row(row, where)
    return pair if isinstance(pair, str) else pair.prompt


def _check_reward_model(row: Row, where: str) -> None:
    """Rows that are to be graded by a rule, not by a model, are for another job."""
    grader = row.get("reward_model")
    if grader is None:
        return
    if not isinstance(grader, dict) or grader.get("style") != "model":
        style = grader.get("style") if isinstance(grader, dict) else grader
        raise InputError(f'{where}: expected "reward_model" with the style "model", found {found(style)}')


def prompts_of(preferences: Iterable[Preference], *, first_turn: bool = False) -> list[Dialogue]:
    """The distinct prompts of pairs, in the order of their first occurrence; or of their first turns only."""
    prompts = (
        opening_turn(preference.prompt) if first_turn else preference.prompt for preference in preferences
    )
    return list(dict.fromkeys(prompts))


def hold_out(train_prompts: Sequence[Dialogue], validation_prompts: Iterable[Dialogue]) -> list[Dialogue]:
    """The train prompts whose whole text and whose first turn do not occur among the validation prompts.

    Dialogues repeat with another continuation: a prompt that opens with the question of a held-out one is
    not new.
    """
    validation = list(validation_prompts)
    whole, openings = set(validation), {_opening(prompt) for prompt in validation}
    return [prompt for prompt in train_prompts if prompt not in whole and _opening(prompt) not in openings]


def _opening(prompt: Dialogue) -> str:
    """What the user says first; the system message before it does not make the question another one."""
    return next((message.content for message in prompt if message.role == "user"), "")

"""The pairs and prompts of a run, read and split before anything is created."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from rlhf_jax.data.messages import Dialogue, opening_turn
from rlhf_jax.data.preferences import Preference, read_preferences, split_by_prompt
from rlhf_jax.data.prompts import hold_out, prompts_of, read_prompts
from rlhf_jax.data.synthetic import gold_reward
from rlhf_jax.errors import InputError
from rlhf_jax.settings import Data

log = logging.getLogger("rlhf_jax")

Gold = Callable[[Dialogue, str], float]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Preference pairs; no prompt is in both."""

    train: Sequence[Preference]
    held_out: Sequence[Preference]


@dataclasses.dataclass(frozen=True)
class PromptSplit:
    """Prompts for PPO and for evaluation; no prompt and no first turn is in both."""

    train: Sequence[Dialogue]
    held_out: Sequence[Dialogue]


def read_pairs(data: Data, seed: int) -> Pairs:
    """Training and held-out pairs.

    Raises:
      InputError: a source is missing, broken or has no usable pair; the message names it.
    """
    train, dropped = read_preferences(data.train, limit=data.limit, seed=seed)
    _say(data.train, len(train), "pairs", dropped)
    if data.validation is None:
        return Pairs(*split_by_prompt(train, fraction=data.validation_fraction, seed=seed))
    held_out, dropped = read_preferences(data.validation, limit=data.limit, seed=seed)
    _say(data.validation, len(held_out), "pairs", dropped)
    return Pairs(train, held_out)


def split_prompts(data: Data, pairs: Pairs | None, seed: int, *, held_out: int) -> PromptSplit:
    """Prompts for PPO, and at most `held_out` prompts to evaluate on.

    Without data.prompts they are those of the pairs. With it, the held-out ones are those of data.validation,
    or else a share of data.prompts. Prompts that occur in the held-out ones, whole or by their first turn,
    are left out of PPO.

    Args:
      pairs: needed without data.prompts.
    """
    if data.prompts is None:
        assert pairs is not None
        train = prompts_of(pairs.train, first_turn=data.first_turn)
        evaluation = prompts_of(pairs.held_out, first_turn=data.first_turn)
    else:
        train = _read_prompts(data.prompts, data, seed)
        if data.validation is not None:
            evaluation = _read_prompts(data.validation, data, seed)
        else:
            order = np.random.default_rng(seed).permutation(len(train))
            evaluation = [train[i] for i in order[: max(1, round(data.validation_fraction * len(train)))]]
    kept = hold_out(train, evaluation)
    if not kept:
        raise InputError(
            f"all {len(train)} prompts for PPO occur in the held-out ones; give other data.prompts"
        )
    if len(kept) < len(train):
        log.info(
            "%d of %d prompts occur in the held-out ones and are left out of PPO",
            len(train) - len(kept),
            len(train),
        )
    if len(evaluation) < held_out:
        log.info("eval.prompts=%d and there are %d held-out prompts: all are used", held_out, len(evaluation))
    return PromptSplit(kept, evaluation[:held_out])


def _read_prompts(source: str, data: Data, seed: int) -> list[Dialogue]:
    prompts, dropped = read_prompts(source, limit=data.limit, seed=seed)
    _say(source, len(prompts), "prompts", dropped)
    return list(dict.fromkeys(opening_turn(prompt) if data.first_turn else prompt for prompt in prompts))


def gold_of(data: Data) -> Gold | None:
    """The true reward, where the data comes from a rule."""
    return gold_reward if data.train == "synthetic" else None


def texts_of(pairs: Sequence[Preference]) -> list[str]:
    """All text of the pairs, for a tokenizer to learn from."""
    return [text for p in pairs for text in (*(m.content for m in p.prompt), p.chosen, p.rejected)]


def _say(source: str, kept: int, what: str, dropped: Counter[str]) -> None:
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    log.info("%s: %d %s%s", source, kept, what, f"; dropped {reasons}" if reasons else "")

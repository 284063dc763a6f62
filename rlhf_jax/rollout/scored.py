"""Raw scores of responses, and what is done where there is none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from flax import struct

from rlhf_jax.data.messages import Dialogue
from rlhf_jax.errors import InputError
from rlhf_jax.sharding.processes import fetch
from rlhf_jax.types import Rollout

log = logging.getLogger("rlhf_jax")

NAMED = 8  # prompts that one line names


@struct.dataclass
class Scored:
    """A score for each response; not finite where there is none. A tree: its scores can be waited for."""

    scores_B: Any  # float32, on the host or the devices
    # row -> why it has none
    reasons: Mapping[int, str] = struct.field(pytree_node=False, default_factory=dict)


class Scorer(Protocol):
    """A reward model, or the Python function in its place: raw scores of a rollout's responses."""

    def __call__(self, rollout: Rollout, prompts: Sequence[Dialogue], responses: Sequence[str]) -> Scored: ...


class RewardFault(InputError):
    """Responses could not be scored, and reward.fallback gives no score for them."""


def settled(
    scores_B: Any,
    reasons: Mapping[int, str],
    prompts: Sequence[int],
    *,
    fallback: float | None,
    what: str = "prompt",
) -> tuple[Any, np.ndarray]:
    """Finite scores, and True for each that is the fallback. A row without a score is named in the log.

    Args:
      scores_B: standardised.   reasons: of a Scored.
      prompts: each row's prompt, as a number among all prompts.   what: how these are called.
      fallback: the standardised score of a response that has none.
    Raises:
      RewardFault: there is no fallback.
    """
    host_B = fetch(scores_B)
    bad_B = ~np.isfinite(host_B)
    if not bad_B.any():
        return scores_B, bad_B
    by_reason: dict[str, list[int]] = {}
    for row in np.flatnonzero(bad_B).tolist():
        reason = reasons.get(row) or f"the reward model gave {host_B[row]}"
        by_reason.setdefault(reason, []).append(prompts[row])
    lines = [f"{reason}, for {_named(found, what)}" for reason, found in by_reason.items()]
    if fallback is None:
        more = f" ({len(lines) - 1} more such lines)" if len(lines) > 1 else ""
        raise RewardFault(f"{lines[0]}{more}; mend the reward, or set reward.retries or reward.fallback")
    for line in lines:
        log.warning("%s: scored %g (reward.fallback)", line, fallback)
    return np.where(bad_B, np.float32(fallback), host_B), bad_B


def _named(prompts: Sequence[int], what: str) -> str:
    if len(prompts) == 1:
        return f"{what} {prompts[0]}"
    rest = f" and {len(prompts) - NAMED} more" if len(prompts) > NAMED else ""
    return f"{what}s {', '.join(map(str, prompts[:NAMED]))}{rest}"

"""Scores of finished responses by a Python function, which may fail, hang, or give what is no score."""

from __future__ import annotations

import importlib
import logging
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_jax.data.messages import Dialogue
from rlhf_jax.errors import InputError, first_line
from rlhf_jax.rollout.scored import Scored
from rlhf_jax.sharding.processes import share_rows
from rlhf_jax.types import Rollout

log = logging.getLogger("rlhf_jax")

REASON_BYTES = 400  # of a reason that is told to the other processes
Reasons = dict[int, str]  # row -> why it has no score


class RewardFunction:
    """A Python function of (prompts, responses) -> scores, or its name `module:function`, which is imported.

    It gets the prompts as lists of {"role", "content"} and the responses as strings. Of several processes
    each calls it with its share of the rows.

    Args:
      retries: how often a call is made again that failed: that raised, took too long, or gave anything but
        one finite number a response.
      timeout: seconds that a call may take; None: any. The call runs in a thread of its own then, which
        cannot be ended: it is left behind where it hangs.
    """

    def __init__(self, function: str | Callable[..., Any], *, retries: int = 0, timeout: float | None = None):
        self.name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
        self._function = _import_function(function) if isinstance(function, str) else function
        self._retries, self._timeout = retries, timeout

    def __call__(
        self, rollout: Rollout | None, prompts: Sequence[Dialogue], responses: Sequence[str]
    ) -> Scored:
        def share(rows: range) -> np.ndarray:
            messages = [[{"role": m.role, "content": m.content} for m in prompts[i]] for i in rows]
            return _packed(*self._share(messages, [responses[i] for i in rows]))

        return _unpacked(share_rows(share, len(responses)))

    def _share(self, prompts: list[Any], responses: list[str]) -> tuple[np.ndarray, Reasons]:
        """Scores of the rows of this process; NaN where there is none."""
        if not responses:
            return np.zeros(0, np.float32), {}
        attempts = self._retries + 1
        for attempt in range(1, attempts + 1):
            scores, reasons, raised = self._attempt(prompts, responses)
            if not reasons:
                return scores, reasons
            if attempt < attempts:
                log.warning("%s; attempt %d of %d follows", _first(reasons), attempt + 1, attempts)
        if raised and len(responses) > 1:
            return self._one_by_one(prompts, responses, _first(reasons))
        return scores, reasons

    def _one_by_one(
        self, prompts: list[Any], responses: list[str], reason: str
    ) -> tuple[np.ndarray, Reasons]:
        """Finds the rows that a call of all of them failed for; the others keep the scores they have alone.

        Where no row fails alone, all have failed together.
        """
        scores, reasons = np.full(len(responses), np.nan, np.float32), Reasons()
        for row in range(len(responses)):
            alone, why, _ = self._attempt([prompts[row]], [responses[row]])
            scores[row] = alone[0]
            reasons |= {row: why[0]} if why else {}
        if reasons:
            return scores, reasons
        together = f"{reason}, for {len(responses)} responses together and for none of them alone"
        return np.full(len(responses), np.nan, np.float32), dict.fromkeys(range(len(responses)), together)

    def _attempt(self, prompts: list[Any], responses: list[str]) -> tuple[np.ndarray, Reasons, bool]:
        """(scores, reasons, whether it raised): NaN and a reason for each row without a score."""
        raised = False
        try:
            return *self._scores(self._call(prompts, responses), len(responses)), raised
        except _NoScores as error:
            reason = f"{self.name} {error}"
        except (Exception, SystemExit) as error:
            reason, raised = f"{self.name} raised {_told(error)}", True
        count = len(responses)
        return np.full(count, np.nan, np.float32), dict.fromkeys(range(count), reason), raised

    def _call(self, prompts: list[Any], responses: list[str]) -> Any:
        if self._timeout is None:
            return self._function(prompts, responses)
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def work() -> None:
            try:
                answers.put((self._function(prompts, responses), None))
            except BaseException as error:  # raised where the answer is waited for
                answers.put((None, error))

        threading.Thread(target=work, daemon=True, name=f"reward {self.name}").start()
        try:
            answer, error = answers.get(timeout=self._timeout)
        except queue.Empty:
            raise _NoScores(f"gave no answer within {self._timeout:g} s") from None
        if error is not None:
            raise error
        return answer

    def _scores(self, given: Any, count: int) -> tuple[np.ndarray, Reasons]:
        try:
            kind = np.asarray(given).dtype.kind
            if kind in "USc":
                what = "text such as" if kind in "US" else "complex numbers such as"
                raise TypeError(f"{what} {str(np.ravel(given)[0])[:40]!r}")
            with np.errstate(over="ignore"):  # told as inf
                scores = np.asarray(given, np.float32)
        except (TypeError, ValueError, IndexError) as error:
            told = f"gave no numbers ({_first_line(error)}) for {count} responses, not one for each"
            raise _NoScores(told) from error
        if scores.shape != (count,):
            raise _NoScores(f"gave shape {scores.shape} for {count} responses, not one number each")
        bad = np.flatnonzero(~np.isfinite(scores)).tolist()
        return scores, {row: f"{self.name} gave {scores[row]}, no finite number" for row in bad}


class _NoScores(Exception):
    """An answer that is no list of scores, or none in time."""


def _packed(scores: np.ndarray, reasons: Reasons) -> np.ndarray:
    """One row of bytes for each response, which go between processes: its score and its reason."""
    packed = np.zeros((len(scores), 4 + REASON_BYTES), np.uint8)
    packed[:, :4] = np.ascontiguousarray(scores, np.float32)[:, None].view(np.uint8)
    for row, reason in reasons.items():
        words = np.frombuffer(reason.encode(errors="replace")[:REASON_BYTES], np.uint8)
        packed[row, 4 : 4 + len(words)] = words
    return packed


def _unpacked(packed: np.ndarray) -> Scored:
    scores_B = np.ascontiguousarray(packed[:, :4]).view(np.float32)[:, 0]
    reasons = [bytes(words).rstrip(b"\0").decode(errors="ignore") for words in packed[:, 4:]]
    return Scored(scores_B, {row: reason for row, reason in enumerate(reasons) if reason})


def _first(reasons: Reasons) -> str:
    return next(iter(reasons.values()))


def _import_function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # an installed command does not look where it is started
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the module's own code ran
        own = isinstance(error, ImportError | AttributeError | TypeError | ValueError)
        reason = error if own else _told(error)
        raise InputError(
            f"reward.function={name!r} cannot be imported ({reason}); give it as module:function"
        ) from error
    if not callable(found):
        raise InputError(f"reward.function={name!r} is not a function")
    return found


def _told(error: BaseException) -> str:
    """An error of the user's code: its type, the first of its words, and the line where it arose."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError ({error})"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} ({_first_line(error)}) in {frame.filename}, line {frame.lineno}"


def _first_line(error: BaseException) -> str:
    try:
        return first_line(error)[:200]
    except Exception:  # its __str__ is the user's too
        return "it cannot be printed"

"""What a replay found, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import read_metrics
from rlhf_jax.trainers.dump import Dump
from rlhf_jax.trainers.health import PHASE
from rlhf_jax.trainers.replay import Finite, Looked


def nearest_checkpoint(dump: Dump, keep: int) -> tuple[Checkpoints, int, str]:
    """(the dumped phase's checkpoints, the one nearest to the dump, a line that says how near)."""
    checkpoints = Checkpoints(dump.run_dir, dump.phase, keep=keep)
    records = [record for record in read_metrics(dump.run_dir) if record["phase"] == dump.phase]
    step, moved = nearest_state(checkpoints.steps(), records, dump.step)
    exact = "its updates were made from this state" if not moved else f"{moved} updates lie between the two"
    return checkpoints, step, f"state       {checkpoints.directory / str(step)}: {exact}"


def nearest_state(steps: Sequence[int], records: Sequence[dict[str, Any]], step: int) -> tuple[int, int]:
    """(checkpoint, updates between its state and that of the dumped step).

    Args:
      steps: of the checkpoints.   records: of metrics.jsonl, of the dump's phase.   step: of the dump.
    Raises:
      InputError: no checkpoint at all.
    """
    if not steps:
        raise InputError("the run has no checkpoint; its dump cannot be replayed")
    taken = {record["step"]: _updates(record) for record in records}

    def between(checkpoint: int) -> int:
        low, high = sorted((checkpoint, step))
        return sum(count for number, count in taken.items() if low < number <= high)

    return min(((s, between(s)) for s in steps), key=lambda pair: (pair[1], abs(pair[0] - step)))


def _updates(record: dict[str, Any]) -> int:
    """Optimizer steps that were taken in a step of a run."""
    phase = record["phase"]
    if phase != PHASE:
        return 1 - int(record.get(f"{phase}/skipped") or 0)
    return sum(int(record.get(f"{role}/optimizer_steps") or 0) for role in ("actor", "critic"))


def look_lines(looked: Looked) -> list[str]:
    """Outputs, terms of the loss, and gradients of one minibatch."""
    return rows_of(looked.outputs) + rows_of(looked.terms) + _gradients(looked)


def verdict(bad: int, total: int, causes: Sequence[str]) -> list[str]:
    """Whether the fault was reproduced, and what came first."""
    lines = ["", f"fault {'' if bad else 'not '}reproduced: {bad} of {total} updates are not finite"]
    return lines + ([f"first that is not finite: {causes[0]}"] if causes else [])


def bad_names(found: Mapping[str, tuple], words: str) -> list[str]:
    """A cause for each of these that is not finite; `words` hold {name}."""
    return [words.format(name=name) for name, (bad, *_) in found.items() if bad]


def rows_of(rows: Finite) -> list[str]:
    """A line for each name: is it finite, and in which range."""
    lines = []
    for name, (bad, low, high) in rows.items():
        spread = "" if not low <= high else f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        lines.append(f"  {name:<34} {f'NOT FINITE ({bad})' if bad else 'finite':<18} {spread}".rstrip())
    return lines


def _gradients(looked: Looked) -> list[str]:
    """A line for each top-level group of parameters, and one for each leaf that is not finite."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for name, pair in looked.gradients.items():
        groups.setdefault("/".join(name.split("/")[:2]), []).append(pair)
    rows = {}
    for name, pairs in groups.items():
        norm = float(np.sqrt(np.sum(np.square([norm for _, norm in pairs]))))
        rows[f"gradient norm of {name}"] = (sum(bad for bad, _ in pairs), norm, norm)
    bad = [f"    {name}: {count} entries" for name, (count, _) in looked.gradients.items() if count]
    return rows_of(rows) + (["  leaves whose gradient is not finite", *bad] if bad else [])

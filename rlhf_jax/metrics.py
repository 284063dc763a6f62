"""What a run writes down as it goes: metrics.jsonl, samples.jsonl, TensorBoard events and progress lines.

A record's phase and step name it, and a step is written once. After a restart the trainer rewinds the log to
the step that it restored, so that the log reads as if the run had never stopped. Imports no jax.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from rlhf_jax.errors import InputError
from rlhf_jax.records import RecordLog, read_records

WARNINGS = "warnings.jsonl"

# The numbers that tell at a glance whether a phase goes well.
SHOWN = {
    "sft": ("sft/loss", "sft/validation_loss", "sft/lr"),
    "reward": ("reward/loss", "reward/accuracy", "reward/validation_accuracy", "reward/lr"),
    "ppo": (
        "reward/score_mean",
        "reward/kl",
        "response_length/mean",
        "actor/entropy",
        "actor/pg_clipfrac",
        "critic/vf_explained_var",
        "timing_s/step",
    ),
}


class MetricsLog:
    """metrics.jsonl of a run, and TensorBoard's events where asked for."""

    def __init__(self, run_dir: os.PathLike | str, *, tensorboard: bool = False, writes: bool = True):
        """`writes`: False on all but one of several processes."""
        self._log = RecordLog(epath.Path(run_dir) / "metrics.jsonl", writes=writes)
        wanted = tensorboard and writes
        self._events = TensorBoard(epath.Path(run_dir) / "tensorboard") if wanted else None

    def write(self, phase: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Append one step. NaN and infinities become null and are counted in "nonfinite/count"."""
        last = self._log.last(phase)
        if last is not None and step <= last:
            raise ValueError(f"step {step} of {phase} follows step {last}; rewind the log first")
        plain = {name: _number(value) for name, value in numbers.items()}
        bad = sum(value is None for value in plain.values())
        if bad:
            plain["nonfinite/count"] = bad
        self._log.append([{"step": int(step), "phase": phase, **plain}])
        if self._events is not None:
            self._events.write(phase, step, plain)

    def last(self, phase: str) -> int | None:
        """The greatest step written for the phase."""
        return self._log.last(phase)

    def rewind(self, phase: str, step: int) -> None:
        """Drop the phase's later steps, as before going on from a checkpoint of `step`; -1 drops them all."""
        self._log.rewind(phase, step)

    def flush(self) -> None:
        """Call before a checkpoint, so that no step before it can be missing."""
        self._log.flush()

    def close(self) -> None:
        self._log.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()


class SamplesLog(RecordLog):
    """samples.jsonl of a run: prompts, responses and scores; docs/run-directory.md lists the fields."""

    def __init__(self, run_dir: os.PathLike | str, *, writes: bool = True):
        super().__init__(epath.Path(run_dir) / "samples.jsonl", writes=writes)

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records in one piece; NaN and infinities become null."""
        self.append([{name: _plain(value) for name, value in record.items()} for record in records])


class TensorBoard:
    """Event files, a scalar for each metric of each phase."""

    def __init__(self, directory: epath.Path):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            remedy = "pip install 'rlhf-jax[tensorboard]'"
            raise InputError(f"run.tensorboard=true needs the package tensorboard; {remedy}") from None
        self._event, self._summary = vars(event_pb2)["Event"], vars(summary_pb2)["Summary"]
        self._writer = EventFileWriter(str(directory))

    def write(self, phase: str, step: int, numbers: Mapping[str, float | None]) -> None:
        values = [
            self._summary.Value(tag=f"{phase}/{name}", simple_value=value)
            for name, value in numbers.items()
            if value is not None
        ]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Progress:
    """What a phase is doing, on the terminal: a live line there, plain lines at intervals elsewhere.

    with Progress("ppo") as progress:
        progress.update(step, total, numbers)
    """

    def __init__(self, phase: str, *, every: float = 10.0, file=None, shown: bool = True):
        """`every`: at least this many seconds between plain lines.   `shown`: False shows nothing."""
        self._phase, self._every, self._shown = phase, every, shown
        self._file = sys.stdout if file is None else file
        self._bar: Any = None
        self._task: Any = None
        self._printed_at = -math.inf
        self._started_at = time.monotonic()
        self._first_step: int | None = None

    def update(self, step: int, total: int, numbers: Mapping[str, Any]) -> None:
        """Show step `step` of `total` and the numbers that matter for the phase."""
        if not self._shown:
            return
        self._first_step = step if self._first_step is None else self._first_step
        shown = "  ".join(f"{name} {_short(value)}" for name, value in self._chosen(numbers).items())
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=total, numbers=shown)
            return
        now = time.monotonic()
        if now - self._printed_at >= self._every or step >= total:
            self._printed_at = now
            print(
                f"{self._phase} {step}/{total}{self._left(step, total)}  {shown}", file=self._file, flush=True
            )

    def note(self, text: str) -> None:
        """A line that stays, such as what was dropped or saved."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._file, flush=True)

    def __enter__(self):
        if self._shown and self._file.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=20),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[numbers]}", markup=False),
                console=Console(file=self._file),
            )
            self._task = self._bar.add_task(self._phase, total=None, numbers="")
            self._bar.start()
        return self

    def __exit__(self, *exc_info):
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _chosen(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        wanted = [name for name in SHOWN.get(self._phase, ()) if name in numbers]
        others = [name for name in numbers if not name.startswith(("timing_", "perf/"))]
        return {name: numbers[name] for name in wanted or others[:5]}

    def _left(self, step: int, total: int) -> str:
        done = step - (self._first_step or 0)
        if done < 1 or step >= total:
            return ""
        seconds = (time.monotonic() - self._started_at) / (done + 1) * (total - step)
        return f" ({seconds / 60:.0f} min left)" if seconds >= 90 else f" ({seconds:.0f} s left)"


def read_warnings(run_dir: os.PathLike | str) -> list[dict]:
    """The records of warnings.jsonl in order; none where there is no such file."""
    return read_records(epath.Path(run_dir) / WARNINGS)


def read_metrics(run_dir: os.PathLike | str) -> list[dict]:
    """The records of metrics.jsonl in order; none where there is no such file."""
    return read_records(epath.Path(run_dir) / "metrics.jsonl")


def read_samples(run_dir: os.PathLike | str) -> list[dict]:
    """The records of samples.jsonl in order; none where there is no such file."""
    return read_records(epath.Path(run_dir) / "samples.jsonl")


def _number(value: Any) -> float | int | None:
    """A Python number from one, or from an array of one element; None where it is not finite."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _short(value: Any) -> str:
    number = _number(value)
    if number is None:
        return "not finite"
    return str(number) if isinstance(number, int) else f"{number:.4g}"

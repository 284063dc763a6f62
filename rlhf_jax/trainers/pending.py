"""An iteration's metrics on their way from the devices to the log, and what is seen in them."""

from __future__ import annotations

import time
from typing import Any

from etils import epath

from rlhf_jax.metrics import MetricsLog, Progress
from rlhf_jax.sharding.processes import fetch
from rlhf_jax.trainers.dump import Batch, write_dump
from rlhf_jax.trainers.health import PHASE, Sign, Watch
from rlhf_jax.trainers.ppo_task import PpoTask
from rlhf_jax.trainers.timing import CompileClock, FirstStep, peak_flops


class Pending:
    """An iteration's metrics, fetched once the next iteration has been dispatched.

    A step's seconds are those from when the previous step was done to when it is done itself, compilation
    taken off. Where updates were skipped because they were not finite, what they learnt from is dumped: once
    for each row of such steps, and again where it is so long that the run must stop.

    Attributes:
      bad_steps: updates in a row, up to the last written step, that were skipped.
      dump: the last dump's folder and batch.
    """

    def __init__(
        self,
        task: PpoTask,
        run_dir: epath.Path,
        log: MetricsLog,
        progress: Progress,
        clock: CompileClock,
        step: int,
    ):
        """Goes on after `step`."""
        self._task, self._run_dir, self._log, self._progress = task, run_dir, log, progress
        self._clock, self._watch = clock, Watch(task.config.health, run_dir, step)
        self._waiting: tuple[int, dict[str, Any], dict[str, float], Batch] | None = None
        self.bad_steps, self._skipped = 0, False
        self.dump: tuple[epath.Path, Batch] | None = None
        self._first = FirstStep(PHASE, clock)
        self.restart_clock()

    def restart_clock(self) -> None:
        self._since, self._compiled = time.perf_counter(), self._clock.seconds

    def put(self, step: int, metrics: dict[str, Any], seconds: dict[str, float], batch: Batch) -> None:
        self._waiting = step, metrics, seconds, batch

    @property
    def diverged(self) -> bool:
        """True once run.max_bad_steps updates in a row were not finite."""
        return self.bad_steps >= self._task.config.run.max_bad_steps

    @property
    def fatal(self) -> Sign | None:
        """The sign over which health.stop ends the run."""
        return self._watch.fatal

    @property
    def halts(self) -> bool:
        """True where the run must not go on."""
        return self.diverged or self.fatal is not None

    def close(self) -> None:
        self._watch.close()

    def flush(self) -> None:
        """Writes what waits."""
        if self._waiting is None:
            return
        step, metrics, seconds, batch = self._waiting
        self._waiting = None
        numbers = fetch(metrics)
        self._first.done()
        compile_s = self._clock.seconds - self._compiled
        step_s = max(time.perf_counter() - self._since - compile_s, 1e-9)
        self.restart_clock()
        prompt_lengths, lengths = numbers.pop("prompt_length_B"), numbers.pop("length_B")
        tokens = int(prompt_lengths.sum() + lengths.sum())
        numbers |= {**seconds, "timing_s/step": step_s, "timing_s/compile": compile_s}
        numbers |= {"perf/samples_per_s": len(lengths) / step_s, "perf/tokens_per_s": tokens / step_s}
        if self._task.flops is not None:
            rate = self._task.flops(prompt_lengths, lengths) / step_s
            numbers |= {"perf/tflops": rate / 1e12, "perf/mfu": rate / peak_flops()}
        numbers["perf/reshard_bytes"] = self._task.steps.policy.sampler.reshard.moved_bytes
        if "timing_s/gen" in seconds:
            numbers["perf/gen_tokens_per_s"] = int(lengths.sum()) / max(seconds["timing_s/gen"], 1e-9)
        self._log.write(PHASE, step, numbers)
        self._progress.update(step, self._task.config.ppo.iterations, numbers)
        self._look(step, numbers, batch)

    def _look(self, step: int, numbers: dict[str, Any], batch: Batch) -> None:
        self._watch(step, numbers)
        before, roles = self._skipped, ("actor", "critic")
        self._skipped = any(numbers.get(f"{role}/skipped", 0) > 0 for role in roles)
        self.bad_steps = int(max(numbers.get(f"{role}/bad_steps", 0) for role in roles))
        if self._skipped and (self.diverged or not before):
            self.dump = write_dump(self._run_dir, PHASE, step, batch, numbers), batch

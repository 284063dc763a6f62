"""Wall-clock seconds of a step and of its phases, with compilation counted apart."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

# Dense bfloat16 FLOP/s of one chip, from the makers' data sheets.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}

log = logging.getLogger("rlhf_jax")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileClock:
    """What XLA has compiled in this process since the clock was made.

    What the persistent cache holds is read from there, and counts with the seconds that this takes.

    Attributes:
      seconds: spent compiling.   programs: how many.
    """

    LARGE = 1.0  # seconds of a compilation that leaves memory worth giving back

    def __init__(self):
        self.seconds, self.programs = 0.0, 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            self.seconds += duration_secs
            self.programs += 1
            if duration_secs > self.LARGE:
                give_back_memory()


def give_back_memory() -> None:
    """Returns freed memory to the system. glibc keeps it: half a GiB after compiling a PPO iteration."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has the function
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class FirstStep:
    """Says once how long a phase took to its first step's end, and how much of that was compilation."""

    def __init__(self, phase: str, clock: CompileClock):
        self._phase, self._clock, self._done = phase, clock, False
        self._since, self._compiled = time.perf_counter(), clock.seconds

    def done(self) -> None:
        if not self._done:
            seconds, compiling = time.perf_counter() - self._since, self._clock.seconds - self._compiled
            log.info(
                "%s: %.1f s to the first step's end, %.1f s of them compilation",
                self._phase,
                seconds,
                compiling,
            )
        self._done = True


def of_this_chip(sheet: Mapping[str, float]) -> float | None:
    """This chip's figure in a table by kind of chip; None where it is not listed."""
    kind = jax.devices()[0].device_kind
    names = [name for name in sheet if kind.startswith(name)]
    return sheet[max(names, key=len)] if names else None


@functools.cache
def peak_flops() -> float:
    """FLOP/s that all devices together can do: from the data sheet, or measured where it is not listed.

    Measured is the rate of a float32 product of 2,048 x 2,048 matrices, once in a process, for the virtual
    devices of each process together.
    """
    listed = of_this_chip(PEAK_FLOPS)
    if listed is not None:
        return listed * jax.device_count()
    n = 2048
    x = jnp.ones((n, n), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds) * jax.process_count()


class Trace:
    """A profiler's trace of a few steps, once the first ones have compiled; XProf and Perfetto open it."""

    WARM_UP = 2  # steps that compile

    def __init__(self, directory: os.PathLike | str, steps: int):
        self._directory, self._steps, self._running = str(directory), steps, False

    def at(self, done: int, state: Any) -> None:
        """Before the step after `done` ones of this process, whose state is `state`."""
        if self._steps and done == self.WARM_UP:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self._running = True
        if done == self.WARM_UP + self._steps:
            self.close(state)

    def close(self, state: Any) -> None:
        if self._running:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            self._running = False


class PhaseTimer:
    """Calls functions, and where `enabled` waits for each result and notes its seconds.

    Waiting costs the overlap of host and device, so only every few steps are timed phase by phase.
    """

    def __init__(self, clock: CompileClock, *, enabled: bool):
        self.clock, self.enabled = clock, enabled
        self.seconds: dict[str, float] = {}

    def __call__(self, phase: str, function: Callable[..., Any], *args: Any) -> Any:
        if not self.enabled:
            return function(*args)
        start, compiled = time.perf_counter(), self.clock.seconds
        result = jax.block_until_ready(function(*args))
        spent = time.perf_counter() - start - (self.clock.seconds - compiled)
        self.seconds[f"timing_s/{phase}"] = self.seconds.get(f"timing_s/{phase}", 0.0) + max(spent, 0.0)
        return result

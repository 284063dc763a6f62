"""Wall-clock seconds of a step and of its phases, with compilation counted apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileClock:
    """Seconds that XLA has spent compiling in this process since the clock was made."""

    def __init__(self):
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, seconds: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            self.seconds += seconds


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

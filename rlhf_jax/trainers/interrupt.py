"""SIGTERM asks a run to stop after the step that it is in, with its state saved; a second one does not wait.

With several processes a signal to one stops all, after the same step.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import jax

from rlhf_jax.sharding.processes import any_process, is_primary


class StopRequest:
    """Whether to stop: asked once a step, with the same answer on every process."""

    def __init__(self):
        self.signal: int | None = None
        self._vote: Any = None

    def __call__(self) -> bool:
        """One process answers at once. Several answer what was known a step ago: votes travel with the step,
        so that none has to wait for them."""
        if jax.process_count() == 1:
            return self.signal is not None
        before, self._vote = self._vote, any_process(self.signal is not None)
        return before is not None and bool(before)

    def of_any(self) -> bool:
        """Whether any process was asked; all wait for the answer."""
        return bool(any_process(self.signal is not None))


@contextlib.contextmanager
def stop_on_signal(run_dir: Any) -> Iterator[StopRequest]:
    """While inside, the first SIGTERM or SIGINT is noted, and a second one ends the process where it is.

    A request that came too late for the last step is answered at the end: nothing else begins after it.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number, frame):
        request.signal = number
        for known in before:  # no handler in Python: it would wait for the program on the devices to end
            signal.signal(known, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if request.of_any():
        stopped(request, run_dir)


class Stopped(SystemExit):
    """The end of a run whose processes have all saved and leave at the same step."""


def stopped(request: StopRequest, run_dir: Any) -> NoReturn:
    """Says how to go on and leaves with 128 + the signal's number: 143 after SIGTERM, 130 after SIGINT."""
    if is_primary():
        print(f"stopped; the state is saved in {run_dir}: the same command goes on from there", flush=True)
    raise Stopped(128 + (request.signal or signal.SIGTERM))

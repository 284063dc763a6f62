"""SIGTERM asks a run to stop after the step that it is in, with its state saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn


class StopRequest:
    """True once the process was asked to stop."""

    def __init__(self):
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """While inside, the first SIGTERM or SIGINT is noted and a second one acts as usual."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def note(number, frame):
        request.signal = number
        for known, handler in before.items():
            signal.signal(known, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped(request: StopRequest, run_dir: Any) -> NoReturn:
    """Says how to go on and leaves with 128 + the signal's number: 143 after SIGTERM, 130 after SIGINT."""
    print(f"stopped; the state is saved in {run_dir}: the same command goes on from there", flush=True)
    raise SystemExit(128 + (request.signal or 0))

"""What libraries would say again of a fault that is told already."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any


@functools.cache
def say_each_fault_once() -> None:
    """Orbax logs each file, and each error before it raises it.

    Where one write fails, those under way end later, in threads of tensorstore's: nobody waits for their
    errors any more, and the event loop that they report to is closed.
    """
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    tell = sys.unraisablehook

    def unless_the_loop_is_closed(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            tell(unraisable)

    sys.unraisablehook = unless_the_loop_is_closed

"""What the compiler writes to stderr while it works, caught: some of it matters, and most is chatter."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

REMATERIALIZATION = "Involuntary full rematerialization"
CHATTER = re.compile(r"[IW]\d{4} ")  # the head of a note or warning of the C++ library


@contextlib.contextmanager
def compiler_log() -> Iterator[list[str]]:
    """The lines written in the block, in the list once it has ended; what is no chatter goes on to stderr.

    The compiler writes to file descriptor 2 itself, past `sys.stderr`.
    """
    lines: list[str] = []
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
            for line in lines:
                if not CHATTER.match(line):
                    print(line, file=sys.stderr)


def rematerializations(lines: list[str]) -> int:
    """How many tensors are copied whole to every device, for want of a shorter way between two layouts."""
    return sum(REMATERIALIZATION in line for line in lines)

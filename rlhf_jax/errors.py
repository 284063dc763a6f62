"""The two ends of a run that are no fault of the program, and what other errors say."""

from __future__ import annotations

LONGEST = 1000  # characters of a message


class InputError(ValueError):
    """What the user gave is wrong.

    The message is one line that names the value and the remedy; exit code 2. Values come from files of
    anyone: what is no printable character is spelled, and of a very long message the middle is left out.
    """

    def __init__(self, message: str):
        super().__init__(_printable(message))


class Halted(RuntimeError):
    """The run stopped itself, its state saved: to go on as before would help nobody.

    The message is one line that says why and what to do.
    """

    code = 1  # the exit code


def first_line(error: BaseException) -> str:
    """What an error says, or what it is where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _printable(message: str) -> str:
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
    line = " ".join(message.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)

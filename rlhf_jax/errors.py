"""The two ends of a run that are no fault of the program."""

from __future__ import annotations


class InputError(ValueError):
    """What the user gave is wrong.

    The message is one line that names the value and the remedy; exit code 2.
    """


class Halted(RuntimeError):
    """The run stopped itself, its state saved: to go on as before would help nobody.

    The message is one line that says why and what to do.
    """

    code = 1  # the exit code

"""The one error that is the user's to mend, and what others say."""

LONGEST = 1000  # characters of a message


class InputError(ValueError):
    """What the user gave is wrong.

    The message is one line that names the value and the remedy; exit code 2. Values come from files of
    anyone: what is no printable character is spelled, and of a very long message the middle is left out.
    """

    def __init__(self, message: str):
        super().__init__(_printable(message))


def first_line(error: BaseException) -> str:
    """What an error says, or what it is where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _printable(message: str) -> str:
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
    line = " ".join(message.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)

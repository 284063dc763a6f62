"""The one error that is the user's to mend."""


class InputError(ValueError):
    """What the user gave is wrong.

    The message is one line that names the value and the remedy; exit code 2.
    """

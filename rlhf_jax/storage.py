"""A file system that takes no more, said in one line with the place and the remedy."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator

from rlhf_jax.errors import InputError

FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


def full(error: BaseException | None) -> str | None:
    """What the system says where it has no room for a file, such as `No space left on device`.

    Libraries in C++ and Rust raise errors of their own kinds, with these words.
    """
    while error is not None:
        if reason := next((words for words in FULL if words in str(error)), None):
            return reason
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def room_in(place: object) -> Iterator[None]:
    """Turns an error that says that the disk is full into an InputError that names the place."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if (reason := full(error)) is None:
            raise
        where = getattr(error, "filename", None) or place
        raise InputError(
            f"{where} cannot be written: {reason}; free some space, and the same command goes on"
        ) from error


def free_bytes(place: os.PathLike | str) -> int | None:
    """Bytes that this process may still write where the local folder `place` is; None: nobody knows."""
    try:
        return None if "://" in str(place) else shutil.disk_usage(place).free
    except OSError:
        return None

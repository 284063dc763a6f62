"""Models on an object store: copied to this machine before they are read."""

from __future__ import annotations

import functools
import pathlib
import tempfile
from collections.abc import Collection

from etils import epath

from rlhf_jax.errors import InputError


def is_remote(name: str) -> bool:
    return "://" in name


def local_copy(name: str, patterns: Collection[str]) -> pathlib.Path:
    """A folder of this machine with the files of a remote one, as they are now. It goes with this process.

    Args:
      name: of the remote folder, such as gs://bucket/model.
      patterns: of the names of the files that are wanted.
    Raises:
      InputError: it cannot be reached, or is no folder.
    """
    try:
        folder = epath.Path(name)
        files = [entry for entry in folder.iterdir() if any(entry.match(pattern) for pattern in patterns)]
        facts = [(entry.name, entry.stat()) for entry in sorted(files, key=lambda entry: entry.name)]
    except (OSError, ImportError, KeyError, ValueError) as error:
        raise InputError(f"{name} cannot be reached ({error}); give a folder that can be read") from error
    if not facts:
        raise InputError(f"{name} is not a directory; give one with config.json and model.safetensors")
    state = tuple((file, stat.length, stat.mtime) for file, stat in facts)
    return pathlib.Path(_copied(name, state).name)


@functools.cache
def _copied(name: str, state: tuple[tuple[str, int, int], ...]) -> tempfile.TemporaryDirectory:
    """The files in a folder that is removed when the process ends; another state of them is copied anew."""
    folder = tempfile.TemporaryDirectory(prefix=f"{epath.Path(name).name}-")
    for file, _, _ in state:
        (epath.Path(name) / file).copy(epath.Path(folder.name) / file)
    return folder

"""A folder that says of each of its files how long it is and which SHA-256 it has."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

from etils import epath

from rlhf_jax.records import write_atomically

MANIFEST = "checksums.json"
CHUNK, THREADS = 1 << 22, 8  # bytes read at a time, files at a time


def write_checksums(folder: epath.Path, passed_over: Collection[str] = ()) -> None:
    """Write the manifest of a folder that is finished; its local files are on the disk after this.

    Args:
      passed_over: names of files that may still change.
    """
    names = [name for name in _files(folder) if name not in passed_over and name != MANIFEST]
    with ThreadPoolExecutor(THREADS) as pool:
        sums = pool.map(lambda name: _read(folder / name, durable="://" not in str(folder)), names)
        manifest = dict(zip(names, sums, strict=True))
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))


def damage(folder: epath.Path) -> str | None:
    """What in the folder is not as its manifest says, such as `state/d/1a is missing`; None: all is whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        wanted = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} cannot be read"

    def fault(name: str) -> str | None:
        length, digest = wanted[name]
        try:
            found = (folder / name).stat().length
            if found != length:
                return f"{name} has {found} bytes and not {length}"
            return None if _read(folder / name)["sha256"] == digest else f"{name} has another checksum"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"

    with ThreadPoolExecutor(THREADS) as pool:
        return next(filter(None, pool.map(fault, sorted(wanted))), None)


def _files(folder: epath.Path, before: str = "") -> Iterator[str]:
    """Every file's path below the folder."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(entry, f"{before}{entry.name}/")
        else:
            yield before + entry.name


def _read(path: epath.Path, *, durable: bool = False) -> dict[str, int | str]:
    length, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            length += len(chunk)
            digest.update(chunk)
        if durable:
            os.fsync(file.fileno())
    return {"bytes": length, "sha256": digest.hexdigest()}

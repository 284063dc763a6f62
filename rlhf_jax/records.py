"""Files of one JSON object a line that survive a killed process, and files that are replaced whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from rlhf_jax.errors import InputError

REMOTE_WRITE_SECONDS = 5.0  # an object store keeps no appendable files: whole files, at most this often


class RecordLog:
    """A file of one JSON object a line, each with "phase" and "step".

    Local files are appended to at once. On an object store the whole file is written anew every
    few seconds, and by `flush`, which belongs before every checkpoint.
    """

    def __init__(self, path: os.PathLike | str, *, writes: bool = True):
        """Of several processes one writes; the others' logs count steps and leave the file alone."""
        self.path = epath.Path(path)
        self._writes = writes
        self._remote = "://" in str(path)
        self._file = None
        self._written_at = 0.0
        self._lines: list[str] = []  # of a file on an object store, whole
        self._last: dict[str, int] = {}
        records = read_records(self.path)
        for record in records:
            self._note(record)
        if self._remote:
            self._lines = [json.dumps(record) for record in records]
        elif writes and self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            self._replace(records)  # without the line that a killed process left unfinished

    def last(self, phase: str) -> int | None:
        """The greatest step written for the phase."""
        return self._last.get(phase)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write the records in one piece."""
        lines = [json.dumps(record, allow_nan=False) for record in records]
        for line in lines:
            self._note(json.loads(line))
        if not self._writes:
            return
        if self._remote:
            self._lines += lines
            if time.monotonic() - self._written_at > REMOTE_WRITE_SECONDS:
                self.flush()
        elif lines:
            if self._file is None:
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115, open until close()
            rest = "".join(line + "\n" for line in lines).encode()
            while rest:  # a disk that fills up takes a part
                rest = rest[self._file.write(rest) :]

    def rewind(self, phase: str, step: int) -> None:
        """Drop the phase's records of later steps."""
        if not self._writes:
            self._last[phase] = min(step, self._last.get(phase, step))
            return
        self.flush()
        records = read_records(self.path)
        kept = [record for record in records if record["phase"] != phase or record["step"] <= step]
        if len(kept) < len(records):
            self._replace(kept)

    def flush(self) -> None:
        """Everything appended so far is in the file when this returns; without anything there is no file."""
        if self._remote and self._writes and (self._lines or self.path.exists()):
            self.path.write_text("".join(line + "\n" for line in self._lines))
            self._written_at = time.monotonic()

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def _note(self, record: Mapping[str, Any]) -> None:
        phase, step = record["phase"], record["step"]
        self._last[phase] = max(step, self._last.get(phase, step))

    def _replace(self, records: list[dict]) -> None:
        """Put these records in the file's place, whole or not at all."""
        if self._file is not None:
            self._file.close()
            self._file = None
        lines = [json.dumps(record) for record in records]
        write_atomically(self.path, "".join(line + "\n" for line in lines))
        self._lines = lines if self._remote else []
        self._last = {}
        for record in records:
            self._note(record)


def read_records(path: os.PathLike | str) -> list[dict]:
    """Every whole line. A last line that a killed process left unfinished is left out; other faults raise."""
    path = epath.Path(path)
    if not path.exists():
        return []
    records = []
    whole_lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(whole_lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int) or not isinstance(record["phase"], str):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            wanted = "a JSON object with an integer step and a phase"
            raise InputError(f"{path}, line {number}: expected {wanted}; mend or remove the line") from None
        records.append(record)
    return records


def write_atomically(path: os.PathLike | str, text: str) -> None:
    """The file holds the old text or the new one, never a part."""
    path = epath.Path(path)
    if "://" in str(path):
        path.write_text(text)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:  # of a full disk, where what is there of the new text would keep its room
        temporary.unlink(missing_ok=True)
        raise

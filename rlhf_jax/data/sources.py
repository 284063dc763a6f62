"""Rows of a data source, one JSON object each, with the place where each was found.

A source is a file (`.jsonl`, `.jsonl.gz`, `.json` with a list, `.parquet`) or the name of a data set on the
hub (`NAME` or `NAME:SPLIT`). Nothing is guessed: what cannot be read stops with the file, the line and what
was expected there.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pathlib
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rlhf_jax.errors import InputError, first_line

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
OTHER_SUFFIXES = (
    ".gz",
    ".zip",
    ".zst",
    ".csv",
    ".tsv",
    ".txt",
    ".yaml",
    ".arrow",
)  # also files, no hub names
MOST_KEYS = 10  # that a message names
Row = dict[str, Any]


def source_rows(source: str, *, limit: int | None = None) -> Iterator[tuple[str, Row]]:
    """(where, row) for each row of a source; where is "FILE:LINE", or "FILE:row N" for what has no lines.

    Args:
      source: path of a file, or a hub name.
      limit: read at most this many rows.
    """
    if limit is not None and limit < 1:
        raise InputError(f"data.limit={limit} reads nothing; use at least 1")
    rows = _rows(source)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source}: expected at least one row, found an empty source")
    return itertools.islice(itertools.chain([first], rows), limit)


def found(value: Any) -> str:
    """What a value is, in the words of an error message."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"the text {_short(value)}"
    if isinstance(value, bool | int | float):
        return f"the value {shortened(repr(value))}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with the keys {keys_of(value)}"
    return f"a {type(value).__name__}"


def keys_of(row: Row) -> str:
    """The keys of an object, a few of them where there are many."""
    names = sorted(map(str, row))
    more = f" and {len(names) - MOST_KEYS} more" if len(names) > MOST_KEYS else ""
    return f"[{', '.join(map(_short, names[:MOST_KEYS]))}]{more}"


def shortened(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _short(text: str) -> str:
    return ascii(shortened(text))


def _rows(source: str) -> Iterator[tuple[str, Row]]:
    path = pathlib.Path(os.path.expanduser(source))
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise InputError(f"{_short(source)}: cannot be read ({error.strerror or error})") from None
    if is_directory:
        raise InputError(f"{source}: expected a file or a hub name, found a directory; name a file in it")
    if not exists and not _looks_like_path(source):
        return _hub_rows(source)
    if not exists:
        raise InputError(f"{source}: no such file")
    name = path.name.lower()
    if name.endswith((".jsonl", ".jsonl.gz")):
        return _json_lines(path, source)
    if name.endswith(".json"):
        return _json_list(path, source)
    if name.endswith(".parquet"):
        return _parquet_rows(path, source)
    raise InputError(f"{source}: expected a file that ends in one of {', '.join(SUFFIXES)}")


def _looks_like_path(source: str) -> bool:
    return (
        source.startswith(("/", "./", "../", "~"))
        or "://" in source
        or source.lower().endswith((*SUFFIXES, *OTHER_SUFFIXES))
    )


def _parse(data: bytes, where: str, wanted: str) -> Any:
    """One JSON document of a line or a file."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_distinct)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: expected UTF-8, found byte 0x{data[error.start]:02x} at {error.start}"
        ) from None
    except json.JSONDecodeError as error:
        line = f" in line {error.lineno}" if error.lineno > 1 else ""
        raise InputError(
            f"{where}: expected {wanted}, found invalid JSON{line} ({error.msg} at {error.colno})"
        ) from None
    except (RecursionError, ValueError) as error:
        reason = "nesting too deep" if isinstance(error, RecursionError) else error
        raise InputError(f"{where}: expected {wanted}, found invalid JSON ({reason})") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _distinct(items: list[tuple[str, Any]]) -> Row:
    """An object of which no key is said twice: it is not known which value is meant."""
    row = dict(items)
    if len(row) < len(items):
        name = next(name for name, count in Counter(name for name, _ in items).items() if count > 1)
        raise ValueError(f"the key {_short(name)} twice in one object")
    return row


def _object(value: Any, where: str) -> tuple[str, Row]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected a JSON object, found {found(value)}")
    return where, value


def _json_lines(path: pathlib.Path, source: str) -> Iterator[tuple[str, Row]]:
    """Line by line, so that a large file is never whole in memory. Blank lines are passed over."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    where = f"{source}:{number}"
                    yield _object(_parse(line.rstrip(b"\r\n"), where, "a JSON object"), where)
    except EOFError:
        raise InputError(
            f"{source}:{number + 1}: expected more data, found the end of a truncated gzip file"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{source}:{number + 1}: expected gzip data, found a damaged file ({error})"
        ) from None
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror or error})") from None


def _json_list(path: pathlib.Path, source: str) -> Iterator[tuple[str, Row]]:
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror or error})") from None
    if not data.strip():
        return
    rows = _parse(data, source, "a JSON list (name the file .jsonl if it holds one object a line)")
    if not isinstance(rows, list):
        raise InputError(f"{source}: expected a JSON list of objects, found {found(rows)}")
    for number, row in enumerate(rows, start=1):
        yield _object(row, f"{source}:item {number}")


def _parquet_rows(path: pathlib.Path, source: str) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        for row in _decoded(path):
            number += 1
            yield f"{source}:row {number}", row
    except Exception as error:
        # Of many kinds: a damaged page, a time that no calendar has, a time zone that there is not.
        what = f"what cannot be read ({first_line(error)})"
        raise InputError(f"{source}:row {number + 1}: expected parquet data, found {what}") from None


def _decoded(path: pathlib.Path) -> Iterator[Row]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise ValueError(f"two of the columns {names[:MOST_KEYS]} have one name")
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()


def _hub_rows(source: str) -> Iterator[tuple[str, Row]]:
    """Rows of a hub data set. Code that comes with a data set never runs."""
    name, _, split = source.partition(":")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(f"{source}: neither a file nor a hub name (NAME or NAME:SPLIT)")
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split or "train")
    except Exception as error:
        # The client raises errors of many kinds: no network, no such name or split, a data set with a script.
        raise InputError(
            f"{source}: no such file, and the hub gave no data set ({first_line(error)})"
        ) from None
    for number, row in enumerate(rows, start=1):
        yield _object(row, f"{source}:row {number}")

"""Reading rows: every form, and every way in which a source can be bad."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_jax.data.preferences import read_preferences
from rlhf_jax.data.sources import source_rows
from rlhf_jax.errors import InputError

ROWS = [{"prompt": f"question {n}", "chosen": "good", "rejected": "bad"} for n in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write(path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def jsonl(path):
    return write(path / "rows.jsonl", LINES)


def jsonl_gz(path):
    return write(path / "rows.jsonl.gz", gzip.compress(LINES))


def json_list(path):
    return write(path / "rows.json", json.dumps(ROWS, indent=1).encode())


def parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path / "rows.parquet")
    return str(path / "rows.parquet")


@pytest.mark.parametrize("make", [jsonl, jsonl_gz, json_list, parquet])
def test_every_form_gives_the_same_rows_with_their_places(make, tmp_path):
    source = make(tmp_path)
    places, rows = zip(*source_rows(source), strict=True)
    assert list(rows) == ROWS
    assert all(place.startswith(f"{source}:") and str(n) in place for n, place in enumerate(places, start=1))


def test_limit_counts_rows_and_reads_no_further(tmp_path):
    source = write(tmp_path / "rows.jsonl", LINES + b"not JSON\n")
    assert [row for _, row in source_rows(source, limit=2)] == ROWS[:2]
    assert len(list(source_rows(source, limit=3))) == 3
    with pytest.raises(InputError, match=r"data\.limit=0"):
        source_rows(source, limit=0)


def test_blank_lines_and_a_byte_order_mark_are_passed_over_but_counted(tmp_path):
    source = write(tmp_path / "rows.jsonl", b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\n\n"))
    assert [place for place, _ in source_rows(source)] == [f"{source}:{n}" for n in (1, 3, 5)]


def test_hub_name_with_split_is_asked_by_that_name_and_runs_no_code(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [row for _, row in source_rows("somebody/pairs:test")] == ROWS
    assert len(read_preferences("somebody/pairs", limit=2)[0]) == 2
    assert asked == [(("somebody/pairs",), {"split": "test"}), (("somebody/pairs",), {"split": "train"})]


FIRST = LINES.splitlines(keepends=True)[0]
BAD_FILES = {
    "empty": ("rows.jsonl", b"", r"rows.jsonl: expected at least one row"),
    "blank": ("rows.jsonl", b"\n \n", r"rows.jsonl: expected at least one row"),
    "empty list": ("rows.json", b"[]", r"rows.json: expected at least one row"),
    "empty gzip": ("rows.jsonl.gz", gzip.compress(b""), r"rows.jsonl.gz: expected at least one row"),
    "truncated gzip": ("rows.jsonl.gz", gzip.compress(LINES)[:-12], r"rows.jsonl.gz:\d+: .*truncated"),
    "no gzip": ("rows.jsonl.gz", LINES, r"rows.jsonl.gz:1: expected gzip data"),
    "damaged gzip": (
        "rows.jsonl.gz",
        gzip.compress(LINES)[:-8] + bytes(8),
        r"rows.jsonl.gz:\d+: expected gzip data, found a damaged file",
    ),
    "invalid UTF-8": (
        "rows.jsonl",
        FIRST + b'{"prompt": "\xff"}\n',
        r"rows.jsonl:2: expected UTF-8, found byte 0xff",
    ),
    "invalid JSON": (
        "rows.jsonl",
        FIRST + b"{'prompt': 1}\n",
        r"rows.jsonl:2: expected a JSON object, found invalid",
    ),
    "half a line": (
        "rows.jsonl",
        FIRST + FIRST[:20],
        r"rows.jsonl:2: expected a JSON object, found invalid JSON",
    ),
    "too deep": ("rows.jsonl", FIRST + b"[" * 100_000, r"rows.jsonl:2: .*nesting too deep"),
    "NaN": ("rows.jsonl", FIRST + b'{"prompt": NaN}\n', r"rows.jsonl:2: .*NaN is no JSON"),
    "list in a line": (
        "rows.jsonl",
        FIRST + b"[1, 2]\n",
        r"rows.jsonl:2: expected a JSON object, found a list of 2",
    ),
    "text in a line": ("rows.jsonl", FIRST + b'"hello"\n', r"rows.jsonl:2: .*found the text 'hello'"),
    "null in a line": ("rows.jsonl", FIRST + b"null\n", r"rows.jsonl:2: expected a JSON object, found null"),
    "lines in .json": ("rows.json", LINES, r"rows.json: expected a JSON list .*\.jsonl.*line 2"),
    "object in .json": ("rows.json", b'{"prompt": 1}', r"rows.json: expected a JSON list of objects"),
    "no parquet": ("rows.parquet", LINES, r"rows.parquet:row 1: expected parquet data"),
    "unknown suffix": ("rows.csv", LINES, r"rows.csv: expected a file that ends in one of \.jsonl"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_stops_with_file_line_and_what_was_expected(case, tmp_path):
    """Fault: a failed load fell back to canned rows, and the run went on."""
    name, data, message = BAD_FILES[case]
    source = write(tmp_path / name, data)
    with pytest.raises(InputError, match=message) as error:
        list(source_rows(source))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "source",
    ["./absent", "../absent", "/absent/rows", "~absent", "absent.jsonl", "absent.csv", "gs://bucket/x"],
)
def test_missing_path_says_so_and_asks_no_hub(source, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    with pytest.raises(InputError, match="no such file"):
        source_rows(source)


def test_directory_unreadable_name_and_unknown_hub_name(tmp_path):
    with pytest.raises(InputError, match="found a directory"):
        source_rows(str(tmp_path))
    with pytest.raises(InputError, match="neither a file nor a hub name"):
        source_rows("two words")
    with pytest.raises(InputError, match="cannot be read"):
        source_rows("a" * 5000)
    with pytest.raises(InputError, match="somebody/absent: no such file, and the hub gave no data set"):
        source_rows("somebody/absent")


def test_damaged_parquet_names_the_row(tmp_path):
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(ROWS * 2000),
        tmp_path / "rows.parquet",
        row_group_size=1000,
        compression="zstd",
    )
    data = bytearray((tmp_path / "rows.parquet").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    source = write(tmp_path / "rows.parquet", bytes(data))
    with pytest.raises(InputError, match=r"rows.parquet:row \d+: expected parquet data"):
        list(source_rows(source))


def test_a_key_twice_in_one_object_is_refused(tmp_path):
    """Which of the two was meant is not known."""
    source = write(tmp_path / "rows.jsonl", FIRST + b'{"prompt": "a", "chosen": "b", "chosen": "c"}\n')
    with pytest.raises(InputError, match=r"rows.jsonl:2: .*the key 'chosen' twice in one object"):
        list(source_rows(source))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            {"prompt": pyarrow.array([0, 2**31 - 1], pyarrow.date32())},
            "row 1: expected parquet data, found what",
        ),
        (
            {"prompt": pyarrow.array([1], pyarrow.timestamp("s", tz="Nowhere/Land"))},
            "row 1: expected parquet data, found what",
        ),
    ],
    ids=["a day that no calendar has", "a time zone that there is not"],
)
def test_parquet_values_that_python_has_not(columns, words, tmp_path):
    """Fault: errors of other kinds came out of the decoder as tracebacks."""
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=words):
        list(source_rows(str(tmp_path / "rows.parquet")))


def test_parquet_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], ["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(InputError, match="two of the columns"):
        list(source_rows(str(tmp_path / "rows.parquet")))


def test_a_message_is_one_printable_line_of_bounded_length(tmp_path):
    """Fault: keys of a file went to the terminal as they are, escape sequences and megabytes alike."""
    key = "\x1b[2Jkey\n" + "x" * 10_000
    source = write(tmp_path / "rows.jsonl", json.dumps({key: 1, **{str(n): n for n in range(5000)}}).encode())
    with pytest.raises(
        InputError, match=r"found \['\\x1b\[2Jkey\\nx+\.\.\.', '0', .* and 4991 more"
    ) as error:
        read_preferences(source)
    error = str(InputError(f"{key} is no setting; leave it out"))
    assert error.startswith(r"\x1b[2Jkey xxx")
    assert error.endswith("is no setting; leave it out")
    assert len(error) < 1100

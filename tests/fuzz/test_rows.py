"""Files of rows: JSON lines, gzip, a JSON list, parquet. Each is read or refused with file and place."""

import gzip
import io
import json
import pathlib
import tempfile

import pyarrow
import pyarrow.parquet
from hypothesis import strategies as st

from rlhf_jax.data.preferences import read_preferences
from rlhf_jax.data.prompts import read_prompts
from tests.fuzz.inputs import JUNK, VALUES, changed, fuzz, mutated, outcome

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "how are you"}]
ANSWER = {"role": "assistant", "content": "well"}
ROWS = (
    {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": MESSAGES, "chosen": "b", "rejected": "c"},
    {"chosen": [*MESSAGES, ANSWER], "rejected": [*MESSAGES, {**ANSWER, "content": "ill"}]},
    {"prompt": MESSAGES, "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "ill"}]},
    {"prompt": MESSAGES, "chosen": "b", "rejected": "c", "reward_model": {"style": "model"}},
)
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def parquet(rows, **options):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, **options)
    return file.getvalue()


TEXT_ROWS = [{"prompt": f"question {n}", "chosen": "good", "rejected": "bad"} for n in range(20)]
MESSAGE_ROWS = [{"prompt": MESSAGES, "chosen": [ANSWER], "rejected": [ANSWER]} for n in range(3)]
TABLES = (
    parquet(TEXT_ROWS, compression="none"),
    parquet(TEXT_ROWS, compression="snappy", row_group_size=5),
    parquet(MESSAGE_ROWS, compression="zstd"),
)


COLUMNS = (
    pyarrow.array([1, 2], pyarrow.int8()),
    pyarrow.array([2**64 - 1, 0], pyarrow.uint64()),
    pyarrow.array([float("nan"), None]),
    pyarrow.array([2**50, -(2**50)], pyarrow.timestamp("s", tz="UTC")),
    pyarrow.array([1, 2**40], pyarrow.timestamp("ns", tz="Nowhere/Land")),
    pyarrow.array([2**31 - 1, -(2**31)], pyarrow.date32()),
    pyarrow.array([2**62, 1], pyarrow.duration("s")),
    pyarrow.array([b"\xff", b""], pyarrow.binary()),
    pyarrow.Array.from_buffers(
        pyarrow.string(),
        2,
        [
            None,
            pyarrow.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0])),
            pyarrow.py_buffer(b"\xff\xc3"),
        ],
    ),
    pyarrow.array(["a", "b"]).dictionary_encode(),
    pyarrow.array([[("a", 1)], [("a", 1), ("a", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int32())),
    pyarrow.array([MESSAGES, [ANSWER]]),
    pyarrow.array([[], None], pyarrow.list_(pyarrow.null())),
    pyarrow.array([{"style": "model"}, {"style": "rule"}]),
    pyarrow.array([None, None], pyarrow.null()),
    pyarrow.array(["a", "\0"], pyarrow.large_string()),
)
NAMES = ("prompt", "chosen", "rejected", "reward_model", "", "other")


def read(name, data):
    """Pairs and prompts of a file; whole ones only, or a refusal that names the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / name
        path.write_bytes(data)
        pairs = outcome(lambda: read_preferences(str(path)), str(path))
        prompts = outcome(lambda: read_prompts(str(path)), str(path))
    for pair in pairs[0] if pairs else ():
        assert pair.chosen
        assert pair.rejected
        assert pair.chosen != pair.rejected
        (pair.chosen + pair.rejected + "".join(m.content for m in pair.prompt)).encode("utf-8")
    for prompt in prompts[0] if prompts else ():
        assert any(message.role == "user" and message.content for message in prompt)
    return pairs, prompts


@fuzz(mutated(LINES))
def test_damaged_lines(data):
    read("rows.jsonl", data)


@fuzz(st.lists(st.one_of(st.sampled_from(JUNK), st.binary(max_size=30)), max_size=5))
def test_lines_of_anything(pieces):
    read("rows.jsonl", b"\n".join(pieces))


@fuzz(st.lists(changed(ROWS), min_size=1, max_size=3))
def test_rows_with_other_values(rows):
    """NaN and infinity are written as Python writes them, and surrogates as JSON can: escaped."""
    read("rows.jsonl", "\n".join(map(json.dumps, rows)).encode())


@fuzz(st.one_of(changed([*ROWS]), VALUES))
def test_lists_with_other_values(value):
    read("rows.json", json.dumps(value).encode())


@fuzz(st.one_of(mutated(gzip.compress(LINES)), mutated(LINES).map(gzip.compress), mutated(LINES)))
def test_damaged_gzip(data):
    read("rows.jsonl.gz", data)


@fuzz(mutated(TABLES))
def test_damaged_parquet(data):
    read("rows.parquet", data)


@fuzz(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(COLUMNS)), min_size=1, max_size=4))
def test_parquet_of_other_types(columns):
    """Two columns of one name, times that no calendar has, zones that do not exist, text that is no UTF-8."""
    names, arrays = zip(*columns, strict=True)
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(list(arrays), list(names)), file)
    read("rows.parquet", file.getvalue())

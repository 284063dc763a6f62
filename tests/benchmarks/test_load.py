"""What grows with data and steps, small by default and at full size with --long."""

import pytest

from tests.benchmarks.scripts import result_of


def test_rows_are_counted_and_measured():
    result = result_of("load.py", "rows", "--rows", 2000)
    for file in ("pairs.jsonl", "pairs.jsonl.gz"):
        assert set(result[file]) == {
            "file_mib", "stream_s", "stream_mib", "pairs_s", "pairs_mib", "pairs_bytes_a_row",
        }  # fmt: skip
    assert result["pairs.jsonl.gz"]["file_mib"] < result["pairs.jsonl"]["file_mib"] / 5


def test_a_long_run_keeps_two_checkpoints_and_a_line_a_step():
    """Twenty are saved; a line of 60 numbers takes about two kilobytes."""
    result = result_of("load.py", "folders", "--steps", 200)
    assert result["checkpoints_mib_most"] < 3.5 * result["checkpoint_mib"]
    assert result["checkpoints_mib_last"] < 2.5 * result["checkpoint_mib"]
    assert 1000 < result["metrics_bytes_a_step"] < 3000


@pytest.mark.long
def test_a_million_rows_pass_in_constant_memory_and_stay_in_little():
    result = result_of("load.py", "rows")
    assert result["rows"] == 1_000_000
    for file in ("pairs.jsonl", "pairs.jsonl.gz"):
        assert result[file]["stream_mib"] < 32  # one row at a time
        assert result[file]["pairs_bytes_a_row"] < 700  # 0.2 kB of it are the texts


@pytest.mark.long
def test_a_thousand_steps_leave_memory_as_it_is():
    result = result_of("load.py", "soak")
    assert len(result["rss_mib"]) == 19
    live = result["live_mib"]
    assert max(live) - min(live) < 0.01  # arrays of a checkpoint in the making come and go
    assert max(result["arrays"]) <= min(result["arrays"]) + 60
    assert result["rss_kib_a_step_second_half"] < 20

"""The benchmark of compilation from end to end."""

import pytest

from tests.benchmarks.scripts import result_of


@pytest.mark.slow
def test_scanned_unrolled_cold_and_warm():
    result = result_of("compile.py", "--layers", 1, 2, "--embed", 64, "--vocab", 300)
    assert result["layers"] == [1, 2]
    for kind in ("scanned", "unrolled"):
        assert set(result[kind]) == {"1", "2"}
        assert result[kind]["2"]["run_s"] > 0
    kept = result["kept_programs"]
    assert kept["warm"] == kept["cold"] > 0  # the second process found all of them
    assert 0 < result["warm_over_cold"] < 1
    assert result["unrolled_over_scanned"] > 0

"""benchmarks/generate.py on a tiny model."""

import random

import pytest

from tests.benchmarks.scripts import result_of, run


@pytest.fixture(scope="module")
def sizes():
    return ["--prompt", 6, "--repeats", 1]


def check_shares(result):
    assert result["tokens_per_s"] == pytest.approx(result["tokens"] / min(result["seconds"]), rel=1e-3)
    assert result["floor_ratio"] > 1
    assert max(result["flops_fraction"], result["bytes_fraction"]) == pytest.approx(
        1 / result["floor_ratio"], rel=1e-2
    )
    assert result["step_ratio"] == pytest.approx(result["step_ms"] / result["products_ms"], rel=1e-2)
    assert result["peak_rss_gib"] > 0


def test_one_length(tiny_model, sizes):
    result = result_of("generate.py", tiny_model, *sizes, "--batch", 4, "--response", 5)
    assert (result["rows"], result["slots"], result["tokens"], result["steps"]) == (4, 4, 20, 4)
    assert result["occupancy"] == 1
    check_shares(result)


def test_a_queue_of_ragged_rows(tiny_model, sizes):
    """On two devices. The lengths are those that the peer is given: the same seed, the same bounds."""
    pick = random.Random(0)
    lengths = [pick.randint(8, 128) for _ in range(24)]
    result = result_of("generate.py", tiny_model, *sizes, "--ragged", 24, "--slots", 8, devices=2)
    assert (result["rows"], result["slots"], result["tokens"]) == (24, 8, sum(lengths))
    assert (sum(lengths) - 24) / 8 <= result["steps"] < sum(lengths) / 4
    assert 0.8 < result["occupancy"] <= 1  # four slots a device, of which one may wait for the other device
    check_shares(result)


def test_a_wrong_setting_ends_with_one_line(tiny_model, sizes):
    done = run("generate.py", tiny_model, *sizes, "rollout.top_p=2")
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: rollout.top_p=2.0 must be above 0 and at most 1"]

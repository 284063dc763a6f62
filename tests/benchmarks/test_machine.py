"""Times, limits and memory of the machine."""

import pathlib
import subprocess
import sys
import time

import jax
import machine
import numpy as np
import pytest

from rlhf_jax.trainers.timing import CompileClock


def test_the_median_leaves_the_first_call_out():
    delays = iter([0.2, 0.001, 0.003, 0.002])
    timing = machine.timed(lambda: time.sleep(next(delays)), repeats=3)
    assert timing.first_s >= 0.2
    assert 0.001 <= timing.best <= timing.median < 0.1
    assert timing.spread > 0


def test_functions_are_timed_in_turn():
    order = []
    timings = machine.timed_together(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2
    )
    assert order == ["a", "b"] * 3
    assert len(timings["a"].seconds) == 2


def test_rates_are_those_of_the_work_done(monkeypatch):
    """A product counts 2 n^3, an update in place reads and writes each byte."""
    clock = iter(np.arange(1000.0))  # each reading one second after the other
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine.matrix_rate.__wrapped__("float32", 16) == 2 * 16**3
    assert machine.copy_bandwidth.__wrapped__(64) == 2 * 64 * 4


def test_virtual_devices_share_the_machine():
    assert jax.device_count() == 8
    limits = machine.limits("float32")
    assert limits == {"flops_s": machine.matrix_rate("float32"), "bytes_s": machine.copy_bandwidth()}
    assert machine.chip_peaks() is None
    assert machine.device_peak_gib() is None


def test_every_listed_chip_has_both_peaks(monkeypatch):
    assert machine.PEAK_BANDWIDTH.keys() == machine.PEAK_FLOPS.keys()
    device = type("Device", (), {"device_kind": "TPU v5 lite chip"})
    monkeypatch.setattr(machine.jax, "devices", lambda: [device])
    assert machine.chip_peaks() == {"flops_s": 197e12, "bytes_s": 0.82e12}


def test_the_peak_of_memory_can_start_again():
    big = np.ones(2**27, np.float32)  # half a GiB
    with_big = machine.peak_rss_gib()
    del big
    if not machine.forget_peak_rss():
        pytest.skip("the system keeps its peak")
    assert machine.peak_rss_gib() < with_big - 0.4


def test_the_peak_of_memory_is_not_that_of_the_process_that_started_this_one():
    """getrusage said 899 MiB of a reader of 1 MiB, started from a large process."""
    if not machine.STATUS.exists():
        pytest.skip("needs Linux")
    big = np.ones(2**28, np.float32)  # one GiB
    code = "import machine; print(machine.peak_rss_gib())"
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=pathlib.Path(machine.__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.05 < float(child.stdout) < 0.8 * big.nbytes / machine.GIB


def test_compilations_are_counted():
    count = CompileClock()
    double = jax.jit(lambda x: x * 2)
    for width in (3, 3, 5, 3, 5):
        double(np.ones(width, np.float32)).block_until_ready()
    assert count.programs == 2


def test_json_keeps_four_digits_at_every_depth():
    assert machine.significant({"a": [1.23456, {"b": 123456.0}], "c": 7, "d": None}) == {
        "a": [1.235, {"b": 123500.0}],
        "c": 7,
        "d": None,
    }

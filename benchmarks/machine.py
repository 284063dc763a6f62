"""What this machine can do, how much memory a process has taken, and how the benchmarks take times."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import platform
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.errors import InputError
from rlhf_jax.trainers.timing import PEAK_FLOPS, of_this_chip

# Memory bytes/s of one chip, from the makers' data sheets; FLOP/s of the same chips are in PEAK_FLOPS.
PEAK_BANDWIDTH = {
    "NVIDIA A100": 2.0e12,
    "NVIDIA H100": 3.35e12,
    "NVIDIA H200": 4.8e12,
    "TPU v4": 1.2e12,
    "TPU v5 lite": 0.82e12,
    "TPU v5": 2.77e12,
    "TPU v6 lite": 1.64e12,
}
GIB = 2**30
STATUS = pathlib.Path("/proc/self/status")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a function: of its first call, which compiles, and of each later one."""

    first_s: float
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def timed(function: Callable[..., Any], *args: Any, repeats: int = 10) -> Timing:
    """Times calls one by one, each until its result is there."""
    seconds = [_seconds_of(functools.partial(function, *args)) for _ in range(1 + repeats)]
    return Timing(seconds[0], tuple(seconds[1:]))


def timed_together(calls: dict[str, Callable[[], Any]], repeats: int = 10) -> dict[str, Timing]:
    """As `timed`, the functions in turn: whatever else the machine does slows all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + repeats):
        for name, call in calls.items():
            seconds[name] += [_seconds_of(call)]
    return {name: Timing(taken[0], tuple(taken[1:])) for name, taken in seconds.items()}


def _seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


@functools.cache
def matrix_rate(dtype: str = "float32", size: int = 2048) -> float:
    """FLOP/s of a product of two size x size matrices on one device: the best of ten."""
    x = jnp.ones((size, size), dtype)
    return 2 * size**3 / timed(jax.jit(jnp.matmul), x, x).best


@functools.cache
def copy_bandwidth(size: int = 2**26) -> float:
    """Bytes/s, read and written counted both, of x -> x + 1 in place over float32 [size]: the best of ten.

    In place, because on a CPU a fresh array costs more in page faults than its copy does.
    """
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x, best = step(jnp.zeros(size, jnp.float32)), float("inf")
    for _ in range(10):
        start = time.perf_counter()
        x = jax.block_until_ready(step(x))
        best = min(best, time.perf_counter() - start)
    return 2 * x.nbytes / best


def chip_peaks() -> dict[str, float] | None:
    """Data-sheet bfloat16 FLOP/s and memory bytes/s of one device; None where it is not listed: CPUs."""
    flops, bandwidth = of_this_chip(PEAK_FLOPS), of_this_chip(PEAK_BANDWIDTH)
    return None if flops is None or bandwidth is None else {"flops_s": flops, "bytes_s": bandwidth}


def limits(dtype: str) -> dict[str, float]:
    """FLOP/s and bytes/s that all devices of this machine can do: measured on one.

    Virtual CPU devices share the cores, so that together they can do no more than one.
    """
    devices = 1 if jax.default_backend() == "cpu" else jax.device_count()
    return {"flops_s": devices * matrix_rate(dtype), "bytes_s": devices * copy_bandwidth()}


def description() -> dict[str, Any]:
    """Of the machine and versions, for the JSON of each benchmark."""
    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def peak_rss_gib() -> float:
    """The most memory that this process has had, since it began or since `forget_peak_rss`.

    On Linux not by getrusage, whose figure begins with the memory of the process that started this one.
    """
    if STATUS.exists():
        return resident_gib("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if platform.system() == "Darwin" else 1024) / GIB


def resident_gib(field: str = "VmRSS") -> float:
    """Memory of this process now, or the most it has had (VmHWM), as Linux says."""
    return int(re.findall(rf"{field}:\s+(\d+)", STATUS.read_text())[0]) * 1024 / GIB


def forget_peak_rss() -> bool:
    """Starts the peak again from what the process has now; False where the system cannot (it is Linux's)."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def device_peak_gib() -> float | None:
    """The most memory in use on the fullest device; None on a CPU, whose memory is the process's."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return max(peaks) / GIB if peaks else None


def peak_memory() -> dict[str, float]:
    device = device_peak_gib()
    peaks = {"peak_rss_gib": round(peak_rss_gib(), 3)}
    return peaks if device is None else {**peaks, "peak_device_gib": round(device, 3)}


def significant(value: Any, digits: int = 4) -> Any:
    """The value with its floats, however deep, rounded to so many digits: JSON to read."""
    if isinstance(value, dict):
        return {key: significant(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [significant(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Of a benchmark whose docstring is its help."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def report(benchmark: Callable[[], dict[str, Any]]) -> None:
    """Runs a benchmark and prints its result as the last line; a wrong input ends it with one line."""
    try:
        result = benchmark()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(json.dumps(significant(result)), flush=True)


def rates() -> dict[str, Any]:
    """All that is known of this machine's limits."""
    return {
        **description(),
        "matrix_flops_s": {dtype: matrix_rate(dtype) for dtype in ("float32", "bfloat16")},
        "copy_bytes_s": copy_bandwidth(),
        "chip": chip_peaks(),
    }


if __name__ == "__main__":
    report(rates)

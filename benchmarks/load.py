"""What grows with the data and with the length of a run, and what does not.

    python benchmarks/load.py rows [--rows 1000000]      # reading a file of preference pairs, plain and gzip
    python benchmarks/load.py folders [--steps 10000]    # logs and checkpoints of a long run, simulated
    python benchmarks/load.py soak [--steps 1000]        # PPO on a tiny model: memory of host and devices

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import gzip
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import machine
import numpy as np

from rlhf_jax.config import load_config
from rlhf_jax.data.preferences import read_preferences
from rlhf_jax.data.sources import source_rows
from rlhf_jax.metrics import MetricsLog
from rlhf_jax.settings import Config

WARM_UP, EVERY = 100, 50  # steps of a soak before the first sample, and between samples
SHAPE = ("vocab_size=300", "layers=1", "embed=16", "heads=2", "kv_heads=2", "mlp=32", "max_positions=64")
TINY = (
    *(f"policy.shape.{size}" for size in SHAPE),
    "reward.function=load:length",
    "data.limit=64",
    "data.validation_fraction=0.2",
    "rollout.prompt_length=40",
    "rollout.response_length=8",
    "ppo.batch_size=8",
    "ppo.minibatches=2",
    "eval.prompts=4",
    "eval.batch_size=8",
    "run.save_every=100",
    "run.keep=2",
)


def length(prompts: list, responses: list[str]) -> list[float]:
    """A reward that needs no model."""
    return [float(len(response)) for response in responses]


def rss_mib() -> float:
    """Memory of this process now (Linux)."""
    return 1024 * machine.resident_gib()


def write_pairs(path: pathlib.Path, rows: int) -> None:
    """Distinct pairs of about 0.4 kB, as HH text."""
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else open(path, "wb") as file:
        for n in range(rows):
            prompt = f"\n\nHuman: question {n} of many, {'which goes on for a while ' * 3}?\n\nAssistant:"
            row = {"chosen": f"{prompt} a good answer to {n}", "rejected": f"{prompt} a worse answer to {n}"}
            file.write(json.dumps(row).encode() + b"\n")


def rows(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and growth of memory: rows passed by one at a time, and pairs held as a run holds them."""
    result: dict[str, Any] = {"benchmark": "rows", "rows": args.rows}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pairs.jsonl", "pairs.jsonl.gz"):
            path = pathlib.Path(folder) / name
            write_pairs(path, args.rows)
            measured = {"file_mib": path.stat().st_size / 2**20}
            measured |= _grown("stream", lambda path=path: sum(1 for _ in source_rows(str(path))))
            measured |= _grown("pairs", lambda path=path: read_preferences(str(path))[0])
            measured["pairs_bytes_a_row"] = measured["pairs_mib"] * 2**20 / args.rows
            result[name] = measured
            print(f"{name}: {measured}", flush=True)
    return result


def _grown(what: str, read: Callable[[], Any]) -> dict[str, float]:
    gc.collect()
    before, began = rss_mib(), time.perf_counter()
    machine.forget_peak_rss()
    kept = read()
    seconds, peak = time.perf_counter() - began, machine.peak_rss_gib() * 1024
    del kept
    return {f"{what}_s": seconds, f"{what}_mib": peak - before}


def folders(args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of metrics.jsonl a step, and of checkpoints over a run that keeps two of them."""
    from rlhf_jax.checkpoint import Checkpoints

    numbers = {f"actor/number_{n}": float(np.float32(0.1) * n) for n in range(60)}
    with tempfile.TemporaryDirectory() as folder:
        sizes = []
        state = {"weights": jax.random.normal(jax.random.key(0), 2**18)}
        checkpoints = Checkpoints(folder, "ppo", keep=2)
        with MetricsLog(folder, tensorboard=False) as log:
            for step in range(1, args.steps + 1):
                log.write("ppo", step, numbers)
                if step % (args.steps // 20) == 0:
                    checkpoints.save(step, state, {})
                    checkpoints.wait()  # files that are being written come and go
                    sizes.append(_bytes(pathlib.Path(folder) / "checkpoints"))
        checkpoints.close()
        log_bytes = _bytes(pathlib.Path(folder) / "metrics.jsonl")
        last = _bytes(pathlib.Path(folder) / "checkpoints")
    return {
        "benchmark": "folders",
        "steps": args.steps,
        "metrics_bytes_a_step": log_bytes / args.steps,
        "checkpoints_mib_most": max(sizes) / 2**20,
        "checkpoints_mib_last": last / 2**20,
        "checkpoint_mib": 4 * 2**18 / 2**20,
    }


def _bytes(path: pathlib.Path) -> int:
    files = [path] if path.is_file() else [inner for inner in path.rglob("*") if inner.is_file()]
    return sum(file.stat().st_size for file in files)


@dataclasses.dataclass(frozen=True)
class Sample:
    step: int
    rss_mib: float
    live_mib: float  # arrays that the process holds on devices
    arrays: int


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Runs `rlhf-jax ppo` on a tiny model and looks at memory every 50 steps."""
    samples: list[Sample] = []
    write = MetricsLog.write

    def write_and_look(self: MetricsLog, phase: str, step: int, numbers: Any) -> None:
        write(self, phase, step, numbers)
        if step >= WARM_UP and step % EVERY == 0:
            gc.collect()
            live = jax.live_arrays()
            samples.append(Sample(step, rss_mib(), sum(x.nbytes for x in live) / 2**20, len(live)))
            print(samples[-1], flush=True)

    with tempfile.TemporaryDirectory() as folder:
        config: Config = load_config(None, [*TINY, f"ppo.iterations={args.steps}", f"run.dir={folder}/run"])
        MetricsLog.write = write_and_look  # type: ignore[method-assign]
        began = time.perf_counter()
        try:
            from rlhf_jax.trainers.pipeline import ppo

            ppo(config)
        finally:
            MetricsLog.write = write  # type: ignore[method-assign]
        seconds = time.perf_counter() - began
        run_mib = _bytes(pathlib.Path(folder) / "run") / 2**20
    half = samples[len(samples) // 2 :]
    return {
        **machine.description(),
        "benchmark": "soak",
        "steps": args.steps,
        "seconds": seconds,
        "run_directory_mib": run_mib,
        "rss_mib": [sample.rss_mib for sample in samples],
        "live_mib": [sample.live_mib for sample in samples],
        "arrays": [sample.arrays for sample in samples],
        "rss_kib_a_step": 1024 * _slope(samples, "rss_mib"),
        "rss_kib_a_step_second_half": 1024 * _slope(half, "rss_mib"),
        "live_kib_a_step": 1024 * _slope(samples, "live_mib"),
    }


def _slope(samples: list[Sample], field: str) -> float:
    """Least squares, a step."""
    steps = [sample.step for sample in samples]
    return float(np.polyfit(steps, [getattr(sample, field) for sample in samples], 1)[0])


PARTS = {"rows": (rows, 1_000_000), "folders": (folders, 10_000), "soak": (soak, 1000)}


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--rows", type=int, default=PARTS["rows"][1])
    parser.add_argument("--steps", type=int, help="none: 10,000 of folders, 1,000 of a soak")
    args = parser.parse_args()
    benchmark, default = PARTS[args.part]
    args.steps = args.steps or default
    machine.report(lambda: benchmark(args))


if __name__ == "__main__":
    main()

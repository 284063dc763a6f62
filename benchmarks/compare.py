"""Ours and a peer (PyTorch with TRL and transformers) in turn on this machine, by the same statistic.

    python benchmarks/compare.py ppo MODEL_DIR --peer-python PYTHON [--natural]
    python benchmarks/compare.py generate MODEL_DIR --peer-python PYTHON [--ragged]
    python benchmarks/compare.py reward MODEL_DIR --peer-python PYTHON

Each side is a process of its own with the same model, sizes, float32 and threads; a pair is one of each, one
after the other. Our throughput is without compilation, whose seconds are in the JSON.

The last line is one JSON object: ratio is our throughput over the peer's and memory_ratio our peak memory
over the peer's, medians of the pairs; floor_ratio is our time over the time that the counted FLOPs and bytes
need on this machine. `ours` and `peer` are the JSON of the pair of the middle ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import machine

HERE = pathlib.Path(__file__).parent
SHARED = HERE.parents[1] / "shared"
HH = SHARED / "data" / "hh-rlhf" / "harmless-base"
THROUGHPUT = {"ppo": "samples_per_s", "generate": "tokens_per_s", "reward": "pairs_per_s"}
OURS = {"ppo": "ppo_step.py", "generate": "generate.py", "reward": "reward_step.py"}
RAGGED = 256  # waiting prompts
RAGGED_BATCHES = (16, 64)  # of the peer, whose best one counts; our slots are generate.py's choice


def run_json(command: Sequence[Any]) -> dict[str, Any]:
    """The JSON of a command's last line; its other lines go to stderr."""
    command = [str(word) for word in command]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    print("\n".join([" ".join(command), *lines]), file=sys.stderr, flush=True)
    if done.returncode or not lines:
        raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}; its output is above")
    return json.loads(lines[-1])


def options(args: argparse.Namespace) -> list[Any]:
    """What both sides are given alike."""
    if args.what == "reward":
        return ["--pairs", args.pairs, *args.sizes]
    if args.natural:
        return ["--prompts", args.prompts, "--response", 128, *args.sizes]
    return list(args.sizes)


def ours(args: argparse.Namespace) -> dict[str, Any]:
    ragged = ["--ragged", RAGGED] if args.ragged else []
    packing = ["ppo.packing=true"] if args.natural and args.what == "ppo" else []
    return run_json([sys.executable, HERE / OURS[args.what], args.model, *options(args), *ragged, *packing])


def peer(args: argparse.Namespace) -> dict[str, Any]:
    """The peer's figures; of a ragged queue, those of its best batch."""
    start = [args.peer_python, args.peers, args.what, args.model, "--threads", args.threads, *options(args)]
    if not args.ragged:
        return run_json(start)
    batches = [run_json([*start, "--ragged", RAGGED, "--batch", batch]) for batch in RAGGED_BATCHES]
    return max(batches, key=lambda figures: figures["tokens_per_s"])


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turn, `repeats` times."""
    pairs = [(ours(args), peer(args)) for _ in range(args.repeats)]
    throughput = THROUGHPUT[args.what]
    ratios = [mine[throughput] / theirs[throughput] for mine, theirs in pairs]
    memory = [mine["peak_rss_gib"] / theirs["peak_rss_gib"] for mine, theirs in pairs]
    middle = sorted(range(len(pairs)), key=lambda i: ratios[i])[(len(pairs) - 1) // 2]
    floors = [mine["floor_ratio"] for mine, _ in pairs if "floor_ratio" in mine]
    return {
        "ours": pairs[middle][0],
        "peer": pairs[middle][1],
        "ratio": statistics.median(ratios),
        "memory_ratio": statistics.median(memory),
        "floor_ratio": statistics.median(floors) if floors else None,
        "repeats": args.repeats,
    }


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("what", choices=sorted(OURS))
    parser.add_argument("model", help="a directory of a causal model")
    parser.add_argument("--peer-python", required=True, help="a Python that has PyTorch and TRL")
    parser.add_argument("--peers", default=SHARED / "bench" / "peers.py", help="the script of the peers")
    parser.add_argument(
        "--prompts", default=HH / "train.jsonl.gz", help="pairs whose first turns are prompts"
    )
    parser.add_argument("--pairs", default=HH / "train.jsonl.gz", help="pairs for the reward model")
    parser.add_argument("--natural", action="store_true", help="natural prompts, stopping at EOS")
    parser.add_argument("--ragged", action="store_true", help=f"generate: a queue of {RAGGED} prompts")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="cores that each side may use")
    args, args.sizes = parser.parse_known_args()  # sizes such as --batch 8 go to both sides
    if hasattr(os, "sched_setaffinity"):  # XLA takes as many threads as it may use cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    machine.report(lambda: compared(args))


if __name__ == "__main__":
    main()

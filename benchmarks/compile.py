"""Seconds to compile a policy's forward and backward pass: layers scanned or one by one, cache cold or warm.

    python benchmarks/compile.py                   30 layers of SmolLM2-135M's widths, compiled and run
    python benchmarks/compile.py --layers 4 30 60

Each figure is of a process of its own, from shapes alone: tracing and lowering, then XLA's part, which the
persistent cache saves. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import machine
from compare import run_json

from rlhf_jax.losses import masked_mean
from rlhf_jax.models import Transformer, TransformerConfig, unstack_layers
from rlhf_jax.models.parameters import shapes
from rlhf_jax.rollout.score import response_logprobs
from rlhf_jax.types import Rollout

KINDS = ("scanned", "unrolled")
B, P, T = 16, 64, 64


def loss_and_arguments(args: argparse.Namespace) -> tuple[Any, Any, Rollout]:
    """(mean log-probability of the responses, parameters' shapes, a rollout of ones)."""
    config = TransformerConfig(
        vocab_size=args.vocab,
        layers=args.layers[-1],
        embed=args.embed,
        heads=args.embed // 64,
        kv_heads=1,
        head_dim=64,
        mlp=args.embed * 8 // 3,
        max_positions=2048,
    )
    stacked = Transformer(config, remat="products")
    model = stacked.clone(scan_layers=args.once == "scanned")
    params = shapes(stacked)
    if args.once == "unrolled":
        params = jax.eval_shape(unstack_layers, params)
    ones = jnp.ones((B, P + T), jnp.int32)
    rollout = Rollout(ones, ones.astype(bool), jnp.ones((B, T), bool), jnp.zeros((B, T)), jnp.zeros(B, bool))

    def loss(params, rollout):
        logprobs_BT, _ = response_logprobs(model, params, rollout, temperature=1.0)
        return masked_mean(logprobs_BT, rollout.mask_BT)

    return loss, params, rollout


def once(args: argparse.Namespace) -> dict[str, Any]:
    """What a child measures: one compilation, and the program's seconds."""
    jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()  # the first one of a process starts the backend
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", args.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # or what is quick is not kept
    loss, shapes_of_params, rollout = loss_and_arguments(args)
    start = time.perf_counter()
    lowered = jax.jit(jax.value_and_grad(loss)).lower(shapes_of_params, rollout)
    traced = time.perf_counter()
    program = lowered.compile()
    done = time.perf_counter()
    result = {"trace_s": traced - start, "compile_s": done - traced}
    if args.cache:
        result["kept"] = len(list(pathlib.Path(args.cache).glob("*-cache")))
    if args.run:
        params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.02, leaf.dtype), shapes_of_params)
        result["run_s"] = machine.timed(program, params, rollout, repeats=3).best
    return result


def start_s(figures: dict[str, float]) -> float:
    """All that a program takes before it can run."""
    return figures["trace_s"] + figures["compile_s"]


def child(kind: str, layers: int, args: argparse.Namespace, *, run: bool = False, cache: str = "") -> Any:
    sizes = ["--layers", layers, "--embed", args.embed, "--vocab", args.vocab, "--cache", cache]
    return run_json([sys.executable, __file__, "--once", kind, *sizes, *(["--run"] if run else [])])


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    deepest = max(args.layers)
    with tempfile.TemporaryDirectory() as cache:
        found = {
            kind: {str(n): child(kind, n, args, run=n == deepest) for n in args.layers} for kind in KINDS
        }
        cold, warm = (child("scanned", deepest, args, cache=cache) for _ in range(2))
    scanned, unrolled = (found[kind][str(deepest)] for kind in KINDS)
    return {
        **machine.description(),
        "benchmark": "compile",
        "layers": args.layers,
        **found,
        "unrolled_over_scanned": start_s(unrolled) / start_s(scanned),
        "run_unrolled_over_scanned": unrolled["run_s"] / scanned["run_s"],
        "kept_programs": {"cold": cold["kept"], "warm": warm["kept"]},
        "warm_over_cold": start_s(warm) / start_s(cold),
    }


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 30], help="numbers of layers")
    parser.add_argument("--embed", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--once", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    machine.report(lambda: once(args) if args.once else benchmark(args))


if __name__ == "__main__":
    main()

"""Pairs/s of reward-model training: forward, backward and optimizer, on preference pairs as they come.

    python benchmarks/reward_step.py MODEL_DIR --pairs FILE [--batch 8 --length 256 --updates 6]

Each side of a pair is its whole text and an EOS; a pair with a side longer than --length is left out, as
TRL's RewardTrainer does, so that both compute the same tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import time
from typing import Any

import jax
import machine
import numpy as np

from rlhf_jax.data.batches import batch_indices
from rlhf_jax.data.packing import row_width
from rlhf_jax.data.sources import source_rows
from rlhf_jax.errors import InputError
from rlhf_jax.models.flops import forward_flops
from rlhf_jax.settings import Config, Layout, Placement, Policy, Reward
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.sharding.rules import in_view
from rlhf_jax.trainers.optimizer import (
    init_state,
    make_optimizer,
    make_schedule,
    state_shardings,
    update_step,
)
from rlhf_jax.trainers.reward import RenderedPair, longest_side, pair_batch, reward_loss
from rlhf_jax.trainers.roles import POLICY, LoadedModel, load_backbone, load_language_model, shardings_of
from rlhf_jax.trainers.timing import CompileClock

ROWS_AN_UPDATE = 3  # rows read, in batches, so that enough are left without those that are too long


def read_pairs(file: str, tokenizer: Any, batch: int, updates: int, longest: int) -> list[RenderedPair]:
    """The pairs of the first rows of which both sides fit."""
    rows = [row for _, row in source_rows(file, limit=ROWS_AN_UPDATE * batch * updates)]
    sides = [
        [tokenizer.encode(row[side] + tokenizer.eos_token) for side in ("chosen", "rejected")] for row in rows
    ]
    pairs = [RenderedPair(*pair) for pair in sides if max(map(len, pair)) <= longest]
    if len(pairs) < batch:
        raise InputError(
            f"{len(pairs)} of {len(rows)} pairs have at most {longest} tokens; use a larger --length"
        )
    return pairs


def make_step(start: LoadedModel, settings: Reward, view: Any) -> tuple[Any, Any]:
    """(step, first state): the update of `rlhf-jax reward`, without its evaluations and checkpoints."""
    tx = make_optimizer(
        make_schedule(settings.learning_rate, steps=1, warmup_steps=0, schedule="constant"),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
    )
    places = state_shardings(tx, start.shapes, shardings_of(start.model, start.shapes, view), view)

    def step(state, batch):
        loss = functools.partial(reward_loss, model=start.model, settings=settings, denominator=batch.count)
        return update_step(tx, loss, state, batch, micro_batch_size=view.batch_shards)

    step = in_view(view, step, donate_argnums=0, out_shardings=(places, None))
    return step, init_state(tx, start.place(view), places)


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    layout = Layout(**dict(zip(("data", "fsdp", "tensor"), map(int, args.mesh.split(",")), strict=True)))
    settings = Reward(
        model=POLICY,
        dtype=args.dtype,
        batch_size=args.batch,
        max_length=args.length,
        micro_batch_size=args.micro,
    )
    view, clock = make_views(Config(placement=Placement(train=layout))).reward, CompileClock()
    policy = load_language_model(args.model, Policy(dtype=args.dtype))
    start = load_backbone(settings, policy, seed=1)
    pairs = read_pairs(args.pairs, policy.renderer.tokenizer, args.batch, args.updates, args.length)
    step, state = make_step(start, settings, view)
    groups = view.batch_shards * (args.batch // (args.micro or args.batch))
    width, seconds, lengths = row_width(longest_side(pairs), start.model.config.max_positions), [], []
    for number in range(args.updates):
        began, compiled = time.perf_counter(), clock.seconds
        rows = batch_indices(number, count=len(pairs), batch_size=args.batch, seed=1)
        batch = pair_batch([pairs[i] for i in rows], width, view, groups, packed=True)
        state, metrics = step(state, batch)
        jax.device_get(metrics)
        seconds.append(time.perf_counter() - began - (clock.seconds - compiled))
        lengths.append([len(side) for i in rows for side in (pairs[i].chosen, pairs[i].rejected)])
        print(f"update {number}: {seconds[-1]:.2f} s, {batch.tokens_GRL.size} places", flush=True)
    jax.block_until_ready(state)
    memory = machine.peak_memory()
    limits, timed = machine.limits(args.dtype), slice(1, None) if len(seconds) > 1 else slice(None)
    flops = 3 * sum(forward_flops(start.model.config, sides) for sides in lengths[timed])
    total, floor = sum(seconds[timed]), flops / limits["flops_s"]
    return {
        **machine.description(),
        "benchmark": "reward step",
        "batch": args.batch,
        "length": args.length,
        "dtype": args.dtype,
        "update_s": seconds,
        "compile_s": clock.seconds,
        "pairs_per_s": args.batch * len(seconds[timed]) / total,
        "tokens_a_side": float(np.mean(lengths[timed])),
        "limits": limits,
        "flops": flops,
        "floor_s": floor,
        "floor_ratio": total / floor,
        **memory,
    }


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("model", help="a directory of a causal model")
    parser.add_argument("--pairs", required=True, help="preference pairs as text: chosen and rejected")
    parser.add_argument("--mesh", default="-1,1,1", help="data,fsdp,tensor")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--micro", type=int, help="pairs a forward pass; none: all")
    for name, default in {"batch": 8, "length": 256, "updates": 6}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    machine.report(lambda: benchmark(args))


if __name__ == "__main__":
    main()

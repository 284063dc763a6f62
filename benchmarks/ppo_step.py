"""Seconds, FLOPs and memory of a PPO iteration: generate, score, advantages, update.

    python benchmarks/ppo_step.py MODEL_DIR                                16 x (64 prompt + 64 response)
    python benchmarks/ppo_step.py MODEL_DIR --prompts FILE --response 128  natural prompts, stopping at EOS
    python benchmarks/ppo_step.py new policy.shape.embed=2048 ...          a model of that shape
    python benchmarks/ppo_step.py --tiny                                   host overhead and compilations

Policy, reference, critic and reward model all start from MODEL_DIR, and the iteration is the library's own.
Further settings are `key=value`, as of `rlhf-jax ppo`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import machine
import numpy as np
import products
from ppo_task import TokenPrompts, first_turns, load_model, make_task, mesh_settings, random_prompts
from ppo_work import iteration_work

from rlhf_jax.config import load_config
from rlhf_jax.settings import Config
from rlhf_jax.trainers.ppo import Learner
from rlhf_jax.trainers.ppo_loop import PpoTask, iterate
from rlhf_jax.trainers.timing import CompileClock, PhaseTimer

TINY = ("policy.shape.vocab_size=1024", "policy.shape.layers=4", "policy.shape.embed=128")  # 1 M parameters
TINY_EOS = 32  # every so many ids one ends a response, so that responses have this many tokens on average
WARM_UP = 5  # iterations of the tiny model in which programs may still be compiled


class PhaseProfile(PhaseTimer):
    """A PhaseTimer that notes the processor seconds and the peak of memory, GiB, of each phase as well.

    Processor seconds are those of all threads: on a busy machine they say more than the clock does.
    """

    def __init__(self, clock: CompileClock):
        super().__init__(clock, enabled=True)
        self.peaks: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}

    def __call__(self, phase: str, function: Any, *args: Any) -> Any:
        machine.forget_peak_rss()
        start = time.process_time()
        result = super().__call__(phase, function, *args)
        self.cpu_s[phase] = time.process_time() - start
        self.peaks[phase] = machine.peak_rss_gib()
        return result


class WaitTimer(PhaseTimer):
    """Waits for each phase right after its dispatch and adds up the seconds of waiting alone."""

    def __init__(self, clock: CompileClock):
        super().__init__(clock, enabled=True)
        self.waited = 0.0

    def __call__(self, phase: str, function: Any, *args: Any) -> Any:
        result = function(*args)
        start = time.perf_counter()
        jax.block_until_ready(result)
        self.waited += time.perf_counter() - start
        return result


def one_update(task: PpoTask, learner: Learner, number: int, timer: PhaseTimer) -> tuple[Learner, float, Any]:
    """(learner, seconds without compilation, (prompt lengths, response lengths)) of iteration `number`."""
    start, compiled = time.perf_counter(), timer.clock.seconds
    learner, metrics = iterate(task, learner, number, timer)
    jax.block_until_ready((learner, metrics))
    seconds = time.perf_counter() - start - (timer.clock.seconds - compiled)
    return learner, seconds, jax.device_get((metrics["prompt_length_B"], metrics["length_B"]))


def settings(args: argparse.Namespace) -> Config:
    micro = [] if args.micro is None else [f"ppo.micro_batch_size={args.micro}"]
    return load_config(
        None,
        [
            f"policy.model={args.model}",
            f"policy.dtype={args.dtype}",
            f"ppo.batch_size={args.batch}",
            f"ppo.epochs={args.epochs}",
            f"ppo.iterations={args.updates + 1}",
            f"rollout.prompt_length={args.prompt}",
            f"rollout.response_length={args.response}",
            *mesh_settings(args.mesh),
            *micro,
            *(TINY if args.tiny else ()),
            *args.settings,
        ],
    )


def step_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """`updates` whole iterations, of which the first warms up, and one more that is timed phase by phase."""
    config, clock = settings(args), CompileClock()
    policy = load_model(config)
    count = args.batch * args.updates
    if args.prompts:
        prompts = first_turns(args.prompts, policy.renderer, count, args.prompt)
    else:
        policy = dataclasses.replace(policy, renderer=TokenPrompts(policy.renderer))
        prompts = random_prompts(count, [args.prompt], policy.model.config.vocab_size)
    task, first_learner = make_task(config, policy, prompts)
    learner, seconds, lengths = first_learner(), [], []
    for number in range(args.updates):
        learner, taken, sizes = one_update(task, learner, number, PhaseTimer(clock, enabled=False))
        seconds.append(taken)
        lengths.append(sizes)
        print(f"update {number}: {taken:.2f} s, {int(sizes[1].sum())} response tokens", flush=True)
    memory = machine.peak_memory()
    timer = PhaseProfile(clock)
    *_, sizes = one_update(task, learner, args.updates, timer)
    limits = machine.limits(args.dtype)
    phases = phases_of(timer, iteration_work(task, *sizes), limits)
    alone = {}
    if jax.device_count() == 1 and not config.ppo.packing:  # or products have other shapes
        alone = add_products(phases, task, *(int(lengths_B.max()) for lengths_B in sizes))
    timed = seconds[1:] or seconds
    best = seconds.index(min(timed))
    work = iteration_work(task, *lengths[best])
    ran = [name.removeprefix("timing_s/") for name in timer.seconds]
    floor = sum(work[phase].seconds(limits) for phase in ran)
    return {
        **machine.description(),
        "benchmark": "ppo step",
        "batch": args.batch,
        "prompt": args.prompt,
        "response": args.response,
        "dtype": args.dtype,
        "update_s": seconds,
        "compile_s": clock.seconds,
        "samples_per_s": args.batch / seconds[best],
        "response_tokens": [int(responses.sum()) for _, responses in lengths],
        "limits": limits,
        "flops": sum(work[phase].flops for phase in ran),
        "floor_s": floor,
        "floor_ratio": seconds[best] / floor,
        **alone,
        "phases": phases,
        **utilisation(sum(work[phase].flops for phase in ran) / seconds[best]),
        **memory,
    }


def phases_of(timer: PhaseProfile, work: dict[str, Any], limits: dict[str, float]) -> dict[str, Any]:
    """Seconds of each phase beside its floor, its share of the matrix rate, and its peak of memory."""
    phases = {}
    for phase, peak in timer.peaks.items():
        seconds = timer.seconds[f"timing_s/{phase}"]
        phases[phase] = {
            "seconds": seconds,
            "cpu_s": timer.cpu_s[phase],
            "floor_s": work[phase].seconds(limits),
            "tflop": work[phase].flops / 1e12,
            "rate_fraction": work[phase].flops / seconds / limits["flops_s"],
            "peak_rss_gib": peak,
        }
    return phases


def add_products(phases: dict[str, Any], task: PpoTask, prompt: int, response: int) -> dict[str, float]:
    """To each phase the seconds of its matrix products alone; returns their sum, and all phases over it."""
    for phase, found in products.of_iteration(task, prompt, response).items():
        phases[phase]["products_s"] = products.seconds(found, task.config.policy.dtype)
    total = sum(phase.get("products_s", 0.0) for phase in phases.values())
    return {
        "products_s": total,
        "products_ratio": sum(phase["seconds"] for phase in phases.values()) / total,
    }


def utilisation(rate: float) -> dict[str, float]:
    """Model FLOPs utilisation (MFU) where the chip is listed."""
    peaks = machine.chip_peaks()
    return {} if peaks is None else {"mfu": rate / peaks["flops_s"] / jax.device_count()}


def tiny_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Host overhead and compilations of a model of 1 M parameters on ragged prompts and responses.

    Host overhead: the seconds of an iteration in which the host does not wait for the device, each program
    being waited for as soon as it is dispatched. It is what stays where the device takes no time at all.
    """
    config, clock = settings(args), CompileClock()
    policy = load_model(config)
    vocab_size = policy.model.config.vocab_size
    policy = dataclasses.replace(
        policy, renderer=TokenPrompts(policy.renderer, range(0, vocab_size, TINY_EOS))
    )
    prompts = random_prompts(args.batch * 50, range(4, args.prompt + 1), vocab_size)
    task, first_learner = make_task(config, policy, prompts)
    learner, overheads, waits, compiled = first_learner(), [], [], []
    for number in range(args.updates):
        timer, before = WaitTimer(clock), clock.programs
        learner, seconds, _ = one_update(task, learner, number, timer)
        overheads.append(1e3 * (seconds - timer.waited))
        waits.append(1e3 * timer.waited)
        compiled.append(clock.programs - before)
    warm = min(WARM_UP, args.updates - 1)
    return {
        **machine.description(),
        "benchmark": "ppo step, tiny",
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(policy.shapes)),
        "iterations": args.updates,
        "host_overhead_ms": statistics.median(overheads[warm:]),
        "host_overhead_ms_p90": float(np.quantile(overheads[warm:], 0.9)),
        "device_ms": statistics.median(waits[warm:]),
        "compiled_first": sum(compiled[:warm]),
        "compiled_after": sum(compiled[warm:]),
        **machine.peak_memory(),
    }


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("model", nargs="?", help="a directory, or `new` for a model of policy.shape")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--prompts", help="preference pairs whose first turns are the prompts")
    parser.add_argument("--mesh", default="-1,1,1", help="data,fsdp,tensor of training and generation")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--micro", type=int, help="responses a forward pass; none: all")
    parser.add_argument("--tiny", action="store_true", help="a new model of 1 M parameters, ragged lengths")
    parser.add_argument("--updates", type=int, help="iterations; 3, with --tiny 200")
    for name, default in {"batch": 16, "prompt": 64, "response": 64, "epochs": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_intermixed_args()
    if args.tiny:
        args.settings = [*filter(None, [args.model]), *args.settings]
        args.model = "new"
    elif args.model is None:
        parser.error("give a model directory, `new`, or --tiny")
    args.updates = args.updates or (200 if args.tiny else 3)
    machine.report(lambda: tiny_benchmark(args) if args.tiny else step_benchmark(args))


if __name__ == "__main__":
    main()

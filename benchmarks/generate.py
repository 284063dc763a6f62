"""Tokens/s of generation, at one length or through a queue of ragged ones, beside what the machine could do.

    python benchmarks/generate.py MODEL_DIR                                 16 x (64 prompt + 64 response)
    python benchmarks/generate.py MODEL_DIR --ragged 256 --slots 64         256 prompts of 8 to 128 tokens
    python benchmarks/generate.py MODEL_DIR --prompts FILE --response 128   natural prompts, stopping at EOS
    python benchmarks/generate.py new policy.shape.embed=2048 ...           a model of that shape

Further settings are `key=value`, as of `rlhf-jax ppo`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np
from ppo_task import first_turns, load_model, mesh_settings, random_prompts
from ppo_work import generation_work

from rlhf_jax.checks import check
from rlhf_jax.config import load_config
from rlhf_jax.rollout.continuous import Work, continuous
from rlhf_jax.rollout.decoder import decoder_for
from rlhf_jax.rollout.generate import at_once
from rlhf_jax.rollout.prompt_batch import prompt_batch
from rlhf_jax.rollout.sampling import Sampling
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.sharding.rules import batch_sharding, in_view
from rlhf_jax.trainers.ppo_steps import make_sampler
from rlhf_jax.trainers.timing import CompileClock
from rlhf_jax.types import Prompts, Rollout

SHORTEST, LONGEST = 8, 128  # forced lengths of a ragged queue
RAGGED_SLOTS = 64
PRODUCT_ROUNDS = 8  # how often the products of a step are done in one program


@dataclasses.dataclass(frozen=True)
class Job:
    """A model on its devices, prompts, and the program that generates."""

    config: Any  # of the model
    params: Any
    prompts: Prompts
    limit_B: np.ndarray
    response: int  # the longest
    run: Callable[..., tuple[Rollout, Work | None]]  # (limit_B, key) -> (rollout, how the slots were used)


def forced_lengths(count: int) -> list[int]:
    """Uniform on SHORTEST..LONGEST, the same at every call."""
    pick = random.Random(0)
    return [pick.randint(SHORTEST, LONGEST) for _ in range(count)]


def make_job(args: argparse.Namespace) -> Job:
    rows = args.ragged or args.batch
    response = LONGEST if args.ragged else args.response
    model_of = [f"policy.model={args.model}", f"policy.dtype={args.dtype}", f"rollout.dtype={args.dtype}"]
    config = load_config(None, [*model_of, *mesh_settings(args.mesh), *args.settings])
    check(config, training=False)
    policy, views = load_model(config), make_views(config)
    sampler = make_sampler(policy.model, policy.shapes, views, config.rollout, (), 1, config.lora)
    if args.prompts:
        found = first_turns(args.prompts, policy.renderer, rows, args.prompt)
        prompts = [policy.renderer.prompt(turn, args.prompt) for turn in found]
    else:
        prompts = random_prompts(rows, [args.prompt], policy.model.config.vocab_size)
    eos_ids = policy.renderer.eos_ids if args.prompts else ()
    decoder = decoder_for(policy.model.clone(scan_layers=False))
    sampling = Sampling(
        tuple(eos_ids), config.rollout.temperature, config.rollout.top_k, config.rollout.top_p
    )

    def plain(params, prompts, key, limit_B):
        return at_once(decoder, params, prompts, key, limit_B, sampling, response, samples=1), None

    def queue(params, prompts, key, limit_B):
        slots = -(-args.slots // views.generate.batch_shards)
        return continuous(decoder, params, prompts, key, limit_B, sampling, response, samples=1, slots=slots)

    generate = in_view(views.generate, queue if args.slots < rows else plain)
    params = sampler.reshard(policy.place(views.train))
    batch = prompt_batch(lambda b: list(prompts[b]), np.arange(rows), limit=args.prompt, view=views.generate)
    place = batch_sharding(views.generate)

    def run(limit_B, key):
        return generate(params, batch, key, jax.device_put(limit_B, place))

    limits = forced_lengths(rows) if args.ragged else [response] * rows
    return Job(policy.model.config, params, batch, np.asarray(limits, np.int32), response, run)


def matrix_products(job: Job, rows: int) -> Callable[[], jax.Array]:
    """A program that does the matrix products of PRODUCT_ROUNDS decode steps and nothing else.

    Those with the weights, and those of the queries with the whole cache, which lies in memory as the loop
    has it.
    """
    c = job.config
    leaves = [([k.key for k in path], leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(job.params)]
    kernels = [(leaf, (0, 1) if path[-2] == "o" else (0,)) for path, leaf in leaves if path[-1] == "kernel"]
    if c.tied:
        kernels.append((job.params["embed"]["embedding"], (1,)))
    dtype, K, G = kernels[0][0].dtype, c.kv_heads, c.heads // c.kv_heads
    arrays = [leaf for leaf, _ in kernels]
    inputs = [jnp.ones((rows, *(leaf.shape[axis] for axis in axes)), dtype) for leaf, axes in kernels]
    length = job.prompts.tokens_BP.shape[1] + job.response
    keys_BKES = [jnp.ones((rows, K, c.head_dim, length), dtype) for _ in range(c.layers)]
    values_BKSE = [jnp.ones((rows, K, length, c.head_dim), dtype) for _ in range(c.layers)]
    queries, weights = jnp.ones((rows, K, G, c.head_dim), dtype), jnp.ones((rows, K, G, length), dtype)

    @jax.jit
    def products(arrays, inputs, keys_BKES, values_BKSE, queries, weights):
        def step(_, small):  # added, so that the compiler cannot do a product once for all rounds
            for x, array, (_, axes) in zip(inputs, arrays, kernels, strict=True):
                own = tuple(range(1, x.ndim))
                small += 1e-20 * jax.lax.dot_general(x + small, array, ((own, axes), ((), ()))).ravel()[0]
            for keys, values in zip(keys_BKES, values_BKSE, strict=True):
                small += 1e-20 * jnp.einsum("bkge,bkes->bkgs", queries + small, keys).sum()
                small += 1e-20 * jnp.einsum("bkgs,bkse->bkge", weights + small, values).sum()
            return small

        return jax.lax.fori_loop(0, PRODUCT_ROUNDS, step, jnp.zeros((), dtype))

    return lambda: products(arrays, inputs, keys_BKES, values_BKSE, queries, weights)


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    clock, rows, key = CompileClock(), args.ragged or args.batch, jax.random.key(0)
    job = make_job(args)
    first_token = lambda: job.run(np.ones_like(job.limit_B), key)  # noqa: E731
    compiled = clock.seconds
    jax.block_until_ready(first_token())
    compile_s, memory = clock.seconds - compiled, machine.peak_memory()
    calls: dict[str, Callable[[], Any]] = {"whole": lambda: job.run(job.limit_B, key)}
    if not args.ragged:
        calls["first token"] = first_token
    calls["products"] = matrix_products(job, min(args.slots, rows))
    times = machine.timed_together(calls, args.repeats)
    rollout, work = jax.device_get(job.run(job.limit_B, key))
    whole, tokens = times["whole"], int(rollout.length_B.sum())
    steps = int(rollout.length_B.max()) - 1 if work is None else int(work.steps)
    decoding = whole.best - (times["first token"].best if "first token" in times else 0.0)
    step_ms, products_ms = 1e3 * decoding / steps, 1e3 * times["products"].best / PRODUCT_ROUNDS
    limits, sizes = machine.limits(args.dtype), [leaf.size for leaf in jax.tree.leaves(job.params)]
    floor = generation_work(
        job.config,
        sum(sizes),
        jnp.dtype(args.dtype).itemsize,
        np.asarray(job.prompts.mask_BP).sum(-1),
        rollout.length_B,
        steps=steps,
    )
    return {
        **machine.description(),
        "benchmark": "generate",
        "rows": rows,
        "slots": min(args.slots, rows),
        "dtype": args.dtype,
        "seconds": list(whole.seconds),
        "tokens": tokens,
        "tokens_per_s": tokens / whole.best,
        "tokens_per_s_median": tokens / whole.median,
        "compile_s": compile_s,
        "steps": steps,
        "step_ms": step_ms,
        "products_ms": products_ms,
        "step_ratio": step_ms / products_ms,
        "occupancy": 1.0 if work is None else int(work.busy) / (args.slots * max(int(work.waiting_steps), 1)),
        "floor_s": floor.seconds(limits),
        "floor_ratio": whole.best / floor.seconds(limits),
        "flops_fraction": floor.flops / limits["flops_s"] / whole.best,
        "bytes_fraction": floor.bytes / limits["bytes_s"] / whole.best,
        **memory,
    }


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("model", help="a directory, or `new` for a model of policy.shape")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--prompts", help="preference pairs whose first turns are the prompts")
    parser.add_argument("--ragged", type=int, default=0, help="waiting prompts of forced response lengths")
    parser.add_argument("--slots", type=int, help="rows at once; with --ragged 64, else all")
    parser.add_argument("--mesh", default="-1,1,1", help="data,fsdp,tensor")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, help="timed runs after the first; 3, with --ragged 1")
    for name, default in {"batch": 16, "prompt": 64, "response": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_intermixed_args()
    args.slots = args.slots or (RAGGED_SLOTS if args.ragged else args.batch)
    args.repeats = args.repeats or (1 if args.ragged else 3)
    machine.report(lambda: benchmark(args))


if __name__ == "__main__":
    main()

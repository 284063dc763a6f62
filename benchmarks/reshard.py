"""Moving a policy from the training to the generation layout: bytes, memory and seconds, for pairs of shapes.

    python benchmarks/reshard.py --layers 8

Every pair is measured on virtual CPU devices. Bytes are those of the busiest device; seconds are the least of
some repetitions with fresh parameters, beside those of `jax.device_put` to the same layout. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

AXES = ("data", "fsdp", "tensor")
PAIRS = (  # of 8 devices: nested ones, then some that are not
    ((1, 1, 8), (8, 1, 1)),
    ((1, 1, 8), (4, 1, 2)),
    ((1, 1, 8), (2, 1, 4)),
    ((1, 8, 1), (8, 1, 1)),
    ((2, 1, 4), (4, 1, 2)),
    ((1, 2, 4), (2, 1, 4)),
    ((1, 4, 2), (4, 1, 2)),
    ((2, 2, 2), (4, 1, 2)),
    ((4, 2, 1), (8, 1, 1)),
    ((2, 2, 2), (2, 1, 4)),
    ((1, 8, 1), (4, 1, 2)),
    ((1, 8, 1), (1, 1, 8)),
    ((1, 4, 2), (2, 1, 4)),
    ((8, 1, 1), (1, 1, 8)),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices, a multiple of 8")
    parser.add_argument("--layers", type=int, default=30, help="layers of a model with SmolLM2-135M's widths")
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 8), help="query and key/value heads")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true", help="leave the compile times out")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    pairs = []
    for old, new in PAIRS:
        pairs.append(measure(args, shape(old, args.devices), shape(new, args.devices)))
        print(row(pairs[-1]), flush=True)
    compile_s = {}
    if not args.no_compile:
        compile_seconds(1)  # the first compilation of a process takes longer
        compile_s = {str(layers): compile_seconds(layers) for layers in (4, 32)}
    print(json.dumps({"pairs": pairs, "compile_s": compile_s}))


def shape(sizes: tuple[int, ...], devices: int) -> dict[str, int]:
    """Sizes over 8 devices, with what there is beyond as replicas."""
    data, *rest = sizes
    return dict(zip(AXES, (data * devices // 8, *rest), strict=True))


def model_of(layers: int, heads: tuple[int, int] = (8, 8)):
    """A model with SmolLM2-135M's widths and heads that devices divide; its own 9 and 3 they do not."""
    from rlhf_jax.models import Transformer, TransformerConfig

    config = TransformerConfig(
        vocab_size=49152, layers=layers, embed=576, heads=heads[0], kv_heads=heads[1], head_dim=64,
        mlp=1536, max_positions=2048,
    )  # fmt: skip
    return Transformer(config)


def measure(args: argparse.Namespace, old: dict[str, int], new: dict[str, int]) -> dict:
    import jax

    from rlhf_jax.models import logical_axes, unstack_layers
    from rlhf_jax.models.parameters import shapes
    from rlhf_jax.sharding.mesh import regroup, training_view
    from rlhf_jax.sharding.reshard import make_reshard
    from rlhf_jax.sharding.rules import parameter_shardings

    model = model_of(args.layers, tuple(args.heads))
    params, axes = shapes(model), logical_axes(model)
    train = training_view(old)
    generate = regroup(train, new)
    source, target = (parameter_shardings(view, axes, params) for view in (train, generate))
    naive = parameter_shardings(naive_view(train, new), axes, params)
    unrolled = model.clone(scan_layers=False)
    layers = jax.eval_shape(unstack_layers, params)
    layer_places = parameter_shardings(generate, logical_axes(unrolled), layers)
    reshard = make_reshard(params, source, layer_places, unstack=True)
    stacked = make_reshard(params, source, target)

    zeros = functools.partial(jax.tree.map, lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), params)
    made = jax.jit(zeros, out_shardings=source)

    def fresh():
        return jax.block_until_ready(made())

    peak, largest = measured_peak(reshard, fresh())
    held = bytes_by_device(params, source) + bytes_by_device(params, target)
    return {
        "train": old,
        "generate": new,
        "moved_bytes": routed_bytes(reshard),
        "minimum_bytes": stacked.moved_bytes,
        "naive_bytes": make_reshard(params, source, naive).moved_bytes,
        "peak_bytes": peak,
        "bound_bytes": held + largest,
        "seconds": seconds(reshard, fresh, args.repeats),
        "device_put_seconds": seconds(lambda tree: jax.device_put(tree, target), fresh, args.repeats),
    }


def naive_view(train, new: dict[str, int]):
    """The same shape over the same grid with its axes in the plain order: HybridFlow's baseline.

    Generation groups are of neighbouring devices, as in training: tensor takes the last axes.
    """
    from rlhf_jax.sharding.mesh import View

    rest, groups = list(train.mesh.axis_names), {}
    for axis in reversed(AXES):
        groups[axis] = []
        while math.prod(train.mesh.shape[name] for name in groups[axis]) < new[axis]:
            groups[axis].insert(0, rest.pop())
    return View(train.mesh, **{axis: tuple(names) for axis, names in groups.items()})


def routed_bytes(reshard) -> int:
    """Bytes that each device receives by the collectives of the routes that are taken."""
    from rlhf_jax.sharding.route import dim_axes, plan_route, received_elements

    total = 0
    for move in reshard.moves:
        count, part = (move.leaf.shape[0], move.leaf.shape[1:]) if move.unstack else (1, move.leaf.shape)
        held = dim_axes(move.part, len(part))
        steps = plan_route(held, dim_axes(move.target, len(part)))
        elements = received_elements(steps, held, part, move.source.mesh.shape)
        total += count * elements * move.dtype.itemsize
    return total


def live_by_device() -> dict[int, int]:
    """Bytes of all live buffers, each counted once, by device."""
    import jax

    buffers = {
        (shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
    }
    held = {}
    for (device, _), size in buffers.items():
        held[device] = held.get(device, 0) + size
    return held


def measured_peak(reshard, params) -> tuple[int, int]:
    """(peak of live buffers and a group's temporaries on the fullest device, bytes of the largest group)."""
    import jax

    temporary = {}
    for move in set(reshard.moves):
        lowered = move.lowered()
        memory = lowered and lowered.compile().memory_analysis()
        temporary[move] = memory.temp_size_in_bytes if memory else 0
    peak, largest, groups = 0, 0, []
    for move, group in zip(reshard.moves, reshard.groups(params), strict=True):
        before = max(live_by_device().values())
        groups.append(jax.block_until_ready(group))
        after = max(live_by_device().values())
        peak = max(peak, before, after + temporary[move])
        size = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(group))
        largest = max(largest, size)
    return peak, largest


def bytes_by_device(params, places) -> int:
    import jax

    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(places), strict=True)
    return sum(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, place in pairs)


def seconds(move, fresh, repeats: int) -> float:
    """The least time of a move of parameters that have not moved before: arrays keep a host copy."""
    import jax

    times = []
    for _ in range(repeats + 1):
        params = fresh()
        start = time.perf_counter()
        moved = jax.block_until_ready(move(params))
        times.append(time.perf_counter() - start)
        del params, moved
    return min(times[1:])


def compile_seconds(layers: int) -> float:
    """Seconds to compile the actor's update: layers are scanned, so that their number should not matter."""
    import jax

    from rlhf_jax.config import load_config
    from rlhf_jax.models import Transformer, TransformerConfig
    from rlhf_jax.models.parameters import shapes
    from rlhf_jax.sharding.placement import make_views, placed_shapes
    from rlhf_jax.sharding.rules import batch_sharding, replicated
    from rlhf_jax.trainers.ppo import Experience
    from rlhf_jax.trainers.ppo_steps import make_policy_steps, make_ppo_steps
    from rlhf_jax.types import Rollout

    B, P, T = 16, 32, 32
    settings = [f"ppo.batch_size={B}", "placement.train.fsdp=2", "placement.train.tensor=2"]
    config = load_config(None, settings)
    views = make_views(config)
    shape = TransformerConfig(
        vocab_size=512, layers=layers, embed=128, heads=4, kv_heads=4, head_dim=32, mlp=384, max_positions=128
    )
    actor, critic = Transformer(shape), Transformer(shape, head="value")
    policy = make_policy_steps(config, views, actor, shapes(actor), eos_ids=(3,))
    steps = make_ppo_steps(config, policy, critic, shapes(critic))
    of = lambda *sizes, dtype="float32": jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    rollout = Rollout(
        tokens_BS=of(B, P + T, dtype="int32"),
        mask_BS=of(B, P + T, dtype=bool),
        mask_BT=of(B, T, dtype=bool),
        logprobs_BT=of(B, T),
        truncated_B=of(B, dtype=bool),
    )
    rows = {field.name: of(B, T) for field in dataclasses.fields(Experience) if field.name != "rollout"}
    experience = placed_shapes(Experience(rollout=rollout, **rows), batch_sharding(views.train))
    everywhere = replicated(views.train)
    kl_coef = placed_shapes(of(), everywhere)
    key = placed_shapes(jax.eval_shape(lambda: jax.random.key(0)), everywhere)
    lowered = steps.update_actor.lower(steps.actor_state, experience, kl_coef, key)
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start


def row(pair: dict) -> str:
    """A line of the table in benchmarks/README.md."""
    name = lambda shape: " x ".join(map(str, shape.values()))  # noqa: E731
    least = pair["minimum_bytes"]
    ratio = f"{pair['moved_bytes'] / least:.2f}" if least else "-"
    naive = f"{pair['naive_bytes'] / least:.2f}" if least else "-"
    return (
        f"| {name(pair['train'])} | {name(pair['generate'])} | {least / 2**20:.1f} | {ratio} | {naive} "
        f"| {pair['peak_bytes'] / pair['bound_bytes']:.2f} | {pair['seconds']:.2f} "
        f"| {pair['device_put_seconds']:.2f} |"
    )


if __name__ == "__main__":
    main()

"""How one array gets from one partition of a grid to another: an explicit list of collectives.

The compiler's own partitioner falls back to gathering the whole array where two layouts are not nested
("involuntary full rematerialization"). A route never does for the layouts of `mesh.regroup`, and what each
device receives along it is the least possible: its new shard less what it already holds of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import NamedSharding

Axes = tuple[str, ...]  # grid axes that shard one dimension, the major one first


@dataclasses.dataclass(frozen=True)
class Slice:
    """Each device keeps its part of a dimension along an axis on which it had the whole. Nothing moves."""

    dim: int
    axis: str


@dataclasses.dataclass(frozen=True)
class Exchange:
    """All-to-all: the minor axes of one dimension become those of another."""

    out_of: int
    into: int
    axes: Axes  # as they shard `out_of`
    order: Axes  # the same axes, as they shard `into`


@dataclasses.dataclass(frozen=True)
class Gather:
    """All-gather of the minor axes of dimensions."""

    axes: tuple[Axes, ...]  # by dimension


Step = Slice | Exchange | Gather


def dim_axes(sharding: NamedSharding, ndim: int) -> tuple[Axes, ...]:
    """The grid axes of each dimension."""
    entries = [*sharding.spec, *[None] * (ndim - len(sharding.spec))]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def plan_route(source: Sequence[Axes], target: Sequence[Axes]) -> tuple[Step, ...]:
    """The steps from one partition to another: what is free first, then what keeps shards small.

    Where axes change their order within a dimension, or two dimensions swap axes, a dimension is gathered and
    sliced again.
    """
    now, steps = list(source), []
    while now != list(target):
        found = _slice(now, target) or _exchange(now, target) or _gather(now, target)
        steps.append(found)
        if isinstance(found, Slice):
            now[found.dim] += (found.axis,)
        elif isinstance(found, Exchange):
            now[found.out_of] = now[found.out_of][: -len(found.axes)]
            now[found.into] += found.order
        else:
            now = [held[: len(held) - len(axes)] for held, axes in zip(now, found.axes, strict=True)]
    return tuple(steps)


def _surplus(held: Axes, wanted: Axes) -> Axes:
    """The axes of a dimension behind those that it begins and ends with."""
    kept = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(held, wanted, strict=False))
    return held[len(list(kept)) :]


def _lacking(held: Axes, wanted: Axes) -> Axes:
    """The axes that a dimension still needs; none as long as it has a surplus."""
    return () if _surplus(held, wanted) else wanted[len(held) :]


def _slice(now: Sequence[Axes], target: Sequence[Axes]) -> Slice | None:
    used = {axis for axes in now for axis in axes}
    for dim, (held, wanted) in enumerate(zip(now, target, strict=True)):
        lacking = _lacking(held, wanted)
        if lacking and lacking[0] not in used:
            return Slice(dim, lacking[0])
    return None


def _exchange(now: Sequence[Axes], target: Sequence[Axes]) -> Exchange | None:
    surplus = [_surplus(held, wanted) for held, wanted in zip(now, target, strict=True)]
    lacking = [_lacking(held, wanted) for held, wanted in zip(now, target, strict=True)]
    for out_of, into in itertools.permutations(range(len(now)), 2):
        for count in range(min(len(surplus[out_of]), len(lacking[into])), 0, -1):
            axes, order = surplus[out_of][-count:], lacking[into][:count]
            if set(axes) == set(order):
                return Exchange(out_of, into, axes, order)
    return None


def _gather(now: Sequence[Axes], target: Sequence[Axes]) -> Gather:
    wanted = {axis for axes in target for axis in axes}
    surplus = [_surplus(held, goal) for held, goal in zip(now, target, strict=True)]
    unwanted = [
        tuple(itertools.takewhile(lambda axis: axis not in wanted, reversed(axes)))[::-1] for axes in surplus
    ]
    if not any(unwanted):
        first = next(dim for dim, axes in enumerate(surplus) if axes)
        unwanted = [axes if dim == first else () for dim, axes in enumerate(surplus)]
    return Gather(tuple(unwanted))


def received_elements(
    steps: Sequence[Step],
    source: Sequence[Axes],
    shape: Sequence[int],
    mesh_shape: Mapping[str, int],
) -> int:
    """Elements that each device receives along a route, the same number on every device."""
    held = math.prod(shape) // _size(mesh_shape, itertools.chain.from_iterable(source))
    received = 0
    for step in steps:
        if isinstance(step, Slice):
            held //= mesh_shape[step.axis]
        elif isinstance(step, Exchange):
            received += held - held // _size(mesh_shape, step.axes)
        else:
            whole = held * _size(mesh_shape, itertools.chain.from_iterable(step.axes))
            received, held = received + whole - held, whole
    return received


def follow(x: jax.Array, steps: Sequence[Step], mesh_shape: Mapping[str, int]) -> jax.Array:
    """Takes a device's shard along a route; call it inside `jax.shard_map`."""
    for step in steps:
        if isinstance(step, Slice):
            size = x.shape[step.dim] // mesh_shape[step.axis]
            start = jax.lax.axis_index(step.axis) * size
            x = jax.lax.dynamic_slice_in_dim(x, start, size, step.dim)
        elif isinstance(step, Exchange):
            x = _follow_exchange(x, step, mesh_shape)
        else:
            x = _follow_gather(x, step, mesh_shape)
    return x


def _follow_gather(x: jax.Array, step: Gather, mesh_shape: Mapping[str, int]) -> jax.Array:
    """Parts come stacked in front of the array and are put in place here: much the faster on the CPU."""
    counts = [_size(mesh_shape, axes) for axes in step.axes]
    parts = jax.lax.all_gather(x, tuple(itertools.chain.from_iterable(step.axes)))
    parts = parts.reshape(*counts, *x.shape)
    order = [i for dim in range(x.ndim) for i in (dim, x.ndim + dim)]
    return parts.transpose(order).reshape([n * size for n, size in zip(counts, x.shape, strict=True)])


def _follow_exchange(x: jax.Array, step: Exchange, mesh_shape: Mapping[str, int]) -> jax.Array:
    """The parts of `into` are put in the order in which `axes` number the devices, then exchanged."""
    sizes = [mesh_shape[axis] for axis in step.order]
    count, into, out_of = math.prod(sizes), step.into, step.out_of
    split = x.reshape(*x.shape[:into], *sizes, x.shape[into] // count, *x.shape[into + 1 :])
    front = [into + step.order.index(axis) for axis in step.axes]
    rest = [i for i in range(split.ndim) if i not in front]
    parts = split.transpose(front + rest)
    parts = parts.reshape(count, *parts.shape[len(sizes) :])
    parts = jax.lax.all_to_all(parts, step.axes, 0, 0, tiled=True)
    shape = list(parts.shape[1:])
    shape[out_of] *= count
    order = [*range(1, out_of + 1), 0, *range(out_of + 1, parts.ndim)]
    return parts.transpose(order).reshape(shape)


def _size(mesh_shape: Mapping[str, int], axes) -> int:
    return math.prod(mesh_shape[axis] for axis in axes)

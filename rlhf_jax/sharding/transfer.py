"""Copies between two sets of devices, shard by shard and without a stop on the host.

`jax.device_put` between different sets gathers the array on the host, and waits for it, wherever the two
partitions differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax.sharding.route import Axes, dim_axes

Ranges = tuple[tuple[int, int], ...]  # (start, stop) by dimension


def ranges(index: tuple[slice, ...], shape: Sequence[int]) -> Ranges:
    """The index of a shard in numbers."""
    return tuple(
        (cut.start or 0, size if cut.stop is None else cut.stop)
        for cut, size in zip(index, shape, strict=True)
    )


def containing(source: NamedSharding, target: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """A partition over the source's devices each of whose parts is one or several whole parts of the target.

    Like `mesh.regroup` it keeps of the source's axes what fits, then takes those on which devices have the
    whole, then those that other dimensions give up.
    """
    mesh, held = source.mesh, dim_axes(source, len(shape))
    indices = [ranges(index, shape) for index in target.devices_indices_map(tuple(shape)).values()]
    left = [len({index[dim] for index in indices}) for dim in range(len(shape))]

    def fits(dim: int, axis: str) -> bool:
        if left[dim] % mesh.shape[axis]:
            return False
        left[dim] //= mesh.shape[axis]
        return True

    kept = [tuple(itertools.takewhile(lambda a, d=dim: fits(d, a), axes)) for dim, axes in enumerate(held)]
    spare = [a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in itertools.chain(*held)]
    spare += [a for axes, some in zip(held, kept, strict=True) for a in reversed(axes[len(some) :])]
    found: list[Axes] = []
    for dim, axes in enumerate(kept):
        more = tuple(axis for axis in spare if fits(dim, axis))
        spare = [axis for axis in spare if axis not in more]
        found.append(axes + more)
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in found)))


def across(x: jax.Array, target: NamedSharding) -> jax.Array:
    """A copy of `x` on other devices; each part of the target lies whole in one shard of `x`.

    Devices that hold the same part take turns in sending it.
    """
    shape = x.shape
    shards = [(ranges(shard.index, shape), shard.data) for shard in x.addressable_shards]
    sent = [0] * len(shards)
    pieces, devices = [], []
    for device, index in target.addressable_devices_indices_map(shape).items():
        wanted = ranges(index or (), shape)
        holders = [i for i, (held, _) in enumerate(shards) if _within(wanted, held)]
        sender = min(holders, key=sent.__getitem__)
        sent[sender] += 1
        held, data = shards[sender]
        pieces.append(data if held == wanted else _part(data, *_cut(wanted, held)))
        devices.append(device)
    return jax.make_array_from_single_device_arrays(shape, target, jax.device_put(pieces, devices))


def _within(wanted: Ranges, held: Ranges) -> bool:
    return all(a <= b and c <= d for (a, d), (b, c) in zip(held, wanted, strict=True))


def _cut(wanted: Ranges, held: Ranges) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(starts, stops) of a part within the shard that holds it."""
    starts = tuple(start - origin for (start, _), (origin, _) in zip(wanted, held, strict=True))
    return starts, tuple(stop - origin for (_, stop), (origin, _) in zip(wanted, held, strict=True))


# Jitted with its bounds: an eager slice sends them to the device as arrays.
_part = jax.jit(jax.lax.slice, static_argnums=(1, 2))

"""Moving parameters from one layout to another, and counting what has to move."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Sharding


def make_reshard(shardings: Any, transform: Callable[[Any], Any] = lambda tree: tree) -> Callable[[Any], Any]:
    """A jitted function that moves a tree to the shardings of its transform; the source stays alive."""
    return jax.jit(transform, out_shardings=shardings)


def _ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [
        (cut.start or 0, size if cut.stop is None else cut.stop)
        for cut, size in zip(index, shape, strict=True)
    ]


def _moved(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> dict[Any, int]:
    """Elements of its target shard that each device does not hold in its source shard."""
    have, want = source.devices_indices_map(shape), target.devices_indices_map(shape)
    moved = {}
    for device, index in want.items():
        wanted = _ranges(index, shape)
        held = _ranges(have[device], shape) if device in have else [(0, 0)] * len(shape)
        overlap = math.prod(
            max(0, min(a1, b1) - max(a0, b0)) for (a0, a1), (b0, b1) in zip(wanted, held, strict=True)
        )
        moved[device] = math.prod(stop - start for start, stop in wanted) - overlap
    return moved


def moved_elements(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> int:
    """Elements of its target shard that the worst device does not hold in its source shard."""
    return max(_moved(source, target, shape).values())


def moved_bytes(tree: Any, source: Any, target: Any) -> int:
    """Bytes that the busiest device receives when `tree` goes from its source to its target shardings."""
    received = collections.Counter()
    for leaf, a, b in zip(*map(jax.tree.leaves, (tree, source, target)), strict=True):
        for device, elements in _moved(a, b, leaf.shape).items():
            received[device] += elements * leaf.dtype.itemsize
    return max(received.values(), default=0)

"""Moving parameters from one layout to another, and counting what has to move."""

from __future__ import annotations

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


def moved_elements(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> int:
    """Elements of its target shard that the worst device does not hold in its source shard."""
    worst = 0
    have, want = source.devices_indices_map(shape), target.devices_indices_map(shape)
    for device, index in want.items():
        wanted = _ranges(index, shape)
        held = _ranges(have[device], shape) if device in have else [(0, 0)] * len(shape)
        overlap = math.prod(
            max(0, min(a1, b1) - max(a0, b0)) for (a0, a1), (b0, b1) in zip(wanted, held, strict=True)
        )
        worst = max(worst, math.prod(stop - start for start, stop in wanted) - overlap)
    return worst


def moved_bytes(tree: Any, source: Any, target: Any) -> int:
    """Bytes that the busiest device receives when `tree` goes from its source to its target shardings."""
    return sum(
        moved_elements(a, b, leaf.shape) * leaf.dtype.itemsize
        for leaf, a, b in zip(
            jax.tree.leaves(tree), jax.tree.leaves(source), jax.tree.leaves(target), strict=True
        )
    )

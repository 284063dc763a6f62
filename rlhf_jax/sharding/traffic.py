"""What has to move between two layouts of an array, counted from who holds which part."""

from __future__ import annotations

import math
from typing import Any

from jax.sharding import Sharding

from rlhf_jax.sharding.transfer import ranges


def moved(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> dict[Any, int]:
    """Elements of its target shard that each device of the target does not hold in its source shard."""
    have, want = source.devices_indices_map(shape), target.devices_indices_map(shape)
    missing = {}
    for device, index in want.items():
        wanted = ranges(index, shape)
        missing[device] = math.prod(stop - start for start, stop in wanted)
        if device in have:
            held = ranges(have[device], shape)
            missing[device] -= math.prod(
                max(0, min(a1, b1) - max(a0, b0)) for (a0, a1), (b0, b1) in zip(wanted, held, strict=True)
            )
    return missing

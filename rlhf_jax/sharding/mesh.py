"""One grid of devices, and each role's view of it.

The grid is a single `jax.sharding.Mesh` whose axes are prime factors, for instance 2 x 2 x 2. A role groups
these small axes into `data`, `fsdp` and `tensor`. The training layout and the generation layout of the
actor are then two groupings of the same grid, and moving between them is a plain `jit` (HybridFlow's
regrouping, https://arxiv.org/abs/2409.19256, section 5).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

ROLE_AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class View:
    """How one role reads the grid: which grid axes make up its data, fsdp and tensor axis."""

    mesh: Mesh | AbstractMesh
    data: tuple[str, ...]
    fsdp: tuple[str, ...]
    tensor: tuple[str, ...]

    def grid_axes(self, role_axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for role_axis in role_axes for axis in getattr(self, role_axis))

    def size(self, *role_axes: str) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.grid_axes(role_axes))

    @property
    def batch_shards(self) -> int:
        """Over how many groups of devices the rows of a batch are split: batch sizes are multiples of it."""
        return self.size("data", "fsdp")

    @property
    def shape(self) -> dict[str, int]:
        return {axis: self.size(axis) for axis in ROLE_AXES}


def prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def training_view(shape: Mapping[str, int], devices: Sequence[Any] | None = None) -> View:
    """The grid, factored along the training shape, and the training role's view of it.

    `tensor` takes the last axes, hence neighbouring devices, and `data` the first.

    Args:
      shape: sizes of data, fsdp and tensor, whose product is the number of devices.
      devices: of `jax.devices()`; none: all of them.
    """
    devices = jax.devices() if devices is None else devices
    factors = {axis: prime_factors(shape[axis]) for axis in ROLE_AXES}
    sizes = [size for axis in ROLE_AXES for size in factors[axis]] or [1]
    names = [f"grid{i}" for i in range(len(sizes))]
    mesh = Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
    if len(devices) == 1:
        return View(mesh, ("grid0",), (), ())
    rest = iter(names)
    return View(mesh, **{axis: tuple(next(rest) for _ in factors[axis]) for axis in ROLE_AXES})


def abstract_view(shape: Mapping[str, int]) -> View:
    """A view without devices, for questions about sizes alone."""
    mesh = AbstractMesh(tuple(shape[axis] for axis in ROLE_AXES), ROLE_AXES)
    return View(mesh, *((axis,) for axis in ROLE_AXES))


def regroup(view: View, shape: Mapping[str, int]) -> View:
    """Another shape over the same grid, chosen so that each device keeps as much of a parameter as it can.

    The new tensor and fsdp axes first keep the major axes of the old ones, as many as fit: then a device's
    shard of the larger axis is a part of its shard of the smaller. What they still lack comes from data,
    where every device has the whole, then from the minor axes that the other one gives up.
    """
    free = [axis for axis in view.mesh.axis_names if view.mesh.shape[axis] > 1]
    missing = dict(shape)

    def take(role_axis: str, candidates: Sequence[str]) -> tuple[str, ...]:
        taken = []
        for axis in candidates:
            if axis in free and missing[role_axis] % view.mesh.shape[axis] == 0:
                missing[role_axis] //= view.mesh.shape[axis]
                free.remove(axis)
                taken.append(axis)
        return tuple(taken)

    tensor, fsdp = take("tensor", view.tensor), take("fsdp", view.fsdp)
    others = [*view.data, *reversed(view.fsdp), *reversed(view.tensor)]
    tensor += take("tensor", others)
    fsdp += take("fsdp", others)
    data = tuple(axis for axis in view.mesh.axis_names if axis not in tensor + fsdp)
    return View(view.mesh, data, fsdp, tensor)

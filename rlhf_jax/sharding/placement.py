"""From the settings to a view of the grid for each role."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from rlhf_jax.checks import layouts, resolve
from rlhf_jax.errors import InputError
from rlhf_jax.settings import Config
from rlhf_jax.sharding.mesh import View, regroup, training_view


@dataclasses.dataclass(frozen=True)
class Views:
    """Each role's view of one grid of devices."""

    train: View
    generate: View
    critic: View
    reference: View
    reward: View


def make_views(config: Config, devices: Sequence[Any] | None = None) -> Views:
    """Views of the given devices of `jax.devices()`, or of all.

    Raises:
      InputError: a layout does not cover the devices.
    """
    devices = jax.devices() if devices is None else devices
    shapes = {
        role: dataclasses.asdict(resolve(role, layout, len(devices)))
        for role, layout in layouts(config).items()
    }
    for role, shape in shapes.items():
        covered = math.prod(shape.values())
        if covered != len(devices):
            raise InputError(
                f"placement.{role} covers {covered} of {len(devices)} devices; set one of its sizes to -1"
            )
    train = training_view(shapes["train"], devices)
    views = {
        role: train if shape == shapes["train"] else regroup(train, shape) for role, shape in shapes.items()
    }
    return Views(**views)


def placed_shapes(shapes: Any, shardings: Any) -> Any:
    """ShapeDtypeStructs that know where their arrays would lie: what a program is compiled from without them.

    Args:
      shapes: tree of arrays or ShapeDtypeStructs.   shardings: the same tree of shardings, or one for all.
    """

    def placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(lambda leaf: placed(leaf, shardings), shapes)
    return jax.tree.map(placed, shapes, shardings)

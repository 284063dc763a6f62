"""From the settings to a view of the grid for each role."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from rlhf_jax.layouts import shares
from rlhf_jax.settings import Config
from rlhf_jax.sharding.mesh import View, regroup, training_view


@dataclasses.dataclass(frozen=True)
class Views:
    """Each role's view of its grid: one grid for each set of devices."""

    train: View
    generate: View
    critic: View
    reference: View
    reward: View


def make_views(config: Config, devices: Sequence[Any] | None = None) -> Views:
    """Views of the given devices of `jax.devices()`, or of all; a role's slice counts among these.

    Roles on the same slice share its grid, which is factored along the first one's shape.

    Raises:
      InputError: a layout does not cover its devices, or slices overlap.
    """
    devices = jax.devices() if devices is None else devices
    grids: dict[range, View] = {}
    views = {}
    for role, share in shares(config, len(devices)).items():
        own = [devices[i] for i in share.devices]
        first = grids.setdefault(share.devices, training_view(share.shape, own))
        views[role] = first if share.shape == first.shape else regroup(first, share.shape)
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

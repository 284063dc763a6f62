"""From the settings to a view of the grid for each role."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from rlhf_jax.settings import Layout, Placement
from rlhf_jax.sharding.mesh import View, regroup, training_view


@dataclasses.dataclass(frozen=True)
class Views:
    """Each role's view of one grid of devices."""

    train: View
    generate: View
    critic: View
    reference: View
    reward: View


def make_views(placement: Placement, devices: Sequence[jax.Device] | None = None) -> Views:
    """Views of the given devices, or of all.

    Raises:
      InputError: a shape does not cover the devices.
    """
    train = training_view(dataclasses.asdict(placement.train), devices)

    def view(layout: Layout | None, role: str) -> View:
        same = layout is None or layout == placement.train
        return train if same else regroup(train, dataclasses.asdict(layout), role)

    return Views(
        train=train,
        generate=view(placement.generate, "generate"),
        critic=view(placement.critic, "critic"),
        reference=view(placement.reference, "reference"),
        reward=view(placement.reward, "reward"),
    )

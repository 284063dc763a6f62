"""Which devices each role has and how it splits them, from the settings and the number of devices alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

from rlhf_jax.errors import InputError
from rlhf_jax.settings import Config, Layout

AXES = tuple(field.name for field in dataclasses.fields(Layout) if field.name != "devices")


@dataclasses.dataclass(frozen=True)
class Share:
    """What one role has of the devices."""

    devices: range  # positions in jax.devices()
    layout: Layout  # without -1; its sizes cover the devices

    @property
    def shape(self) -> dict[str, int]:
        return sizes_of(self.layout)


def layouts(config: Config) -> dict[str, Layout]:
    """The layout of each role; a role without one of its own has the trainer's."""
    placement = config.placement
    return {
        "train": placement.train,
        "generate": placement.generate,
        "critic": placement.critic or placement.train,
        "reference": placement.reference or placement.train,
        "reward": placement.reward or placement.train,
    }


def sizes_of(layout: Layout) -> dict[str, int]:
    return {axis: getattr(layout, axis) for axis in AXES}


def splits_parameters(config: Config) -> bool:
    """True where a role has more than replicas, each with the whole parameters."""
    return any(getattr(layout, axis) > 1 for layout in layouts(config).values() for axis in AXES[1:])


def shares(config: Config, device_count: int) -> dict[str, Share]:
    """What each role has of this many devices.

    Raises:
      InputError: a slice goes beyond the devices or overlaps another role's, or sizes do not cover it.
    """
    found = {}
    for role, layout in layouts(config).items():
        devices = positions(role, layout, device_count)
        resolved = resolve(role, layout, len(devices))
        covered = math.prod(sizes_of(resolved).values())
        if covered != len(devices):
            where = f" ({show(devices)})" if layout.devices else ""
            raise InputError(
                f"placement.{role} covers {covered} of {len(devices)} devices{where}; "
                "set one of its sizes to -1"
            )
        found[role] = Share(devices, resolved)
    for (one, a), (other, b) in itertools.combinations(found.items(), 2):
        shared = range(max(a.devices[0], b.devices[0]), min(a.devices[-1], b.devices[-1]) + 1)
        if a.devices != b.devices and shared:
            raise InputError(
                f"placement.{one} has devices {show(a.devices)} and placement.{other} {show(b.devices)}, "
                f"which share {show(shared)}; give them the same devices or disjoint ones"
            )
    return found


def positions(role: str, layout: Layout, device_count: int) -> range:
    """The positions of a role's devices; without `devices`, of all."""
    text = layout.devices
    if text is None:
        return range(device_count)
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    if match is None:
        raise InputError(
            f"placement.{role}.devices={text} is not of the form FIRST-LAST; use for instance 0-3, "
            "which is the first four"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise InputError(f"placement.{role}.devices={text} ends before it begins; use {last}-{first}")
    if last >= device_count:
        raise InputError(
            f"placement.{role}.devices={text} goes beyond the {device_count} devices, which are "
            f"{show(range(device_count))}; lower it"
        )
    return range(first, last + 1)


def show(devices: range) -> str:
    """`0-3`, or `3` for one device."""
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"


def resolve(role: str, layout: Layout, device_count: int) -> Layout:
    """The layout with its -1 replaced by the devices that are left."""
    sizes = sizes_of(layout)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shown = " * ".join(f"{axis} {size}" for axis, size in sizes.items())
    if fixed > device_count:
        raise InputError(
            f"placement.{role} needs {fixed} devices ({shown}) and there are {device_count}; lower a size"
        )
    if -1 in sizes.values():
        if device_count % fixed:
            raise InputError(f"placement.{role}: {fixed} ({shown}) does not divide {device_count} devices")
        sizes = {axis: device_count // fixed if size == -1 else size for axis, size in sizes.items()}
    return dataclasses.replace(layout, **sizes)


def check_layout(role: str, layout: Layout) -> None:
    """Raise InputError for sizes and slices that fit no number of devices."""
    sizes = sizes_of(layout)
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            raise InputError(f"placement.{role}.{axis}={size} must be at least 1, or -1 for what is left")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise InputError(f"placement.{role}: only one of {' and '.join(open_axes)} may be -1")
    positions(role, layout, 10**9)

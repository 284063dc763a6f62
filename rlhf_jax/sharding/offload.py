"""Arrays in host memory between their uses, shard by shard beside the devices that use them."""

from __future__ import annotations

from typing import Any

import jax

from rlhf_jax.errors import InputError
from rlhf_jax.settings import Config
from rlhf_jax.sharding.placement import Views

HOST = "pinned_host"


def to_host(tree: Any) -> Any:
    """A copy of the arrays in host memory; the devices' memory is free once the caller lets go of `tree`."""
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind(HOST)), tree)


def to_device(tree: Any) -> Any:
    """A copy in the devices' own memory; arrays that are there already are given back."""

    def fetched(x):
        kind = next(iter(x.sharding.device_set)).default_memory().kind
        return jax.device_put(x, x.sharding.with_memory_kind(kind))

    return jax.tree.map(fetched, tree)


def check_offload(config: Config, views: Views) -> None:
    """Raise InputError where something is to be offloaded and the devices have no such memory."""
    offload = config.placement.offload
    wanted = [name for name in ("reference", "reward", "optimizer") if getattr(offload, name)]
    device = views.train.mesh.devices.flat[0]  # type: ignore
    kinds = [memory.kind for memory in device.addressable_memories()]
    if wanted and HOST not in kinds:
        raise InputError(
            f"placement.offload.{wanted[0]}=true needs {HOST} memory, and {device.device_kind} has only "
            f"{', '.join(kinds)}; set it to false"
        )

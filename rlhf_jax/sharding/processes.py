"""Several processes as one program: what one process writes, what all agree on, what each holds.

Every process runs the same program on its own devices (multi-controller JAX). Files are written by process 0
alone; whatever decides which program runs next must be the same everywhere.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_primary() -> bool:
    """True on the process that writes logs, configurations and exports."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Returns once every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def fetch(tree: Any) -> Any:
    """The tree as NumPy arrays, whole on every process. All processes call it, in the same order."""

    def whole(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        return jax.device_get(leaf)

    return jax.tree.map(whole, tree)

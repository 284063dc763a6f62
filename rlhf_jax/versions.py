"""What a run was made with, for reports of faults."""

from __future__ import annotations

import importlib.metadata
import platform

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Package -> version, of this one, Python and those that decide its numbers."""
    import rlhf_jax

    own = {"rlhf_jax": rlhf_jax.__version__, "python": platform.python_version()}
    return own | {package: importlib.metadata.version(package) for package in PACKAGES}

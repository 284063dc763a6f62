"""RLHF in JAX and Flax: reward models and PPO as pure functions over sharded parameters."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_jax import losses as losses
    from rlhf_jax.models import load_model as load_model

__version__ = "0.1.0"
__all__ = ["__version__", "load_model", "losses"]


def __getattr__(name: str) -> Any:
    """Import what needs jax when it is first asked for."""
    import importlib

    if name == "load_model":
        return importlib.import_module("rlhf_jax.models").load_model
    if name == "losses":
        return importlib.import_module("rlhf_jax.losses")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

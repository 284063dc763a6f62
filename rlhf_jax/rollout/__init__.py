"""Sampling responses from a policy and scoring them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_jax.rollout.text import generate_text as generate_text

__all__ = ["generate_text"]


def __getattr__(name: str) -> Any:
    """Import the models when they are first asked for."""
    import importlib

    if name == "generate_text":
        return importlib.import_module("rlhf_jax.rollout.text").generate_text
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

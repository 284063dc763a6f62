"""A step that is more than one jitted function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Step:
    """A function that brings its arguments to where a jitted one wants them, and how that one is compiled."""

    call: Callable[..., Any]
    lower: Callable[..., jax.stages.Lowered]  # from shapes, those of the state in the devices' memory

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

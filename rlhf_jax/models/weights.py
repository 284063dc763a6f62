"""Where a model's parameters come from. Nothing is in memory until they are read onto the devices.

Every reading makes arrays of its own: what one role donates is no other role's.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.models import lora
from rlhf_jax.models.checkpoints import read_params, survey
from rlhf_jax.models.families import Family
from rlhf_jax.models.parameters import flatten, fresh_params, shapes, unflatten

logger = logging.getLogger("rlhf_jax")


class Weights(Protocol):
    """A model's parameters, wherever they are."""

    @property
    def shapes(self) -> Any:
        """Tree of jax.ShapeDtypeStruct."""
        ...

    def read(self, shardings: Any) -> Any:
        """The parameters that the tree of shardings names, each straight into its shards.

        A sharding of None is the default device.
        """
        ...


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """Those of a directory's safetensors. A head that the files lack is made from `seed`, or refused."""

    directory: pathlib.Path
    family: Family
    model: nn.Module
    seed: int
    head_required: bool

    @functools.cached_property
    def shapes(self) -> dict:
        return shapes(self.model)

    def check(self) -> None:
        """Raises InputError where the files, by their headers, are not this model's."""
        survey(self.directory, self.family, self.shapes, head_required=self.head_required)

    def read(self, shardings: dict) -> dict:
        return _read_both(
            shardings,
            functools.partial(read_params, self.directory, self.family, self.shapes),
            functools.partial(fresh_params, self.model, self.seed),
            second=self._missing.__contains__,
        )

    @functools.cached_property
    def _missing(self) -> frozenset[str]:
        """Paths of the head that the files lack; said the first time."""
        new, unused = survey(self.directory, self.family, self.shapes, head_required=self.head_required)
        if new:
            names = ", ".join(sorted(new))
            logger.warning("%s has no %s: fresh seeded weights are used", self.directory, names)
        if unused:
            logger.warning("%s: %d tensors are not used, such as %s", self.directory, len(unused), unused[0])
        return new


@dataclasses.dataclass(frozen=True)
class FreshWeights:
    """Those of a model that nobody has trained."""

    model: nn.Module
    seed: int

    @functools.cached_property
    def shapes(self) -> dict:
        return shapes(self.model)

    def read(self, shardings: dict) -> dict:
        return fresh_params(self.model, self.seed, shardings)


@dataclasses.dataclass(frozen=True)
class TrunkWeights:
    """The trunk of other weights and a fresh head, for a model whose head is scalar."""

    trunk: Weights
    head: FreshWeights  # of the model that has this head

    @property
    def shapes(self) -> dict:
        return self.head.shapes

    def read(self, shardings: dict) -> dict:
        return _read_both(
            shardings, self.trunk.read, self.head.read, second=lambda path: path.startswith("head/")
        )


@dataclasses.dataclass(frozen=True)
class HeadWeights:
    """A fresh head alone: the rest of its model is some other model's trunk."""

    head: FreshWeights

    @property
    def shapes(self) -> dict:
        return {"head": self.head.shapes["head"]}

    def read(self, shardings: dict) -> dict:
        return self.head.read(shardings)


@dataclasses.dataclass(frozen=True)
class AdapterWeights:
    """Other weights, and fresh adapters beside them."""

    base: Weights
    whole: FreshWeights  # of the model that has adapters

    @property
    def shapes(self) -> dict:
        return self.whole.shapes

    def read(self, shardings: dict) -> dict:
        return _read_both(
            shardings,
            self.base.read,
            self.whole.read,
            second=lambda path: path.rsplit("/", 1)[-1] in (lora.A, lora.B),
        )


@dataclasses.dataclass(frozen=True)
class ArrayWeights:
    """Those that the caller holds in memory."""

    params: Any

    @property
    def shapes(self) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.params)

    def read(self, shardings: Any) -> Any:
        """As of every kind, but the tree must be whole."""

        def copy(leaf, sharding):
            return jnp.copy(jax.device_put(leaf, sharding))  # device_put gives the same buffer where it can

        return jax.tree.map(copy, self.params, shardings)


def _read_both(
    shardings: dict,
    first: Callable[[dict], dict],
    rest: Callable[[dict], dict],
    *,
    second: Callable[[str], bool],
) -> dict:
    """The parameters that the shardings name; those of whose paths `second` is true are read by `rest`."""
    wanted = flatten(shardings)
    parts: tuple[dict, dict] = {}, {}
    for path, place in wanted.items():
        parts[second(path)][path] = place
    params = {}
    for read, part in zip((first, rest), parts, strict=True):
        params |= flatten(read(unflatten(part))) if part else {}
    return unflatten({path: params[path] for path in wanted})

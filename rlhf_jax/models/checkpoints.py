"""Safetensors to a tree of parameters and back, by a family's table of weights."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from rlhf_jax.errors import InputError
from rlhf_jax.models.families import Family, Weight

logger = logging.getLogger("rlhf_jax")

FLOATS = ("F64", "F32", "F16", "BF16")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a directory, in one file or several, by their names without the family's prefix."""

    def __init__(self, directory: pathlib.Path, family: Family):
        self.directory, self.family = directory, family
        self._stack = contextlib.ExitStack()
        self._tensors: dict[str, tuple[Any, str]] = {}

    def __enter__(self) -> Checkpoint:
        try:
            for path in _files(self.directory):
                try:
                    handle = self._stack.enter_context(safe_open(path, framework="numpy"))
                except (SafetensorError, OSError) as error:
                    raise InputError(
                        f"{path} is not a whole safetensors file ({error}); fetch it again"
                    ) from error
                self._tensors |= {self._plain(name): (handle, name) for name in handle.keys()}  # noqa: SIM118
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc_info) -> None:
        self._stack.close()

    def _plain(self, name: str) -> str:
        name = name.removeprefix(self.family.prefix)
        for old, new in self.family.renames:
            name = name.replace(old, new)
        return name

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def piece(self, name: str, weight: Weight, shape: tuple[int, ...]) -> Any:
        """The tensor that holds a parameter of this shape, its shape and type checked, not read yet."""
        handle, stored = self._tensors[name]
        piece = handle.get_slice(stored)
        expected, found = stored_shape(weight, shape), tuple(piece.get_shape())
        if found != expected:
            raise InputError(
                f"{self.directory}: tensor {stored!r} has shape {found}, expected {expected} by config.json; "
                "fetch or save the model again"
            )
        if piece.get_dtype() not in FLOATS:
            raise InputError(
                f"{self.directory}: tensor {stored!r} is {piece.get_dtype()}; use {', '.join(FLOATS)}"
            )
        return piece

    def read(self, name: str, weight: Weight, shape: tuple[int, ...]) -> np.ndarray:
        """One parameter of this shape, in the type of the file."""
        piece = self.piece(name, weight, shape)
        i, n = weight.part
        size = stored_shape(weight, shape)[-1] // n
        tensor = piece[..., i * size : (i + 1) * size] if n > 1 else piece[...]
        return (tensor.T if weight.form == "linear" else tensor).reshape(shape)


def stored_shape(weight: Weight, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in the file of the tensor that holds a parameter of this shape (all parts of it)."""
    parts = weight.part[1]
    if weight.form == "table":
        return shape
    if weight.form == "vector":
        return (math.prod(shape) * parts,)
    inputs, outputs = math.prod(shape[: weight.inputs]), math.prod(shape[weight.inputs :])
    return (outputs, inputs) if weight.form == "linear" else (inputs, outputs * parts)


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    single, index = directory / "model.safetensors", directory / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
        if pickles:
            raise InputError(
                f"{directory} holds only {pickles[0]}, a pickle, which could run code when read; "
                "save the model as safetensors"
            )
        raise InputError(
            f"{directory} has no model.safetensors and no {INDEX}; fetch or save the model again"
        )
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index} is not an index of safetensors files ({error!r}); fetch it again"
        ) from error
    for name in names:
        if (
            not isinstance(name, str)
            or pathlib.PurePath(name).name != name
            or not (directory / name).is_file()
        ):
            raise InputError(f"{index} names {name!r}, which is not a file beside it; fetch it again")
    return [directory / name for name in names]


def places(family: Family, shapes: dict) -> dict[str, Weight]:
    """The table entry of each parameter, by its path."""
    table = {weight.path: weight for weight in family.weights}
    return {path: table[path] for path in flatten(shapes)}


def flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested dict by paths like layers/mlp/up/kernel."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}/") if isinstance(value, dict) else {path: value}
    return flat


def unflatten(flat: dict[str, Any]) -> dict:
    """The inverse of `flatten`."""
    tree: dict = {}
    for path, value in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree


def read_params(
    directory: pathlib.Path, family: Family, shapes: dict, fresh_head: Callable[[], dict] | None
) -> dict:
    """The tree of parameters of a checkpoint, one leaf after another.

    Args:
      shapes: tree of jax.ShapeDtypeStruct, layers stacked.
      fresh_head: gives params["head"], called if the checkpoint lacks it; None refuses such a checkpoint.
    """
    weights = places(family, shapes)
    params: dict[str, Any] = {}
    with Checkpoint(directory, family) as checkpoint:
        new, unused = _survey(checkpoint, shapes, head_required=fresh_head is None)
        fresh = flatten(fresh_head(), "head/") if new and fresh_head else {}
        for path, leaf in flatten(shapes).items():
            params[path] = fresh[path] if path in new else _leaf(checkpoint, weights[path], leaf)
    if new:
        logger.warning("%s has no %s: fresh seeded weights are used", directory, ", ".join(sorted(new)))
    if unused:
        logger.warning("%s: %d tensors are not used, such as %s", directory, len(unused), unused[0])
    return unflatten(params)


def check_params(directory: pathlib.Path, family: Family, shapes: dict, *, head_required: bool) -> None:
    """Refuses what `read_params` would, by the files' headers alone."""
    with Checkpoint(directory, family) as checkpoint:
        _survey(checkpoint, shapes, head_required=head_required)


def _survey(checkpoint: Checkpoint, shapes: dict, *, head_required: bool) -> tuple[set[str], list[str]]:
    """(paths of the head that are not in the checkpoint, names of tensors that are not used).

    Raises:
      InputError: something else is missing, has another shape, or belongs to another backbone.
    """
    family, new, used = checkpoint.family, set(), set()
    weights = places(family, shapes)
    for path, leaf in flatten(shapes).items():
        weight = weights[path]
        shape = leaf.shape[1:] if "{}" in weight.name else leaf.shape
        names = _names(weight, leaf.shape)
        missing = [name for name in names if name not in checkpoint]
        if missing and path.startswith("head/") and not head_required:
            new.add(path)
            continue
        if missing:
            full = missing[0] if weight.bare else family.prefix + missing[0]
            remedy = (
                "train a reward model first" if path.startswith("head/") else "fetch or save the model again"
            )
            wanted = f"tensor {full!r} of shape {stored_shape(weight, shape)}"
            raise InputError(f"{checkpoint.directory} has no {wanted}; {remedy}")
        for name in names:
            checkpoint.piece(name, weight, shape)
        used.update(names)
    return new, _rest(checkpoint, used)


def _names(weight: Weight, shape: tuple[int, ...]) -> list[str]:
    return [weight.name.format(i) for i in range(shape[0])] if "{}" in weight.name else [weight.name]


def _leaf(checkpoint: Checkpoint, weight: Weight, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    out, names = np.empty(leaf.shape, leaf.dtype), _names(weight, leaf.shape)
    if "{}" not in weight.name:
        out[...] = checkpoint.read(names[0], weight, leaf.shape)
    else:
        for i, name in enumerate(names):
            out[i] = checkpoint.read(name, weight, leaf.shape[1:])
    return jnp.asarray(out)


def _rest(checkpoint: Checkpoint, used: set[str]) -> list[str]:
    """Tensors that are not used. Those of the backbone are refused: they have no place in the model."""
    family = checkpoint.family
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in family.ignored))
    rest = [name for name in checkpoint.names() if name not in used and not ignored.fullmatch(name)]
    roots = {weight.name.split(".")[0] for weight in family.weights if not weight.bare}
    inside = [name for name in rest if name.split(".")[0] in roots]
    if inside:
        raise InputError(
            f"{checkpoint.directory}: {len(inside)} tensors, such as {inside[0]!r}, have no place in the "
            f"{family.model_type} model that config.json describes; is it another model's?"
        )
    return rest


def stored_tensors(params: dict, family: Family) -> Iterator[tuple[str, int, Callable[[], np.ndarray]]]:
    """(name, bytes, function that gives the NumPy tensor) of each tensor of a checkpoint."""
    flat = flatten(params)
    groups: dict[str, list[Weight]] = {}
    for weight in family.weights:
        if weight.path in flat:
            groups.setdefault(weight.name, []).append(weight)
    for name, weights in groups.items():
        full = name if weights[0].bare else family.prefix + name
        values = [flat[weight.path] for weight in weights]
        size = sum(value.nbytes for value in values)
        if "{}" not in name:
            yield full, size, functools.partial(_tensor, weights, values)
            continue
        layers = values[0].shape[0]
        for i in range(layers):
            yield full.format(i), size // layers, functools.partial(_tensor, weights, values, i)


def _tensor(weights: list[Weight], values: list[Any], layer: int | None = None) -> np.ndarray:
    pieces = []
    for weight, value in zip(weights, values, strict=True):
        value = np.asarray(jax.device_get(value if layer is None else value[layer]))
        if weight.form in ("linear", "conv"):
            value = value.reshape(math.prod(value.shape[: weight.inputs]), -1)
        elif weight.form == "vector":
            value = value.reshape(-1)
        pieces.append(value.T if weight.form == "linear" else value)
    return np.ascontiguousarray(np.concatenate(pieces, -1) if len(pieces) > 1 else pieces[0])

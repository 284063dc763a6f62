"""Safetensors to a tree of parameters and back, by a family's table of weights."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open

from rlhf_jax.errors import InputError
from rlhf_jax.models.families import Family, Weight
from rlhf_jax.models.parameters import flatten, unflatten
from rlhf_jax.sharding.processes import fetch

FLOATS = ("F64", "F32", "F16", "BF16")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
INDEX = "model.safetensors.index.json"

Cut = tuple[slice, ...]  # a slice of each axis, as `jax.sharding.Sharding.devices_indices_map` gives them


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

    def read(self, name: str, weight: Weight, shape: tuple[int, ...], cut: Cut) -> np.ndarray:
        """A cut of one parameter of this shape, in the type of the file; little else is read."""
        piece = self.piece(name, weight, shape)
        if weight.form == "table":
            return piece[cut]
        i, _ = weight.part
        if weight.form == "vector":
            run, shaped, rest = _run(shape, cut, i * math.prod(shape))
            return piece[run].reshape(shaped)[rest]
        k = weight.inputs
        inputs, shaped_in, rest_in = _run(shape[:k], cut[:k])
        outputs, shaped_out, rest_out = _run(shape[k:], cut[k:], i * math.prod(shape[k:]))
        tensor = piece[outputs, inputs].T if weight.form == "linear" else piece[inputs, outputs]
        return tensor.reshape(shaped_in + shaped_out)[rest_in + rest_out]


def _run(shape: tuple[int, ...], cut: Cut, offset: int = 0) -> tuple[slice, tuple[int, ...], Cut]:
    """(run, shape of the run, cut in it): the shortest run of a flattened array that holds a cut of it.

    The first axis of which the cut takes more than one entry bounds the run; later axes are whole in it.
    """
    spans = [range(size)[part] for size, part in zip(shape, cut, strict=True)]
    axis = next((i for i, span in enumerate(spans) if len(span) > 1), len(shape) - 1)
    start = offset + sum(spans[i].start * math.prod(shape[i + 1 :]) for i in range(axis + 1))
    shaped = (1,) * axis + (len(spans[axis]), *shape[axis + 1 :])
    return (
        slice(start, start + math.prod(shaped)),
        shaped,
        (slice(None),) * (axis + 1) + tuple(cut[axis + 1 :]),
    )


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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{index} is not an index of safetensors files ({error!r}); fetch it again"
        ) from error
    for name in names:
        beside = isinstance(name, str) and pathlib.PurePath(name).name == name
        if not beside or not os.path.isfile(directory / name):
            raise InputError(f"{index} names {name!r}, which is not a file beside it; fetch it again")
    return [directory / name for name in names]


def places(family: Family, shapes: dict) -> dict[str, Weight]:
    """The table entry of each parameter, by its path."""
    table = {weight.path: weight for weight in family.weights}
    return {path: table[path] for path in flatten(shapes)}


def read_params(directory: pathlib.Path, family: Family, shapes: dict, shardings: dict) -> dict:
    """Parameters of a checkpoint, one leaf after another, each straight into its shards.

    Args:
      shapes: tree of jax.ShapeDtypeStruct of the whole model, layers stacked.
      shardings: tree of Sharding, or of None for the default device, over the parameters that are wanted.
    """
    weights, leaves = places(family, shapes), flatten(shapes)
    params: dict[str, Any] = {}
    with Checkpoint(directory, family) as checkpoint:
        for path, sharding in flatten(shardings).items():
            read = functools.partial(_read_cut, checkpoint, weights[path], leaves[path])
            params[path] = _array(leaves[path], sharding, read)
    return unflatten(params)


def _read_cut(checkpoint: Checkpoint, weight: Weight, leaf: jax.ShapeDtypeStruct, cut: Cut) -> np.ndarray:
    """A cut of a parameter, converted tensor by tensor where layers are stacked."""
    if "{}" not in weight.name:
        return checkpoint.read(weight.name, weight, leaf.shape, cut).astype(leaf.dtype, copy=False)
    layers = range(leaf.shape[0])[cut[0]]
    spans = [range(size)[part] for size, part in zip(leaf.shape[1:], cut[1:], strict=True)]
    out = np.empty((len(layers), *map(len, spans)), leaf.dtype)
    for i, layer in enumerate(layers):
        out[i] = checkpoint.read(weight.name.format(layer), weight, leaf.shape[1:], cut[1:])
    return out


def _array(
    leaf: jax.ShapeDtypeStruct, sharding: Sharding | None, read: Callable[[Cut], np.ndarray]
) -> jax.Array:
    """The array, laid out so. Each different shard is read once, and the host holds one at a time."""
    if sharding is None:
        return jnp.array(read((slice(None),) * len(leaf.shape)))
    owners: dict[tuple, list[Any]] = {}
    for device, cut in sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(part.indices(size) for part, size in zip(cut or (), leaf.shape, strict=True))
        owners.setdefault(bounds, []).append(device)
    shards = []
    for bounds, devices in owners.items():
        shard = read(tuple(slice(*bound) for bound in bounds))
        # device_put may share the host's memory; then devices share it, and donation could not reuse it
        put = [
            jnp.copy(jax.device_put(shard, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)))
            for device in devices
        ]
        shards += jax.block_until_ready(put)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def survey(
    directory: pathlib.Path, family: Family, shapes: dict, *, head_required: bool
) -> tuple[frozenset[str], list[str]]:
    """What a checkpoint holds, by its files' headers alone.

    Args:
      shapes: tree of jax.ShapeDtypeStruct, layers stacked.
      head_required: refuses a checkpoint that lacks a tensor of the head.
    Returns:
      (paths of the head that are not in the checkpoint, names of tensors that are not used)
    Raises:
      InputError: something else is missing, has another shape, or belongs to another backbone.
    """
    with Checkpoint(directory, family) as checkpoint:
        return _survey(checkpoint, shapes, head_required=head_required)


def _survey(checkpoint: Checkpoint, shapes: dict, *, head_required: bool) -> tuple[frozenset[str], list[str]]:
    family, new, used = checkpoint.family, set(), set()
    weights = places(family, shapes)
    for path, leaf in flatten(shapes).items():
        weight = weights[path]
        shape = leaf.shape[1:] if "{}" in weight.name else leaf.shape
        missing = next((name for name in _names(weight, leaf.shape) if name not in checkpoint), None)
        if missing and path.startswith("head/") and not head_required:
            new.add(path)
            continue
        if missing:
            full = missing if weight.bare else family.prefix + missing
            remedy = (
                "train a reward model first" if path.startswith("head/") else "fetch or save the model again"
            )
            wanted = f"tensor {full!r} of shape {stored_shape(weight, shape)}"
            raise InputError(f"{checkpoint.directory} has no {wanted}; {remedy}")
        for name in _names(weight, leaf.shape):
            checkpoint.piece(name, weight, shape)
            used.add(name)
    return frozenset(new), _rest(checkpoint, used)


def _names(weight: Weight, shape: tuple[int, ...]) -> Iterator[str]:
    """One by one: config.json may claim billions of layers."""
    return (weight.name.format(i) for i in range(shape[0])) if "{}" in weight.name else iter([weight.name])


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
    """(name, bytes, function that gives the NumPy tensor) of each tensor of a checkpoint.

    With several processes each of them calls the functions, in the order of the tensors.
    """
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
        value = fetch(value if layer is None else value[layer])
        if weight.form in ("linear", "conv"):
            value = value.reshape(math.prod(value.shape[: weight.inputs]), -1)
        elif weight.form == "vector":
            value = value.reshape(-1)
        pieces.append(value.T if weight.form == "linear" else value)
    return np.ascontiguousarray(np.concatenate(pieces, -1) if len(pieces) > 1 else pieces[0])

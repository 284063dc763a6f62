"""Several processes as one program: what one process writes, what all agree on, what each holds.

Every process runs the same program on its own devices (multi-controller JAX). Files are written by process 0
alone; whatever decides which program runs next must be the same everywhere. With one process every function
here is the plain thing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from rlhf_jax.errors import InputError

MESSAGE_BYTES = 2048  # of an error that is told to the other processes


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
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        return jax.device_get(leaf)

    return jax.tree.map(whole, tree)


def put(tree: Any, sharding: Sharding) -> Any:
    """Host arrays, the same on every process, on the devices; each process copies only what its own hold.

    Arrays that lie on all devices already are laid out anew.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)

    def spread(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(spread, tree)


def put_key(key: jax.Array, sharding: Sharding) -> jax.Array:
    """A key that every process has made for itself, as one array of all devices."""
    return jax.device_put(key, sharding) if jax.process_count() == 1 else _placer(sharding)(key)


@functools.cache
def _placer(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda key: key, out_shardings=sharding)


def share_rows(work: Callable[[range], np.ndarray], count: int) -> np.ndarray:
    """`work(rows)` for each process's share of `count` rows, put together on every process.

    Args:
      work: gives an array whose first axis goes with the rows that it is given.
    Raises:
      InputError: one process's work raised it; all raise the same.
    """
    if jax.process_count() == 1:
        return work(range(count))
    n = jax.process_count()
    ends = [-(-i * count // n) for i in range(n + 1)]  # the first share is as long as any
    shares = [range(*pair) for pair in itertools.pairwise(ends)]
    mine = shares[jax.process_index()]
    result: np.ndarray | None = None

    def here() -> None:
        nonlocal result
        result = np.asarray(work(mine))

    together(here)
    assert result is not None
    whole = np.zeros((count, *result.shape[1:]), result.dtype)
    padded = np.zeros((len(shares[0]), *result.shape[1:]), result.dtype)
    padded[: len(mine)] = result
    for rows, part in zip(shares, multihost_utils.process_allgather(padded), strict=True):
        whole[rows] = part[: len(rows)]
    return whole


def together(action: Callable[[], Any]) -> None:
    """Every process acts; where one raises InputError, all raise it instead of waiting for that one."""
    if jax.process_count() == 1:
        action()
        return
    told = ""
    try:
        action()
    except InputError as error:
        told = str(error) or type(error).__name__
    words = np.zeros(MESSAGE_BYTES, np.uint8)
    text = told.encode()[:MESSAGE_BYTES]
    words[: len(text)] = np.frombuffer(text, np.uint8)
    for process, said in enumerate(np.asarray(multihost_utils.process_allgather(words))):
        message = bytes(said).rstrip(b"\0").decode(errors="ignore")
        if message:
            raise InputError(message if process == 0 else f"process {process}: {message}")


def on_primary(action: Callable[[], Any]) -> None:
    """Process 0 acts, the others wait for it; where it raises InputError, all do."""
    together(action if is_primary() else lambda: None)


def agreed(answer: int) -> int:
    """Process 0's answer, a truth or a number, everywhere: what is found in files may differ by a moment."""
    if jax.process_count() == 1:
        return answer
    return int(multihost_utils.broadcast_one_to_all(np.asarray(answer)))


def any_process(flag: bool) -> jax.Array | np.ndarray:
    """True on every process where the flag is on one. Dispatched, not waited for, with several processes."""
    if jax.process_count() == 1:
        return np.asarray(flag)
    rows, any_of = _ballot()
    count = jax.device_count()
    return any_of(jax.make_array_from_callback((count,), rows, lambda index: np.full(count, flag)[index]))


@functools.cache
def _ballot() -> tuple[Sharding, Callable[[jax.Array], jax.Array]]:
    mesh = Mesh(np.array(jax.devices()), ("all",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec("all")), jax.jit(jnp.any, out_shardings=everywhere)

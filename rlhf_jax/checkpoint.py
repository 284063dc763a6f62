"""Save and restore a phase's whole state with Orbax.

A checkpoint holds a tree of arrays and a JSON record of host-side facts (counters, best metric, data
position). It is written to a temporary directory and renamed, so a killed save leaves the previous one in
charge. With several processes all of them save and restore, each the shards that its devices hold.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from rlhf_jax.errors import InputError
from rlhf_jax.sharding.processes import agreed, barrier, is_primary

STATE, HOST, METADATA, COMMITTED = "state", "host", "_CHECKPOINT_METADATA", "commit_success.txt"
ANOTHER = "it is of another model or configuration; choose another run.dir"


class Checkpoints:
    """The checkpoints of one phase, under RUN_DIR/checkpoints/PHASE/STEP."""

    def __init__(self, run_dir: os.PathLike | str, phase: str, *, keep: int):
        """Keep the newest `keep` checkpoints."""
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports each file it touches
        directory = epath.Path(run_dir) / "checkpoints" / phase
        if "://" not in str(run_dir):
            directory = epath.Path(os.path.abspath(directory))
        elif str(run_dir).startswith("gs://"):
            _check_client(run_dir)
        self.directory = directory
        self._keep = keep
        self._saver: ocp.CheckpointManager | None = None

    def save(self, step: int, state: Any, host: dict) -> None:
        """Write the arrays of `state` and the JSON of `host`; returns when both are safely there."""
        json.dumps(host, allow_nan=False)
        if self._saver is None:
            if is_primary():
                self._remove_half_written()
            barrier(f"half-written checkpoints of {self.directory} are gone")
        leaves = {name: _saved(name, leaf) for name, leaf in _named(state).items()}
        items = ocp.args.Composite(**{STATE: ocp.args.StandardSave(leaves), HOST: ocp.args.JsonSave(host)})
        self._manager().save(step, args=items, force=True)
        self._manager().wait_until_finished()

    def latest_step(self) -> int | None:
        """The newest whole checkpoint, the same for every process; None where there is none."""
        step = agreed(max(self.steps(), default=-1))
        return None if step < 0 else step

    def steps(self) -> list[int]:
        """Every whole checkpoint, oldest first. Half-written directories are passed over."""
        if not self.directory.exists():
            return []
        return sorted(int(entry.name) for entry in self.directory.iterdir() if _is_whole(entry))

    def restore(self, step: int, like: Any) -> tuple[Any, dict]:
        """Read a checkpoint onto the shardings of `like`.

        Args:
          step: one of `steps()`.
          like: the state's tree, of arrays or of jax.ShapeDtypeStruct with shardings.
        Returns:
          (state, host), the state laid out as `like` is.
        """
        try:
            return self._restore(step, like)
        except (InputError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax raises errors of many kinds
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(
                f"{self.directory / str(step)} cannot be read ({reason[:200]}); remove this folder, and the "
                "run goes on from the checkpoint before"
            ) from error

    def _restore(self, step: int, like: Any) -> tuple[Any, dict]:
        wanted = _named(like)
        self._check(step, wanted)
        abstract = {name: _abstract(leaf) for name, leaf in wanted.items()}
        items = ocp.args.Composite(
            **{STATE: ocp.args.StandardRestore(abstract), HOST: ocp.args.JsonRestore()}
        )
        read = self._manager().restore(step, args=items)
        leaves = [_restored(read[STATE][name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), read[HOST]

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def _remove_half_written(self) -> None:
        """A step copied or deleted in part would stand in the way of its own saving."""
        if self.directory.exists():
            for entry in self.directory.iterdir():
                if entry.name.isdigit() and not _is_whole(entry):
                    entry.rmtree()

    def _manager(self) -> ocp.CheckpointManager:
        if self._saver is None:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
            )
            handlers = {STATE: ocp.StandardCheckpointHandler(), HOST: ocp.JsonCheckpointHandler()}
            self._saver = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)
        return self._saver

    def _check(self, step: int, wanted: dict[str, Any]) -> None:
        """Compare names, shapes and types with the checkpoint's before anything is read."""
        place = self.directory / str(step)
        saved = self._manager().item_metadata(step)[STATE].tree
        for name in sorted(wanted.keys() - saved.keys()):
            raise InputError(f"{place} has no {name}; {ANOTHER}")
        for name in sorted(saved.keys() - wanted.keys()):
            raise InputError(f"{place} holds {name}, which is not wanted; {ANOTHER}")
        for name, leaf in wanted.items():
            expected, found = _abstract(leaf), saved[name]
            if tuple(expected.shape) != tuple(found.shape) or expected.dtype != found.dtype:
                raise InputError(
                    f"{place}: {name} is {_shape(found)} and {_shape(expected)} is expected; {ANOTHER}"
                )


def _check_client(run_dir: os.PathLike | str) -> None:
    """Orbax asks for this package when it first saves, which would be after an iteration."""
    try:
        importlib.import_module("google.cloud.storage")
    except ImportError as error:
        raise InputError(
            f"run.dir={run_dir}: checkpoints there need google-cloud-storage ({error}); install it with pip"
        ) from error


def _is_whole(entry: epath.Path) -> bool:
    """True for a finished save. An object store renames nothing: there Orbax says so by a file."""
    parts = (METADATA, STATE, HOST, *((COMMITTED,) if "://" in str(entry) else ()))
    return entry.name.isdigit() and all((entry / part).exists() for part in parts)


def _named(tree: Any) -> dict[str, Any]:
    """Dotted path -> leaf."""
    paths, _ = jax.tree.flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    if len(named) != len(paths):
        raise ValueError("two leaves of the state have one name")
    return named


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _saved(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{name} is {type(leaf).__name__}; the state holds arrays, and `host` the rest")
    if isinstance(leaf, jax.Array) and _is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, type and sharding as stored; a key is stored as its words."""
    sharding = getattr(leaf, "sharding", None)
    if not _is_key(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=sharding)


def _restored(value: Any, leaf: Any) -> Any:
    if not _is_key(leaf):
        return value
    implementations = []
    jax.eval_shape(lambda keys: implementations.append(jax.random.key_impl(keys)), leaf)
    keys = jax.random.wrap_key_data(jnp.asarray(value), impl=implementations[0])
    return keys if getattr(leaf, "sharding", None) is None else jax.device_put(keys, leaf.sharding)


def _shape(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"

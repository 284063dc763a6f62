"""Save and restore a phase's whole state with Orbax, in the background of the steps that follow.

A checkpoint holds a tree of arrays, a JSON record of host-side facts (counters, best metric) and of the
machine that it was made on, and the checksums of all its files. It is written to a temporary directory and
renamed, so a killed save leaves the previous one in charge, which is removed only after the new one is whole.
With several processes all of them save and restore, each the shards that its devices hold.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from rlhf_jax.checksums import MANIFEST, damage, write_checksums
from rlhf_jax.errors import InputError, first_line
from rlhf_jax.quiet import say_each_fault_once
from rlhf_jax.sharding import offload
from rlhf_jax.sharding.processes import agreed, barrier, is_primary, on_primary
from rlhf_jax.storage import free_bytes, full

STATE, HOST, METADATA, COMMITTED = "state", "host", "_CHECKPOINT_METADATA", "commit_success.txt"
ANOTHER = "it is of another model or configuration; choose another run.dir"

log = logging.getLogger("rlhf_jax")


class Resumed(NamedTuple):
    """What a run goes on from."""

    step: int
    state: Any
    host: dict


class Checkpoints:
    """The checkpoints of one phase, under RUN_DIR/checkpoints/PHASE/STEP. A context waits at its end."""

    def __init__(self, run_dir: os.PathLike | str, phase: str, *, keep: int):
        """Keep the newest `keep` checkpoints."""
        say_each_fault_once()
        directory = epath.Path(run_dir) / "checkpoints" / phase
        if "://" not in str(run_dir):
            directory = epath.Path(os.path.abspath(directory))
        elif str(run_dir).startswith("gs://"):
            _check_client(run_dir)
        self.directory = directory
        self._keep = keep
        self._saver: ocp.AsyncCheckpointer | None = None
        self._resumed: int | None = None
        self._cleaned = False
        self._writing: int | None = None  # the step that is being written in the background

    def save(self, step: int, state: Any, host: dict) -> None:
        """Copy the arrays of `state` to the host and begin to write them, with the JSON of `host`.

        The state may be donated once this returns. A save that is still being written is waited for first.

        Raises:
          InputError: there is no room, for this state or for the one before.
        """
        json.dumps(host, allow_nan=False)
        leaves = {name: _saved(name, leaf) for name, leaf in named_leaves(state).items()}
        self.wait()
        if not self._cleaned:
            self._clean()
            self._forget_later()
            barrier(f"half-written checkpoints of {self.directory} are gone")
        self._cleaned = True
        on_primary(lambda: self._check_room(step, sum(leaf.nbytes for leaf in leaves.values())))
        record = {"host": host, "machine": machine()}
        items = _Items(**{STATE: ocp.args.StandardSave(leaves), HOST: ocp.args.JsonSave(record)})
        with self._told(step):
            self._checkpointer().save(self.directory / str(step), args=items)
        self._writing = step
        if any(_in_host_memory(leaf) for leaf in leaves.values()):
            self.wait()  # these are read where they lie, and the next step may write there

    def wait(self) -> None:
        """Returns once what was saved is whole where it belongs, and what is older than `keep` is gone.

        Raises:
          InputError: it could not be written.
        """
        if self._writing is None:
            return
        step, self._writing = self._writing, None
        with self._told(step):
            self._checkpointer().wait_until_finished()
        self._release()
        if is_primary():
            for old in self.steps()[: -self._keep]:
                _remove(self.directory / str(old))

    def look(self) -> None:
        """Tells, without waiting, of a save that has failed. Several processes hear of it in `wait`."""
        if self._writing is not None and jax.process_count() == 1:
            with self._told(self._writing):
                self._checkpointer().check_for_errors()

    def latest_step(self) -> int | None:
        """The newest finished checkpoint, the same for every process; None where there is none."""
        self.wait()
        step = agreed(max(self.steps(), default=-1))
        return None if step < 0 else step

    def steps(self) -> list[int]:
        """Every finished checkpoint, oldest first. Half-written directories are passed over."""
        return sorted(int(entry.name) for entry in self._entries() if _is_finished(entry))

    def newest_whole(self) -> int | None:
        """The newest step all of whose files have their checksums, the same for every process.

        What is half-written or damaged is named in a warning and passed over. None: nothing was ever saved.

        Raises:
          InputError: all there is is damaged.
        """
        self.wait()
        step = -1

        def look() -> None:
            nonlocal step
            step = self._newest_whole()

        on_primary(look)
        step = agreed(step)
        return None if step < 0 else step

    def resume(self, like: Any) -> Resumed | None:
        """The newest whole checkpoint, laid out as `like` is; None where nothing was saved."""
        step = self.newest_whole()
        if step is None:
            return None
        self._resumed = step
        state, record = self._read(step, like)
        before, now = record["machine"], machine()
        if before != now:
            log.info(
                "%s: saved on %s, goes on with %s: numbers are equal to rounding, not bit for bit",
                self.directory.name,
                _in_words(before),
                _in_words(now),
            )
        return Resumed(step, state, record["host"])

    def restore(self, step: int, like: Any) -> tuple[Any, dict]:
        """Read a checkpoint onto the shardings of `like`.

        Args:
          step: one of `steps()`.
          like: the state's tree, of arrays or of jax.ShapeDtypeStruct with shardings.
        Returns:
          (state, host), the state laid out as `like` is.
        """
        state, record = self._read(step, like)
        return state, record["host"]

    def close(self) -> None:
        self.wait()
        self._release()

    def _release(self) -> None:
        """Orbax's saver holds its copy of the last state for as long as it lives."""
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def __enter__(self):
        return self

    def __exit__(self, kind, *exc_info):
        # the first fault is the one to tell
        with contextlib.suppress(Exception) if kind else contextlib.nullcontext():
            self.close()

    def _read(self, step: int, like: Any) -> tuple[Any, dict]:
        self.wait()
        try:
            return self._restore(step, like)
        except (InputError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax raises errors of many kinds
            place, reason = self.directory / str(step), first_line(error)[:200]
            raise InputError(
                f"{place} cannot be read ({reason}); remove this folder, and the run goes on from the "
                "checkpoint before"
            ) from error

    def _restore(self, step: int, like: Any) -> tuple[Any, dict]:
        wanted = named_leaves(like)
        self._check(step, wanted)
        abstract = {name: _abstract(leaf) for name, leaf in wanted.items()}
        items = _Items(**{STATE: ocp.args.StandardRestore(abstract), HOST: ocp.args.JsonRestore()})
        read = self._checkpointer().restore(self.directory / str(step), args=items)
        leaves = [_restored(read[STATE][name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), read[HOST]

    def _newest_whole(self) -> int:
        """-1 where nothing was saved."""
        faults = []
        for entry in sorted(self._entries(), key=_step_of, reverse=True):
            if _is_half_written(entry):
                log.warning("%s is half-written and passed over", entry)
            elif (fault := damage(entry)) is not None:
                faults.append(f"{entry} is damaged: {fault}")
            else:
                for line in faults:
                    log.warning("%s; the run goes on from the checkpoint of step %s", line, entry.name)
                return int(entry.name)
        if faults:
            raise InputError(
                f"{faults[0]}, and there is no whole checkpoint before it; bring its files back, or remove "
                f"{self.directory} to begin this phase again"
            )
        return -1

    def _entries(self) -> list[epath.Path]:
        """What saves have left, whole or not."""
        if not self.directory.exists():
            return []
        return [entry for entry in self.directory.iterdir() if entry.name[0].isdigit()]

    def _clean(self) -> None:
        """A step in part would stand in the way of its own saving."""
        if not is_primary():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        for entry in self._entries():
            if not _is_finished(entry):
                _remove(entry)

    def _forget_later(self) -> None:
        """So would what was passed over in favour of the step that the run goes on from."""
        if self._resumed is not None and is_primary():
            for step in self.steps():
                if step > self._resumed:
                    _remove(self.directory / str(step))

    def _check_room(self, step: int, needed: int) -> None:
        """Before anything is written: what lies there already is not touched."""
        free = free_bytes(self.directory)
        if free is not None and free < needed:
            raise InputError(self._not_written(step, f"{needed:,} bytes are needed and {free:,} are free"))

    @contextlib.contextmanager
    def _told(self, step: int) -> Iterator[None]:
        """An error of the disk becomes one line, and what was written in vain is removed."""
        try:
            yield
        except Exception as error:
            if full(error) is None and not isinstance(error, OSError):
                raise
            with contextlib.suppress(OSError):
                self._clean()
            raise InputError(self._not_written(step, full(error) or first_line(error)[:200])) from error

    def _not_written(self, step: int, reason: str) -> str:
        steps = self.steps()
        last = f"from step {steps[-1]}" if steps else "from the beginning of this phase"
        place = self.directory / str(step)
        return f"{place} cannot be written: {reason}; free some space, and the same command goes on {last}"

    def _checkpointer(self) -> ocp.AsyncCheckpointer:
        if self._saver is None:
            handlers = {STATE: ocp.StandardCheckpointHandler(), HOST: ocp.JsonCheckpointHandler()}
            options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
            self._saver = ocp.AsyncCheckpointer(_Handler(**handlers), async_options=options)
        return self._saver

    def _check(self, step: int, wanted: dict[str, Any]) -> None:
        """Compare names, shapes and types with the checkpoint's before anything is read."""
        place = self.directory / str(step)
        saved = ocp.StandardCheckpointHandler().metadata(place / STATE).tree
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


def machine() -> dict[str, Any]:
    """What decides in which order sums are taken, beside the configuration."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kinds = " and ".join(sorted({device.device_kind for device in jax.devices()}))
    return {"devices": f"{jax.device_count()} x {kinds}", "cpu_cores": cores, "jax": jax.__version__}


def _in_words(record: dict[str, Any]) -> str:
    return f"{record['devices']} with {record['cpu_cores']} CPU cores and jax {record['jax']}"


class _Handler(ocp.CompositeCheckpointHandler):
    """Writes the checksums once every process has written its files, and before the checkpoint counts."""

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        write_checksums(directory, passed_over=(METADATA, COMMITTED))


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    """State and host record, for our handler."""


def _is_finished(entry: epath.Path) -> bool:
    """True for a finished save. An object store renames nothing: there Orbax says so by a file."""
    parts = (MANIFEST, *((COMMITTED,) if "://" in str(entry) else ()))
    return entry.name.isdigit() and all((entry / part).exists() for part in parts)


def _is_half_written(entry: epath.Path) -> bool:
    """True for what a killed save or removal left. A local directory has its name only once it is whole."""
    return not entry.name.isdigit() or ("://" in str(entry) and not _is_finished(entry))


def _step_of(entry: epath.Path) -> int:
    return int(entry.name.partition(".")[0])


def _remove(entry: epath.Path) -> None:
    """A removal that is killed leaves nothing that looks like a checkpoint."""
    if "://" in str(entry):
        (entry / COMMITTED).unlink(missing_ok=True)
    elif entry.name.isdigit():
        entry = entry.rename(entry.with_name(f"{entry.name}.removed"))
    entry.rmtree()


def named_leaves(tree: Any, separator: str = ".") -> dict[str, Any]:
    """Path -> leaf."""
    paths, _ = jax.tree.flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator=separator): leaf for path, leaf in paths}
    if len(named) != len(paths):
        raise ValueError("two leaves of the state have one name")
    return named


def _in_host_memory(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == offload.HOST


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

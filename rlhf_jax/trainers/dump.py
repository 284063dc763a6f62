"""What a step learnt from, kept in RUN_DIR/dumps/PHASE/STEP where its updates were not finite.

Arrays are in `arrays.npz` (no pickles), all else in `dump.json`. A dump holds no parameters: those are in the
checkpoints.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import shutil
import zipfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from rlhf_jax.checkpoint import named_leaves
from rlhf_jax.errors import InputError
from rlhf_jax.records import write_atomically
from rlhf_jax.sharding.processes import fetch, on_primary
from rlhf_jax.trainers.health import PHASE
from rlhf_jax.trainers.ppo import Experience
from rlhf_jax.types import Rollout
from rlhf_jax.versions import versions

log = logging.getLogger("rlhf_jax")

DUMPS, ARRAYS, NOTES = "dumps", "arrays.npz", "dump.json"
PHASES = ("sft", "reward", PHASE)
KEPT = 3  # newest dumps of a phase


@dataclasses.dataclass(frozen=True)
class Batch:
    """What the updates of one PPO iteration learn from."""

    experience: Experience
    shuffle_key: jax.Array  # orders the minibatches
    kl_coef: Any  # float32
    warming_up: bool  # only the critic learns


@dataclasses.dataclass(frozen=True)
class Dump:
    """A dump as it was read: its batch in host memory, and the metrics of its step."""

    path: epath.Path
    phase: str
    step: int  # done with it
    batch: Any  # a Batch; of SFT and the reward model's training, the arrays of their batch by name
    metrics: dict[str, float | None]

    @property
    def run_dir(self) -> epath.Path:
        return self.path.parent.parent.parent


def write_dump(run_dir: Any, phase: str, step: int, batch: Any, metrics: Mapping[str, Any]) -> epath.Path:
    """Writes a dump whole or not at all, and removes all but the newest. All processes call it.

    Args:
      batch: a Batch, or the batch of another phase: a tree of arrays.
    """
    path = epath.Path(run_dir) / DUMPS / phase / str(step)
    arrays, more = _packed(batch) if isinstance(batch, Batch) else (fetch(named_leaves(batch)), {})
    notes = {
        "phase": phase,
        "step": step,
        **more,
        "metrics": {name: _plain(number) for name, number in metrics.items()},
        "versions": versions(),
    }

    def write() -> None:
        try:
            _write(path, arrays, notes)
        except OSError as error:  # a full disk is no reason to end a run that may recover
            log.warning("%s cannot be written: %s", path, error)

    on_primary(write)
    return path


def note_in_dump(path: epath.Path, **more: Any) -> None:
    """Adds to what a dump says of itself, where it could be written."""
    if not (path / NOTES).exists():
        return
    notes = json.loads((path / NOTES).read_text())
    write_atomically(path / NOTES, json.dumps(notes | more, indent=1) + "\n")


def read_dump(path: Any) -> Dump:
    """A dump by its folder.

    Raises:
      InputError: it is no dump, or a damaged one.
    """
    place = epath.Path(path)
    if not (place / NOTES).exists():
        raise InputError(f"{place} is no dump: it has no {NOTES}; give one such as RUN_DIR/{DUMPS}/ppo/12")
    try:
        notes = json.loads((place / NOTES).read_text())
        with np.load(io.BytesIO((place / ARRAYS).read_bytes()), allow_pickle=False) as file:
            arrays: dict[str, Any] = {name: file[name] for name in file.files}
        phase = notes["phase"]
        if phase not in PHASES:
            raise ValueError(f"it is of {phase!r}, not of {', '.join(PHASES)}")
        batch = _unpacked(arrays, notes) if phase == PHASE else arrays
        return Dump(place, phase, int(notes["step"]), batch, dict(notes["metrics"]))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{place} cannot be read ({error!r}); it is damaged, take another dump") from None


def _write(path: epath.Path, arrays: dict[str, Any], notes: dict[str, Any]) -> None:
    held = io.BytesIO()
    np.savez(held, **arrays)
    remote = "://" in str(path)
    folder = path if remote else path.with_name(f".{path.name}.tmp")
    if folder.exists():
        folder.rmtree()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ARRAYS).write_bytes(held.getvalue())
    (folder / NOTES).write_text(json.dumps(notes, indent=1, allow_nan=False) + "\n")  # last: a dump has it
    if not remote:
        shutil.rmtree(path, ignore_errors=True)
        folder.rename(path)
    steps = sorted((entry for entry in path.parent.iterdir() if entry.name.isdigit()), key=_step)
    for entry in steps[:-KEPT]:
        entry.rmtree()


def _step(entry: epath.Path) -> int:
    return int(entry.name)


def _packed(batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, notes) of a PPO batch."""
    arrays = fetch(named_leaves(batch.experience))
    arrays["kl_coef"] = np.asarray(fetch(batch.kl_coef))
    arrays["shuffle_key"] = np.asarray(fetch(jax.random.key_data(batch.shuffle_key)))
    return arrays, {"warming_up": batch.warming_up}


def _unpacked(arrays: Mapping[str, Any], notes: Mapping[str, Any]) -> Batch:
    rollout = {name: arrays[f"rollout.{name}"] for name in _array_fields(Rollout)}
    rest = {name: arrays[name] for name in _array_fields(Experience) if name != "rollout"}
    return Batch(
        experience=Experience(rollout=Rollout(**rollout), **rest),
        shuffle_key=jax.random.wrap_key_data(arrays["shuffle_key"]),
        kl_coef=arrays["kl_coef"],
        warming_up=bool(notes["warming_up"]),
    )


def _array_fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.metadata.get("pytree_node", True)]


def _plain(number: Any) -> float | None:
    return float(number) if np.isfinite(number) else None

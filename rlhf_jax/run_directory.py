"""The directory of a run: who may write in it, and which configuration it belongs to."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import socket
from collections.abc import Collection, Iterator

from etils import epath

from rlhf_jax.config import flat, load_config, to_yaml
from rlhf_jax.errors import InputError
from rlhf_jax.records import write_atomically
from rlhf_jax.settings import Config

# A resumed run may change how far it goes, how it lies on the devices, and what it keeps and shows. All else
# decides the numbers in metrics.jsonl, and one file must not mix two configurations.
MAY_CHANGE = frozenset(
    {
        "ppo.iterations",
        "run.dir",
        "run.resume",
        "run.save_every",
        "run.keep",
        "run.profile_every",
        "run.profile",
        "run.max_bad_steps",
        "run.tensorboard",
        "policy.remat",
        "sft.micro_batch_size",
        "reward.micro_batch_size",
        "ppo.micro_batch_size",
        "rollout.slots",
        "eval.batch_size",
        "reward.retries",
        "reward.timeout",
        "reward.fallback",
        "health.kl",
        "health.score_fall",
        "health.entropy",
        "health.length_fall",
        "health.cut_off",
        "health.explained_variance",
        "health.stop",
    }
)
# How records.py and models/export.py name what is not yet, or no longer, in its place.
UNFINISHED = re.compile(
    r"\.(?P<name>\w+\.(?:yaml|jsonl?|html)|sft_policy|best_policy|best_reward_model)"
    r"\.(?:\d+\.tmp|[0-9a-f]{8}(?P<old>\.old)?)"
)
OUTPUTS = ("metrics.jsonl", "samples.jsonl", "eval.json", "checkpoints", "best_policy", "best_reward_model")


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """An open run directory. `resumed` says that it held this run already."""

    path: epath.Path
    resumed: bool


@contextlib.contextmanager
def open_run(config: Config) -> Iterator[RunDirectory]:
    """Create or reopen `run.dir`, hold its lock, and write config.yaml.

    Read the data and check everything else first: nothing is created where this directory is refused, and a
    directory once made says that a run began. Of several processes, the first one makes and locks it.
    """
    from rlhf_jax.sharding.processes import barrier, on_primary  # reading a directory needs no jax

    path = check_directory(config)
    run = RunDirectory(path, (path / "config.yaml").exists())
    barrier("the run directory is looked at")
    with contextlib.ExitStack() as stack:

        def enter() -> None:
            nonlocal run
            run = stack.enter_context(_opened(path, config))

        on_primary(enter)
        yield run


@contextlib.contextmanager
def _opened(path: epath.Path, config: Config) -> Iterator[RunDirectory]:
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run.dir={path} cannot be made: {error.strerror}; choose another") from None
    with _lock(path):
        resumed = _check(path, config)
        _clear_away(path)
        before = {entry.name for entry in path.iterdir()}
        try:
            write_atomically(path / "config.yaml", to_yaml(config))
        except OSError as error:
            raise InputError(f"run.dir={path} cannot be written: {error.strerror}; choose another") from None
        try:
            yield RunDirectory(path, resumed)
        except InputError:
            if not resumed:
                _take_back(path, before, made)
            raise


def check_directory(config: Config) -> epath.Path:
    """The absolute path of `run.dir`; raises InputError where this run may not begin or go on there."""
    try:
        path = epath.Path(config.run.dir)
        if "://" not in config.run.dir:
            path = epath.Path(os.path.abspath(os.path.expanduser(config.run.dir)))
        _check(path, config)
    except (OSError, ImportError) as error:  # not readable, or no client for this kind of place
        raise InputError(f"run.dir={config.run.dir} cannot be reached: {error}; choose another") from None
    return path


def _clear_away(path: epath.Path) -> None:
    """Remove what a killed process was writing beside its place; what it had moved aside is put back."""
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name):
        if match := UNFINISHED.fullmatch(entry.name):
            target = path / match["name"]
            if match["old"] and not target.exists():
                entry.rename(target)
            elif entry.is_dir():
                entry.rmtree()
            else:
                entry.unlink()


def _take_back(path: epath.Path, before: set[str], made: list[epath.Path]) -> None:
    """Remove what a run that has recorded nothing wrote: its configuration would refuse the mended one."""
    if {entry.name for entry in path.iterdir()} - before - {"config.yaml"}:
        return
    (path / "config.yaml").unlink(missing_ok=True)
    if made:
        (path / ".lock").unlink(missing_ok=True)
    for folder in made:
        folder.rmdir()


def _check(path: epath.Path, config: Config) -> bool:
    """Raise InputError where this run may not go on here; return whether there is anything to go on from."""
    if not path.exists():
        return False
    if not path.is_dir():
        raise InputError(f"run.dir={path} is a file; choose another")
    if not (path / "config.yaml").exists():
        found = [name for name in OUTPUTS if (path / name).exists()]
        if found:
            raise InputError(f"run.dir={path} holds {found[0]} but no config.yaml; choose another directory")
        return False
    if config.run.resume == "never":
        raise InputError(f"run.dir={path} holds a run and run.resume=never; choose another directory")
    differing = differing_settings(load_config(str(path / "config.yaml"), []), config)
    if differing:
        shown = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
        raise InputError(
            f"run.dir={path} holds a run of another configuration: {shown}; choose another directory"
        )
    return True


def differing_settings(old: Config, new: Config, allowed: Collection[str] = MAY_CHANGE) -> list[str]:
    """`key: old -> new` of every setting that differs and may not; layouts may."""
    before, after = flat(old), flat(new)
    names = [name for name in [*before, *(set(after) - set(before))] if not name.startswith("placement.")]
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in names
        if before.get(name) != after.get(name) and name not in allowed
    ]


@contextlib.contextmanager
def _lock(path: epath.Path) -> Iterator[None]:
    """Hold an flock, which ends with the process, however that ends. Object stores have none."""
    if "://" in str(path):
        yield
        return
    try:
        file = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115, closed below
    except OSError as error:
        raise InputError(f"run.dir={path} cannot be written: {error.strerror}; choose another") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise InputError(f"run.dir={path} is in use by {holder}; wait for it or choose another") from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield

"""`rlhf-jax debug DUMP`: does the update of a dump fail again, and what in it is not finite?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from etils import epath

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.checks import check, check_devices
from rlhf_jax.config import load_config
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import read_metrics
from rlhf_jax.rollout.reward_function import RewardFunction
from rlhf_jax.rollout.reward_model import Scale
from rlhf_jax.run_directory import differing_settings
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.trainers import inputs, replay, roles
from rlhf_jax.trainers.dump import Dump, read_dump
from rlhf_jax.trainers.health import PHASE
from rlhf_jax.trainers.ppo_setup import make_evaluator, make_ppo_task
from rlhf_jax.trainers.ppo_task import PpoTask


def debug(path: Any, overrides: Sequence[str]) -> str:
    """What `explain` says of a dump of `rlhf-jax ppo` or `rlhf-jax run`.

    Args:
      overrides: settings that a resumed run may change, such as its layout on the devices.
    Raises:
      InputError: no such dump, a run directory without its configuration, or no checkpoint.
    """
    dump = read_dump(epath.Path(path).expanduser().absolute() if "://" not in str(path) else path)
    return explain(_task_of(dump, overrides), dump)


def explain(task: PpoTask, dump: Dump) -> str:
    """Replays the dump's updates at the state of a checkpoint of its run, and says what is not finite.

    For modules of your own: `task` from `own_policy_task`, `dump` from `read_dump`.
    """
    checkpoints = Checkpoints(dump.run_dir, PHASE, keep=task.config.run.keep)
    step, moved = nearest_state(checkpoints.steps(), read_metrics(dump.run_dir), dump.step)
    learner, _ = checkpoints.restore(step, task.steps.learner_shapes)
    exact = "its updates were made from this state" if not moved else f"{moved} updates lie between the two"
    skipped = {r: int(dump.metrics.get(f"{r}/skipped") or 0) for r in ("actor", "critic")}
    lines = [
        f"dump        {dump.path}: iteration {dump.step}, skipped updates: "
        + ", ".join(f"{count} of the {role}" for role, count in skipped.items()),
        f"state       {checkpoints.directory / str(step)}: {exact}",
    ]
    given = replay.inputs_of(dump.batch)
    lines += _section("what the batch came with, at response tokens", given)
    causes = [f"input: {name}" for name, (bad, *_) in given.items() if bad]
    total = bad_ones = 0
    for role in replay.roles_of(task, learner, warming_up=dump.batch.warming_up):
        all_looked = list(replay.look(task, role, dump.batch))
        failing = [looked for looked in all_looked if not looked.finite]
        total, bad_ones = total + len(all_looked), bad_ones + len(failing)
        shown = (failing or all_looked)[0]
        lines += ["", f"update of the {role.name}, minibatch {shown.minibatch + 1} of {len(all_looked)}"]
        lines += _rows(shown.outputs) + _rows(shown.terms) + _gradients(shown)
        causes += _causes(task, role, dump, shown) if failing else []
    verdict = "reproduced" if bad_ones else "not reproduced"
    lines += ["", f"fault {verdict}: {bad_ones} of {total} updates are not finite"]
    if causes:
        lines.append(f"first that is not finite: {causes[0]}")
    return "\n".join(lines)


def nearest_state(steps: Sequence[int], records: Sequence[dict[str, Any]], step: int) -> tuple[int, int]:
    """(checkpoint, updates between its state and that of the dumped step).

    Args:
      steps: of the checkpoints.   records: of metrics.jsonl.   step: of the dump.
    Raises:
      InputError: no checkpoint at all.
    """
    if not steps:
        raise InputError("the run has no checkpoint; its dump cannot be replayed")
    taken = {
        r["step"]: int((r.get("actor/optimizer_steps") or 0) + (r.get("critic/optimizer_steps") or 0))
        for r in records
        if r["phase"] == PHASE
    }

    def between(checkpoint: int) -> int:
        low, high = sorted((checkpoint, step))
        return sum(count for number, count in taken.items() if low < number <= high)

    return min(((s, between(s)) for s in steps), key=lambda pair: (pair[1], abs(pair[0] - step)))


def _causes(task: PpoTask, role: replay.Role, dump: Dump, looked: replay.Looked) -> list[str]:
    """What is not finite, in the order in which it is computed."""
    found = [f"parameter {name} of the {role.name}" for name in replay.parameters_of(role)]
    if any(bad for bad, *_ in looked.outputs.values()):
        rows = replay.order_of(task, dump.batch)[looked.minibatch]
        module = replay.first_bad_module(role, dump.batch, rows)
        found += [f"output of {module}"] if module else []
    found += [f"{name} of the {role.name}" for name, (bad, *_) in looked.outputs.items() if bad]
    found += [f"{name} in the loss of the {role.name}" for name, (bad, *_) in looked.terms.items() if bad]
    return found + [f"gradient of {name}" for name, (bad, _) in looked.gradients.items() if bad]


def _gradients(looked: replay.Looked) -> list[str]:
    """A line for each top-level group of parameters, and one for each leaf that is not finite."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for name, pair in looked.gradients.items():
        groups.setdefault("/".join(name.split("/")[:2]), []).append(pair)
    rows = {}
    for name, pairs in groups.items():
        norm = float(np.sqrt(np.sum(np.square([norm for _, norm in pairs]))))
        rows[f"gradient norm of {name}"] = (sum(bad for bad, _ in pairs), norm, norm)
    bad = [f"    {name}: {count} entries" for name, (count, _) in looked.gradients.items() if count]
    return _rows(rows) + (["  leaves whose gradient is not finite", *bad] if bad else [])


def _section(title: str, rows: replay.Finite) -> list[str]:
    return ["", title, *_rows(rows)]


def _rows(rows: replay.Finite) -> list[str]:
    lines = []
    for name, (bad, low, high) in rows.items():
        spread = "" if not low <= high else f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        lines.append(f"  {name:<34} {f'NOT FINITE ({bad})' if bad else 'finite':<18} {spread}".rstrip())
    return lines


def _task_of(dump: Dump, overrides: Sequence[str]) -> PpoTask:
    """The task that the run's configuration describes, without its reward and its prompts."""
    file = dump.run_dir / "config.yaml"
    if not file.exists():
        raise InputError(f"{dump.run_dir} has no config.yaml; a dump is read where its run left it")
    recorded, path = load_config(str(file), []), dump.run_dir
    config = load_config(str(file), [*overrides, f"run.dir={path}"])
    if differing := differing_settings(recorded, config):
        raise InputError(f"{path} is of another configuration: {', '.join(differing)}; leave these out")
    check(config)
    check_devices(config, jax.device_count())
    needs_pairs = config.policy.model == roles.NEW
    pairs = inputs.read_pairs(config.data, config.run.seed).train if needs_pairs else ()
    policy = roles.initial_policy(config, path, pairs)
    reward = roles.trained_reward_model(config, path) if config.critic.init == "reward" else None
    views = make_views(config)
    evaluator = make_evaluator(config, policy, RewardFunction(_unused), Scale(), views, None)
    task, _ = make_ppo_task(config, views, policy, reward, evaluator, (), (), _unused)
    return task


def _unused(*args: Any) -> NoReturn:
    raise AssertionError("a replay neither scores nor exports")

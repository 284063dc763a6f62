"""`rlhf-jax debug DUMP`: does the update of a dump fail again, and what in it is not finite?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from etils import epath

from rlhf_jax.checks import check, check_devices
from rlhf_jax.config import load_config
from rlhf_jax.data.preferences import Preference
from rlhf_jax.errors import InputError
from rlhf_jax.rollout.reward_function import RewardFunction
from rlhf_jax.rollout.reward_model import Scale
from rlhf_jax.run_directory import differing_settings
from rlhf_jax.settings import Config
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.trainers import inputs, replay, roles
from rlhf_jax.trainers.dump import Dump, read_dump
from rlhf_jax.trainers.findings import bad_names, look_lines, nearest_checkpoint, rows_of, verdict
from rlhf_jax.trainers.health import PHASE
from rlhf_jax.trainers.ppo_setup import make_evaluator, make_ppo_task
from rlhf_jax.trainers.ppo_task import PpoTask
from rlhf_jax.trainers.roles import LoadedModel
from rlhf_jax.trainers.supervised_replay import explain_supervised


def debug(path: Any, overrides: Sequence[str]) -> str:
    """What a replay finds in a dump: `explain` for PPO, `explain_supervised` for SFT and the reward model.

    Args:
      overrides: settings that a resumed run may change, such as its layout on the devices.
    Raises:
      InputError: no such dump, a run directory without its configuration, or no checkpoint.
    """
    dump = read_dump(epath.Path(path).expanduser().absolute() if "://" not in str(path) else path)
    config = _config_of(dump, overrides)
    if dump.phase == PHASE:
        return explain(_task_of(config, dump), dump)
    return explain_supervised(config, dump, _start_of(config, dump))


def explain(task: PpoTask, dump: Dump) -> str:
    """Replays the dump's updates at the state of a checkpoint of its run, and says what is not finite.

    For modules of your own: `task` from `own_policy_task`, `dump` from `read_dump`.
    """
    checkpoints, step, state_line = nearest_checkpoint(dump, task.config.run.keep)
    learner, _ = checkpoints.restore(step, task.steps.learner_shapes)
    skipped = {r: int(dump.metrics.get(f"{r}/skipped") or 0) for r in ("actor", "critic")}
    lines = [
        f"dump        {dump.path}: iteration {dump.step}, skipped updates: "
        + ", ".join(f"{count} of the {role}" for role, count in skipped.items()),
        state_line,
    ]
    given = replay.inputs_of(dump.batch)
    lines += ["", "what the batch came with, at response tokens", *rows_of(given)]
    causes = bad_names(given, "input: {name}")
    total = bad_ones = 0
    for role in replay.roles_of(task, learner, warming_up=dump.batch.warming_up):
        all_looked = list(replay.look(task, role, dump.batch))
        failing = [looked for looked in all_looked if not looked.finite]
        total, bad_ones = total + len(all_looked), bad_ones + len(failing)
        shown = (failing or all_looked)[0]
        lines += ["", f"update of the {role.name}, minibatch {shown.minibatch + 1} of {len(all_looked)}"]
        lines += look_lines(shown)
        causes += _causes(task, role, dump, shown) if failing else []
    return "\n".join(lines + verdict(bad_ones, total, causes))


def _causes(task: PpoTask, role: replay.Role, dump: Dump, looked: replay.Looked) -> list[str]:
    """What is not finite, in the order in which it is computed."""
    found = [f"parameter {name} of the {role.name}" for name in replay.nonfinite_leaves(role.params)]
    if any(bad for bad, *_ in looked.outputs.values()):
        rows = replay.order_of(task, dump.batch)[looked.minibatch]
        module = replay.first_bad_module(role, dump.batch, rows)
        found += [f"output of {module}"] if module else []
    found += bad_names(looked.outputs, f"{{name}} of the {role.name}")
    found += bad_names(looked.terms, f"{{name}} in the loss of the {role.name}")
    return found + bad_names(looked.gradients, "gradient of {name}")


def _config_of(dump: Dump, overrides: Sequence[str]) -> Config:
    """The run's configuration."""
    file = dump.run_dir / "config.yaml"
    if not file.exists():
        raise InputError(f"{dump.run_dir} has no config.yaml; a dump is read where its run left it")
    recorded, path = load_config(str(file), []), dump.run_dir
    config = load_config(str(file), [*overrides, f"run.dir={path}"])
    if differing := differing_settings(recorded, config):
        raise InputError(f"{path} is of another configuration: {', '.join(differing)}; leave these out")
    check(config)
    check_devices(config, jax.device_count())
    return config


def _start_of(config: Config, dump: Dump) -> LoadedModel:
    """The model that fine-tuning or the reward model's training began with."""
    if dump.phase == "sft":
        return roles.sft_start(config, _pairs_of(config))
    return roles.reward_start(config, roles.initial_policy(config, dump.run_dir, _pairs_of(config)))


def _pairs_of(config: Config) -> Sequence[Preference]:
    """What a new policy's tokenizer was trained on."""
    needed = config.policy.model == roles.NEW
    return inputs.read_pairs(config.data, config.run.seed).train if needed else ()


def _task_of(config: Config, dump: Dump) -> PpoTask:
    """The PPO task that the configuration describes, without its reward and its prompts."""
    policy = roles.initial_policy(config, dump.run_dir, _pairs_of(config))
    reward = roles.trained_reward_model(config, dump.run_dir) if config.critic.init == "reward" else None
    views = make_views(config)
    evaluator = make_evaluator(config, policy, RewardFunction(_unused), Scale(), views, None)
    task, _ = make_ppo_task(config, views, policy, reward, evaluator, (), (), _unused)
    return task


def _unused(*args: Any) -> NoReturn:
    raise AssertionError("a replay neither scores nor exports")

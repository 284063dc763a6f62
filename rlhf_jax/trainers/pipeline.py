"""The commands: each phase on its own, and `run`, which is all of them in a row.

Phases hand over through Hugging Face directories in the run's directory, so that each can be started again
alone: sft_policy/ and best_reward_model/ are what PPO begins with, best_policy/ is what it ends with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from etils import epath

from rlhf_jax.checks import check_devices
from rlhf_jax.data.preferences import Preference
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import MetricsLog, SamplesLog
from rlhf_jax.models.export import export_model
from rlhf_jax.models.huggingface import read_hf_config
from rlhf_jax.models.lora import merged
from rlhf_jax.records import write_atomically
from rlhf_jax.report import write_report
from rlhf_jax.rollout.reward_model import Scale
from rlhf_jax.run_directory import check_directory, open_run
from rlhf_jax.settings import Config
from rlhf_jax.sharding.offload import check_offload
from rlhf_jax.sharding.placement import Views, make_views
from rlhf_jax.sharding.processes import agreed, is_primary, on_primary
from rlhf_jax.storage import room_in
from rlhf_jax.trainers import inputs, roles
from rlhf_jax.trainers.evaluate import Evaluator, compare
from rlhf_jax.trainers.ppo import Learner
from rlhf_jax.trainers.ppo_loop import export_latest, train_ppo
from rlhf_jax.trainers.ppo_setup import make_evaluator, make_ppo_task, measure_scale, scorer_of
from rlhf_jax.trainers.ppo_task import PpoTask
from rlhf_jax.trainers.preflight import check_run
from rlhf_jax.trainers.reward import train_accuracy, train_reward_model
from rlhf_jax.trainers.roles import BEST_POLICY, BEST_REWARD_MODEL, SFT_POLICY, LoadedModel
from rlhf_jax.trainers.sft import train_sft
from rlhf_jax.trainers.timing import CompileClock

log = logging.getLogger("rlhf_jax")

REWARD_SCALE = "reward_scale.json"


@dataclasses.dataclass(frozen=True)
class Job:
    """One command at work."""

    config: Config
    read_pairs: inputs.Pairs | None
    read_prompts: inputs.PromptSplit | None
    views: Views
    path: epath.Path
    metrics: MetricsLog
    clock: CompileClock

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def training_pairs(self) -> Sequence[Preference]:
        return self.read_pairs.train if self.read_pairs else ()

    @property
    def held_out_pairs(self) -> Sequence[Preference]:
        return self.read_pairs.held_out if self.read_pairs else ()

    @property
    def prompts(self) -> inputs.PromptSplit:
        return self.read_prompts or inputs.PromptSplit((), ())


@contextlib.contextmanager
def _job(config: Config, *phases: str) -> Iterator[Job]:
    """Reads all input and checks it for these phases; only then is the run's directory made."""
    check_devices(config, jax.device_count(), jax.process_count())
    path = check_directory(config)
    prompts = phases != ("sft",)
    needs_pairs = (
        bool({"sft", "reward"}.intersection(phases))
        or config.data.prompts is None
        or config.policy.model == roles.NEW
    )
    read = inputs.read_pairs(config.data, config.run.seed) if needs_pairs else None
    split = (
        inputs.split_prompts(config.data, read, config.run.seed, held_out=config.eval.prompts)
        if prompts
        else None
    )
    check_run(config, phases, path, read, split)
    views = make_views(config)
    check_offload(config, views)
    with (
        room_in(path),
        open_run(config) as directory,
        MetricsLog(directory.path, tensorboard=config.run.tensorboard, writes=is_primary()) as metrics,
    ):
        yield Job(config, read, split, views, directory.path, metrics, CompileClock())


def run(config: Config) -> None:
    """Everything: SFT, reward model, PPO, evaluation, report."""
    phases = {"sft": config.sft.epochs > 0, "reward": config.reward.function is None, "ppo": True}
    with _job(config, *(phase for phase, wanted in phases.items() if wanted)) as job:
        if phases["sft"]:
            _sft(job)
        if phases["reward"]:
            _reward(job)
        _ppo(job)
        _evaluate(job)
        on_primary(lambda: write_report(job.path))


def sft(config: Config) -> None:
    """Fine-tunes the policy on the chosen responses; writes sft_policy/."""
    if config.sft.epochs == 0:
        raise InputError("sft.epochs=0 leaves nothing to do; use sft.epochs=1 or more")
    with _job(config, "sft") as job:
        _sft(job)


def reward(config: Config) -> None:
    """Trains the reward model; writes best_reward_model/."""
    if config.reward.function is not None:
        raise InputError("reward.function is set, and there is no reward model to train; leave it out")
    with _job(config, "reward") as job:
        _reward(job)


def ppo(config: Config) -> None:
    """Improves the policy; writes best_policy/."""
    with _job(config, "ppo") as job:
        _ppo(job)


def evaluate(config: Config) -> None:
    """Compares best_policy/ with the policy that PPO began with; writes eval.json and samples.jsonl."""
    with _job(config, "eval") as job:
        _evaluate(job)


def export(config: Config) -> None:
    """Writes the newest PPO checkpoint's actor as best_policy/."""
    with _job(config, "export") as job:
        task, _ = _ppo_task(job)
        export_latest(task, job.path)


def _sft(job: Job) -> None:
    config = job.config
    policy = roles.sft_start(config, job.training_pairs)
    train_sft(
        policy,
        job.training_pairs,
        job.held_out_pairs,
        settings=config.sft,
        run=config.run,
        view=job.views.train,
        run_dir=job.path,
        metrics=job.metrics,
        clock=job.clock,
        save_best=functools.partial(_export, job.path / SFT_POLICY, policy),
    )


def _reward(job: Job) -> None:
    config, directory = job.config, job.path / BEST_REWARD_MODEL
    policy = _initial_policy(job)
    backbone = roles.reward_start(config, policy)
    train_reward_model(
        backbone,
        job.training_pairs,
        job.held_out_pairs,
        settings=config.reward,
        run=config.run,
        view=job.views.reward,
        run_dir=job.path,
        metrics=job.metrics,
        clock=job.clock,
        save_best=functools.partial(_export, directory, backbone),
    )
    if agreed("gain" in _notes(directory)):
        return
    best = roles.load_reward_model(str(directory), config.reward.dtype)
    accuracy = train_accuracy(
        best, job.training_pairs, len(job.held_out_pairs), config.reward, job.views.reward
    )
    scale = _measure_scale(job, policy, best)
    _write_notes(directory, {"train_accuracy": accuracy, **dataclasses.asdict(scale)})


def _ppo(job: Job) -> None:
    task, first_learner = _ppo_task(job)
    train_ppo(task, job.path, first_learner, job.metrics, job.clock)


def _ppo_task(job: Job) -> tuple[PpoTask, Callable[[], Learner]]:
    policy, reward, evaluator = _judged(job)
    actor = roles.adapted(policy, job.config.lora, job.seed)

    def save_policy(params: Any, step: int) -> None:
        _export(job.path / BEST_POLICY, actor, params, {"step": step})

    return make_ppo_task(
        job.config, job.views, policy, reward, evaluator, job.prompts.train, job.prompts.held_out, save_policy
    )


def _judged(job: Job) -> tuple[LoadedModel, LoadedModel | None, Evaluator]:
    """The policy that PPO begins with, the reward model, and the evaluator with its standardised scores."""
    policy, reward = _initial_policy(job), _trained_reward_model(job)
    scorer = scorer_of(job.config, reward, policy, job.views)
    scale = Scale() if reward is None else _scale(job, policy, reward)
    gold = inputs.gold_of(job.config.data)
    return policy, reward, make_evaluator(job.config, policy, scorer, scale, job.views, gold)


def _evaluate(job: Job) -> None:
    """Before and after, on the same prompts with the same keys."""
    directory = job.path / BEST_POLICY
    policy, reward, evaluator = _judged(job)
    step = _notes(directory).get("step", job.config.ppo.iterations)
    responses = {}
    for when, source in (
        ("before", policy),
        ("after", roles.load_language_model(directory, job.config.policy)),
    ):
        responses[when] = evaluator(source.place(job.views.train), job.prompts.held_out)
    result = compare(responses["before"], responses["after"], seed=job.seed)
    numbers = ("validation_accuracy", "validation_pairs", "train_accuracy")
    notes = {} if reward is None else _notes(_reward_directory(job))
    result["reward_model"] = {name: notes.get(name) for name in numbers}
    with SamplesLog(job.path, writes=is_primary()) as samples:
        samples.rewind("eval", -1)
        for when, sampled in responses.items():
            samples.write([response.record(step if when == "after" else 0, when) for response in sampled])
    if is_primary():
        write_atomically(job.path / "eval.json", json.dumps(result, indent=2) + "\n")
        _say(result)


def _say(result: dict[str, Any]) -> None:
    policy = result["policy"]
    difference = policy["paired_difference"]
    print(
        f"score {policy['before']['mean']:.2f} -> {policy['after']['mean']:.2f} "
        f"on {policy['prompts']} held-out prompts: difference {difference['mean']:.2f} "
        f"[{difference['ci95_low']:.2f}, {difference['ci95_high']:.2f}], "
        f"win rate {policy['win_rate']:.2f}, KL {policy['kl']:.1f} nats a response",
        flush=True,
    )


def _initial_policy(job: Job) -> LoadedModel:
    return roles.initial_policy(job.config, job.path, job.training_pairs)


def _trained_reward_model(job: Job) -> LoadedModel | None:
    return roles.trained_reward_model(job.config, job.path)


def _reward_directory(job: Job) -> str:
    return roles.reward_directory(job.config, job.path)


def _scale(job: Job, policy: LoadedModel, reward: LoadedModel) -> Scale:
    """The scale beside the reward model; where it has none, this run's own, measured once."""
    notes, own = _notes(_reward_directory(job)), job.path / REWARD_SCALE
    if "gain" in notes:
        return Scale(notes["gain"], notes["bias"])
    if agreed(own.exists()):
        return Scale(**json.loads(own.read_text()))
    scale = _measure_scale(job, policy, reward)
    on_primary(lambda: write_atomically(own, json.dumps(dataclasses.asdict(scale)) + "\n"))
    return scale


def _measure_scale(job: Job, policy: LoadedModel, reward: LoadedModel) -> Scale:
    scorer = scorer_of(job.config, reward, policy, job.views)
    evaluator = make_evaluator(job.config, policy, scorer, Scale(), job.views, None)
    return measure_scale(evaluator, job.prompts.train)


def _notes(directory: epath.Path | str) -> dict[str, Any]:
    """What an export of ours says of itself in config.json."""
    return read_hf_config(directory).get("rlhf_jax", {})


def _write_notes(directory: epath.Path, notes: dict[str, Any]) -> None:
    config = read_hf_config(directory)
    config["rlhf_jax"] = {**config.get("rlhf_jax", {}), **notes}
    on_primary(lambda: write_atomically(directory / "config.json", json.dumps(config, indent=2) + "\n"))


def _export(directory: epath.Path, source: LoadedModel, params: Any, notes: dict[str, Any]) -> None:
    """Parameters of the source's model, adapters merged, as a Hugging Face directory."""
    lora = getattr(source.model, "lora", None)
    export_model(
        directory,
        source.model,
        {"params": merged(params, lora) if lora else params},
        tokenizer=source.renderer.tokenizer,
        extra=notes,
        eos_ids=source.renderer.eos_ids,
    )

"""The PPO run: generate, score, advantages, update, log, maybe save."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.data.batches import batch_indices
from rlhf_jax.data.messages import Dialogue
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import MetricsLog, Progress
from rlhf_jax.settings import Config
from rlhf_jax.sharding.placement import Views
from rlhf_jax.trainers.evaluate import Evaluator, prompt_batch, response_texts
from rlhf_jax.trainers.interrupt import stop_on_signal, stopped
from rlhf_jax.trainers.optimizer import Diverged
from rlhf_jax.trainers.ppo import Learner, Statistics
from rlhf_jax.trainers.ppo_steps import PpoSteps
from rlhf_jax.trainers.timing import CompileClock, PhaseTimer, peak_flops

PHASE = "ppo"


@dataclasses.dataclass(frozen=True)
class PpoTask:
    """All that the loop needs and does not change."""

    config: Config
    views: Views
    steps: PpoSteps
    evaluator: Evaluator  # holds the reference, the scorer and the renderer
    prompts: Sequence[Dialogue]
    held_out: Sequence[Dialogue]
    save_policy: Callable[[Any, int], None]  # exports actor parameters of a step as the best policy
    flops: (
        Callable[[np.ndarray, np.ndarray], float] | None
    )  # of an iteration, from prompt and response lengths


def train_ppo(task: PpoTask, run_dir: Any, learner: Learner, log: MetricsLog, clock: CompileClock) -> Learner:
    """Runs the iterations that are left, from the last checkpoint of the run or from `learner`."""
    config = task.config
    checkpoints = Checkpoints(run_dir, PHASE, keep=config.run.keep)
    learner, best = _resume(task, checkpoints, learner, log)
    with (
        Progress(PHASE) as progress,
        stop_on_signal() as stop,
        _saving_if_diverged(checkpoints, log, lambda: (learner, best)),
    ):
        pending = _Pending(task, log, progress)
        for iteration in range(int(learner.iteration), config.ppo.iterations):
            started, compiled = time.perf_counter(), clock.seconds
            timed = PhaseTimer(clock, enabled=_due(iteration, config.run.profile_every))
            learner, metrics = iterate(task, learner, iteration, timed)
            pending.flush(learner)
            spent, compiling = time.perf_counter() - started, clock.seconds - compiled
            pending.put(iteration + 1, metrics, timed.seconds, spent - compiling, compiling)
            last = iteration + 1 == config.ppo.iterations
            if _due(iteration, config.eval.every) or (last and config.eval.every):
                pending.flush(learner)
                best = _evaluate(task, learner, iteration + 1, log, best)
            if last or stop or _due(iteration, config.run.save_every):
                pending.flush(learner)
                _save(checkpoints, learner, best, log)
            if stop and not last:
                stopped(stop, run_dir)
        pending.flush(learner)
    if not config.eval.every:
        task.save_policy(learner.actor.params, config.ppo.iterations)
    checkpoints.close()
    return learner


def export_latest(task: PpoTask, run_dir: Any, learner: Learner) -> None:
    """Exports the actor of the newest checkpoint.

    Raises:
      InputError: there is none.
    """
    checkpoints = Checkpoints(run_dir, PHASE, keep=task.config.run.keep)
    step = checkpoints.latest_step()
    if step is None:
        raise InputError(f"{checkpoints.directory} holds no checkpoint; run `rlhf-jax ppo` first")
    learner, _ = checkpoints.restore(step, learner)
    task.save_policy(learner.actor.params, step)


def iterate(
    task: PpoTask, learner: Learner, iteration: int, timed: PhaseTimer
) -> tuple[Learner, dict[str, jax.Array]]:
    """One iteration. Randomness is a function of (run.seed, iteration) alone."""
    steps, policy, config = task.steps, task.steps.policy, task.config
    judge = task.evaluator
    generate_key, shuffle_key = jax.random.split(
        jax.random.fold_in(jax.random.key(config.run.seed), iteration)
    )
    batch = batch_indices(
        iteration,
        count=len(task.prompts),
        batch_size=config.ppo.batch_size,
        seed=config.run.seed,
        what="prompts",
    )
    messages = [task.prompts[i] for i in batch]
    rows = [judge.renderer.prompt(prompt, config.rollout.prompt_length) for prompt in messages]
    prompts = prompt_batch(
        rows, np.arange(len(rows)), width=config.rollout.prompt_length, view=task.views.generate
    )

    generation_params = timed("reshard", policy.sampler.reshard, learner.actor.params)
    rollout = policy.to_train(timed("gen", policy.sampler.generate, generation_params, prompts, generate_key))
    del generation_params
    old_logprobs_BT = timed("old", policy.logprobs, learner.actor.params, rollout)
    ref_logprobs_BT = timed("ref", policy.reference_logprobs, judge.reference_params, rollout)
    values_BT, final_values_B = timed("values", steps.values, learner.critic.params, rollout)
    texts = response_texts(judge.renderer, rollout)
    scores_B = judge.scale(timed("reward", judge.scorer, rollout, messages, texts))
    scores_B = jax.device_put(scores_B, rollout.truncated_B.sharding)

    statistics = Statistics(scores_B, old_logprobs_BT, ref_logprobs_BT, values_BT, final_values_B)
    with jax.transfer_guard("disallow"):
        experience, metrics = timed("adv", steps.experience, rollout, statistics, learner.kl_coef)
        critic, critic_metrics = timed(
            "update_critic", steps.update_critic, learner.critic, experience, shuffle_key
        )
        actor, actor_metrics = learner.actor, {}
        if iteration >= config.critic.warmup_iterations:
            actor, actor_metrics = timed(
                "update_actor", steps.update_actor, learner.actor, experience, learner.kl_coef, shuffle_key
            )
        learner = steps.advance(learner.replace(actor=actor, critic=critic), metrics["reward/kl"])
    metrics |= {f"critic/{name}": number for name, number in critic_metrics.items() if name != "loss"}
    metrics |= {f"actor/{name}": number for name, number in actor_metrics.items()}
    if judge.gold is not None:
        metrics["reward/gold_mean"] = np.mean(
            [judge.gold(*pair) for pair in zip(messages, texts, strict=True)]
        )
    metrics |= {
        "reward/kl_coef": learner.kl_coef,
        "prompt_length_B": prompts.mask_BP.sum(-1),
        "length_B": rollout.length_B,
    }
    return learner, metrics


class _Pending:
    """An iteration's metrics, fetched once the next iteration has been dispatched."""

    def __init__(self, task: PpoTask, log: MetricsLog, progress: Progress):
        self._task, self._log, self._progress = task, log, progress
        self._waiting: tuple[Any, ...] | None = None

    def put(
        self, step: int, metrics: dict[str, Any], seconds: dict[str, float], step_s: float, compile_s: float
    ) -> None:
        self._waiting = step, metrics, seconds, step_s, compile_s

    def flush(self, learner: Learner) -> None:
        if self._waiting is None:
            return
        step, metrics, seconds, step_s, compile_s = self._waiting
        self._waiting = None
        numbers = jax.device_get(metrics)
        prompt_lengths, lengths = numbers.pop("prompt_length_B"), numbers.pop("length_B")
        tokens = int(prompt_lengths.sum() + lengths.sum())
        numbers |= {**seconds, "timing_s/step": step_s, "timing_s/compile": compile_s}
        numbers |= {"perf/samples_per_s": len(lengths) / step_s, "perf/tokens_per_s": tokens / step_s}
        if self._task.flops is not None:
            rate = self._task.flops(prompt_lengths, lengths) / step_s
            numbers |= {"perf/tflops": rate / 1e12, "perf/mfu": rate / peak_flops()}
        numbers["perf/reshard_bytes"] = self._task.steps.policy.sampler.reshard_bytes
        if "timing_s/gen" in seconds:
            numbers["perf/gen_tokens_per_s"] = int(lengths.sum()) / max(seconds["timing_s/gen"], 1e-9)
        self._log.write(PHASE, step, numbers)
        self._progress.update(step, self._task.config.ppo.iterations, numbers)
        _check_finite(learner, self._task.config.run.max_bad_steps)


@contextlib.contextmanager
def _saving_if_diverged(
    checkpoints: Checkpoints, log: MetricsLog, state: Callable[[], tuple[Learner, dict[str, float]]]
) -> Iterator[None]:
    """Non-finite updates were skipped, so that the state at hand is the last good one."""
    try:
        yield
    except Diverged:
        _save(checkpoints, *state(), log)
        raise


def _check_finite(learner: Learner, limit: int) -> None:
    bad = max(int(learner.actor.bad_steps), int(learner.critic.bad_steps))
    if bad >= limit:
        raise Diverged(
            f"{bad} updates in a row were not finite (run.max_bad_steps={limit}); lower the learning rates"
        )


def _due(iteration: int, every: int) -> bool:
    """True at the end of every `every`-th iteration; never where it is 0."""
    return every > 0 and (iteration + 1) % every == 0


def _resume(
    task: PpoTask, checkpoints: Checkpoints, learner: Learner, log: MetricsLog
) -> tuple[Learner, dict[str, float]]:
    step = checkpoints.latest_step()
    if step is None:
        log.rewind(PHASE, -1)
        log.rewind("eval", -1)
        return learner, {}
    learner, host = checkpoints.restore(step, learner)
    log.rewind(PHASE, step)
    log.rewind("eval", step)
    return learner, host


def _save(checkpoints: Checkpoints, learner: Learner, best: dict[str, float], log: MetricsLog) -> None:
    log.flush()
    step = int(learner.iteration)
    if step != checkpoints.latest_step():
        checkpoints.save(step, learner, best)


def _evaluate(
    task: PpoTask, learner: Learner, step: int, log: MetricsLog, best: dict[str, float]
) -> dict[str, float]:
    """Scores the actor on the held-out prompts; the best so far is exported."""
    responses = task.evaluator(learner.actor.params, task.held_out)
    score = float(np.mean([r.score for r in responses]))
    numbers = {
        "eval/score_mean": score,
        "eval/score_std": float(np.std([r.score for r in responses])),
        "eval/kl": float(np.mean([r.kl for r in responses])),
        "eval/response_length": float(np.mean([r.length for r in responses])),
    }
    if responses[0].gold is not None:
        numbers["eval/gold_mean"] = float(np.mean([r.gold for r in responses]))
    log.write("eval", step, numbers)
    if score <= best.get("score", -np.inf):
        return best
    task.save_policy(learner.actor.params, step)
    return {"score": score, "step": step}

"""The PPO run: generate, score, advantages, update, log, maybe save."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.data.batches import batch_indices
from rlhf_jax.data.messages import Dialogue
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import MetricsLog, Progress
from rlhf_jax.models.lora import join
from rlhf_jax.rollout.prompt_batch import prompt_batch
from rlhf_jax.settings import Config
from rlhf_jax.sharding.placement import Views
from rlhf_jax.sharding.processes import fetch, is_primary, put, put_key
from rlhf_jax.sharding.rules import replicated
from rlhf_jax.trainers.evaluate import Evaluator, response_texts
from rlhf_jax.trainers.interrupt import stop_on_signal, stopped
from rlhf_jax.trainers.optimizer import Diverged
from rlhf_jax.trainers.ppo import Learner, Statistics
from rlhf_jax.trainers.ppo_steps import PpoSteps
from rlhf_jax.trainers.shared_critic import Pair
from rlhf_jax.trainers.timing import CompileClock, FirstStep, PhaseTimer, Trace, peak_flops
from rlhf_jax.types import Rollout

PHASE = "ppo"


@dataclasses.dataclass(frozen=True)
class Bases:
    """What adapters lie beside, where these are what learns: it never changes, and no checkpoint holds it."""

    actor: Any = None
    critic: Any = None


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
    bases: Bases = Bases()

    def actor_params(self, learner: Learner) -> Any:
        """All parameters of the actor."""
        return join(self.bases.actor, learner.actor.params)

    def critic_params(self, learner: Learner) -> Any:
        """All parameters of the critic."""
        return join(self.bases.critic, learner.critic.params)


def train_ppo(
    task: PpoTask, run_dir: Any, first_learner: Callable[[], Learner], log: MetricsLog, clock: CompileClock
) -> Learner:
    """Runs the iterations that are left, from the last checkpoint of the run or from the first learner.

    Raises:
      Diverged: run.max_bad_steps updates in a row were not finite. They were skipped, and the state is saved.
    """
    run, ppo, evaluate_every = task.config.run, task.config.ppo, task.config.eval.every
    checkpoints = Checkpoints(run_dir, PHASE, keep=run.keep)
    learner, best = _resume(checkpoints, task.steps.learner_shapes, first_learner, log)
    with Progress(PHASE, shown=is_primary()) as progress, stop_on_signal(run_dir) as stop, checkpoints:
        pending, trace = _Pending(task, log, progress, clock), Trace(run_dir / "profile", run.profile)
        for done, iteration in enumerate(range(int(learner.iteration), ppo.iterations)):
            trace.at(done, learner)
            timed = PhaseTimer(clock, enabled=_due(iteration, run.profile_every))
            if timed.enabled:
                pending.flush()
            learner, metrics = iterate(task, learner, iteration, timed)
            diverged, stopping = pending.flush() >= run.max_bad_steps, stop()
            pending.put(iteration + 1, metrics, timed.seconds)
            last = iteration + 1 == ppo.iterations
            if _due(iteration, evaluate_every) or (last and evaluate_every):
                pending.flush()
                best = _evaluate(task, learner, iteration + 1, log, best)
                pending.restart_clock()
            if last or stopping or diverged or _due(iteration, run.save_every):
                pending.flush()
                log.flush()
                checkpoints.save(iteration + 1, learner, best)
                pending.restart_clock()
            if diverged:
                checkpoints.wait()
                raise Diverged(
                    f"{run.max_bad_steps} updates in a row were not finite; lower the learning rates"
                )
            if stopping:
                checkpoints.wait()
                stopped(stop, run_dir)
        trace.close(learner)
    if not evaluate_every:
        task.save_policy(task.actor_params(learner), ppo.iterations)
    return learner


def export_latest(task: PpoTask, run_dir: Any) -> None:
    """Exports the actor of the newest checkpoint.

    Raises:
      InputError: there is none.
    """
    checkpoints = Checkpoints(run_dir, PHASE, keep=task.config.run.keep)
    step = checkpoints.newest_whole()
    if step is None:
        raise InputError(f"{checkpoints.directory} holds no checkpoint; run `rlhf-jax ppo` first")
    learner, _ = checkpoints.restore(step, task.steps.learner_shapes)
    task.save_policy(task.actor_params(learner), step)


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
    prompts = prompt_batch(
        lambda b: judge.renderer.prompt(messages[b], config.rollout.prompt_length),
        np.arange(len(messages)),
        limit=config.rollout.prompt_length,
        view=task.views.generate,
    )

    generation_params = timed("reshard", policy.sampler.place, task.actor_params(learner))
    rollout = policy.to_train(timed("gen", policy.sampler.generate, generation_params, prompts, generate_key))
    del generation_params
    old_logprobs_BT, values_BT, final_values_B = _judge(task, learner, rollout, timed)
    ref_logprobs_BT = timed("ref", policy.reference_logprobs, judge.reference_params, rollout)
    texts = response_texts(judge.renderer, rollout)
    scores_B = judge.scale(timed("reward", judge.scorer, rollout, messages, texts))
    scores_B = put(scores_B, rollout.truncated_B.sharding)
    shuffle_key = put_key(shuffle_key, replicated(task.views.train))

    statistics = Statistics(scores_B, old_logprobs_BT, ref_logprobs_BT, values_BT, final_values_B)
    with jax.transfer_guard("disallow"):
        experience, metrics = timed("adv", steps.experience, rollout, statistics, learner.kl_coef)
        warming_up = iteration < config.critic.warmup_iterations
        learner, update_metrics = _learn(task, learner, experience, shuffle_key, warming_up, timed)
        learner = steps.advance(learner, metrics["reward/kl"])
    metrics |= update_metrics
    if judge.gold is not None:
        metrics["reward/gold_mean"] = np.mean(
            [judge.gold(*pair) for pair in zip(messages, texts, strict=True)]
        )
    metrics |= {
        "reward/kl_coef": learner.kl_coef,
        "prompt_length_B": prompts.mask_BP.sum(-1),
        "length_B": rollout.length_B,
    }
    if config.rollout.top_k > 0 or config.rollout.top_p < 1:
        metrics["rollout/truncated_sampling"] = 1.0  # the ratios are biased: see `make_ppo_task`
    return learner, metrics


def _judge(
    task: PpoTask, learner: Learner, rollout: Rollout, timed: PhaseTimer
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """(old_logprobs_BT or None, values_BT, final_values_B) of the learner."""
    steps, actor, critic = task.steps, task.actor_params(learner), task.critic_params(learner)
    if steps.shared is not None:
        return timed("old", steps.shared.judge, actor, critic, rollout)
    old_logprobs_BT = timed("old", steps.old_logprobs, actor, rollout)
    return old_logprobs_BT, *timed("values", steps.values, critic, rollout)


def _learn(
    task: PpoTask, learner: Learner, experience: Any, key: jax.Array, warming_up: bool, timed: PhaseTimer
) -> tuple[Learner, dict[str, jax.Array]]:
    """Critic and, unless it is only warming up, actor after the passes over an experience."""
    actor, critic, steps, bases = learner.actor, learner.critic, task.steps, task.bases
    shared = steps.shared
    if shared is not None and warming_up:
        critic, metrics = timed(
            "update_critic", shared.update_head, critic, task.actor_params(learner), experience, key
        )
        return dataclasses.replace(learner, critic=critic), metrics
    if shared is not None:
        pair, metrics = timed(
            "update_actor", shared.update, Pair(actor, critic), experience, learner.kl_coef, key, bases.actor
        )
        return dataclasses.replace(learner, actor=pair.actor, critic=pair.critic), metrics
    critic, numbers = timed("update_critic", steps.update_critic, critic, experience, key, bases.critic)
    metrics = {f"critic/{name}": number for name, number in numbers.items() if name != "loss"}
    if not warming_up:
        actor, numbers = timed(
            "update_actor", steps.update_actor, actor, experience, learner.kl_coef, key, bases.actor
        )
        metrics |= {f"actor/{name}": number for name, number in numbers.items()}
    return dataclasses.replace(learner, actor=actor, critic=critic), metrics


class _Pending:
    """An iteration's metrics, fetched once the next iteration has been dispatched.

    A step's seconds are those from when the previous step was done to when it is done itself, compilation
    taken off.
    """

    def __init__(self, task: PpoTask, log: MetricsLog, progress: Progress, clock: CompileClock):
        self._task, self._log, self._progress, self._clock = task, log, progress, clock
        self._waiting: tuple[int, dict[str, Any], dict[str, float]] | None = None
        self._first = FirstStep(PHASE, clock)
        self.restart_clock()

    def restart_clock(self) -> None:
        self._since, self._compiled = time.perf_counter(), self._clock.seconds

    def put(self, step: int, metrics: dict[str, Any], seconds: dict[str, float]) -> None:
        self._waiting = step, metrics, seconds

    def flush(self) -> int:
        """Writes what waits. Returns how many updates in a row were skipped because they were not finite."""
        if self._waiting is None:
            return 0
        step, metrics, seconds = self._waiting
        self._waiting = None
        numbers = fetch(metrics)
        self._first.done()
        compile_s = self._clock.seconds - self._compiled
        step_s = max(time.perf_counter() - self._since - compile_s, 1e-9)
        self.restart_clock()
        prompt_lengths, lengths = numbers.pop("prompt_length_B"), numbers.pop("length_B")
        tokens = int(prompt_lengths.sum() + lengths.sum())
        numbers |= {**seconds, "timing_s/step": step_s, "timing_s/compile": compile_s}
        numbers |= {"perf/samples_per_s": len(lengths) / step_s, "perf/tokens_per_s": tokens / step_s}
        if self._task.flops is not None:
            rate = self._task.flops(prompt_lengths, lengths) / step_s
            numbers |= {"perf/tflops": rate / 1e12, "perf/mfu": rate / peak_flops()}
        numbers["perf/reshard_bytes"] = self._task.steps.policy.sampler.reshard.moved_bytes
        if "timing_s/gen" in seconds:
            numbers["perf/gen_tokens_per_s"] = int(lengths.sum()) / max(seconds["timing_s/gen"], 1e-9)
        self._log.write(PHASE, step, numbers)
        self._progress.update(step, self._task.config.ppo.iterations, numbers)
        return int(max(numbers["critic/bad_steps"], numbers.get("actor/bad_steps", 0)))


def _due(iteration: int, every: int) -> bool:
    """True at the end of every `every`-th iteration; never where it is 0."""
    return every > 0 and (iteration + 1) % every == 0


def _resume(
    checkpoints: Checkpoints, shapes: Learner, first_learner: Callable[[], Learner], log: MetricsLog
) -> tuple[Learner, dict[str, float]]:
    step, learner, host = checkpoints.resume(shapes) or (-1, first_learner(), {})
    log.rewind(PHASE, step)
    log.rewind("eval", step)
    return learner, host


def _evaluate(
    task: PpoTask, learner: Learner, step: int, log: MetricsLog, best: dict[str, float]
) -> dict[str, float]:
    """Scores the actor on the held-out prompts; the best so far is exported."""
    responses = task.evaluator(task.actor_params(learner), task.held_out)
    score = float(np.mean([r.score for r in responses]))
    numbers = {
        "eval/score_mean": score,
        "eval/score_std": float(np.std([r.score for r in responses])),
        "eval/kl": float(np.mean([r.kl for r in responses])),
        "eval/response_length": float(np.mean([r.length for r in responses])),
    }
    golds = [r.gold for r in responses if r.gold is not None]
    if golds:
        numbers["eval/gold_mean"] = float(np.mean(golds))
    log.write("eval", step, numbers)
    if score <= best.get("score", -np.inf):
        return best
    task.save_policy(task.actor_params(learner), step)
    return {"score": score, "step": step}

"""The PPO run: generate, score, advantages, update, log, maybe save."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.data.batches import batch_indices
from rlhf_jax.errors import Halted, InputError
from rlhf_jax.metrics import MetricsLog, Progress
from rlhf_jax.rollout.prompt_batch import prompt_batch
from rlhf_jax.rollout.scored import settled
from rlhf_jax.settings import Config
from rlhf_jax.sharding.processes import agreed, is_primary, on_primary, put, put_key
from rlhf_jax.sharding.rules import replicated
from rlhf_jax.trainers.dump import Batch, note_in_dump
from rlhf_jax.trainers.evaluate import response_texts
from rlhf_jax.trainers.health import PHASE, Unhealthy
from rlhf_jax.trainers.interrupt import stop_on_signal, stopped
from rlhf_jax.trainers.optimizer import Diverged
from rlhf_jax.trainers.pending import Pending
from rlhf_jax.trainers.ppo import Learner, Statistics
from rlhf_jax.trainers.ppo_task import PpoTask
from rlhf_jax.trainers.replay import nonfinite_gradients
from rlhf_jax.trainers.shared_critic import Pair
from rlhf_jax.trainers.timing import CompileClock, PhaseTimer, Trace
from rlhf_jax.types import Rollout


def train_ppo(
    task: PpoTask, run_dir: Any, first_learner: Callable[[], Learner], log: MetricsLog, clock: CompileClock
) -> Learner:
    """Runs the iterations that are left, from the last checkpoint of the run or from the first learner.

    Raises:
      Diverged: run.max_bad_steps updates in a row were not finite. They were skipped, and the state is saved.
      Unhealthy: a sign that health.stop names. The state is saved.
    """
    run, ppo, evaluate_every = task.config.run, task.config.ppo, task.config.eval.every
    checkpoints = Checkpoints(run_dir, PHASE, keep=run.keep)
    learner, best = _resume(checkpoints, task.steps.learner_shapes, first_learner, log)
    start = int(learner.iteration)
    if _evaluates(task.config, start) and agreed((log.last("eval") or 0) < start):  # it ended a run before
        best = _evaluate(task, learner, start, log, best)
    with (
        Progress(PHASE, shown=is_primary()) as progress,
        stop_on_signal(run_dir) as stop,
        checkpoints,
        contextlib.ExitStack() as stack,
    ):
        trace = Trace(run_dir / "profile", run.profile)
        pending = stack.enter_context(contextlib.closing(Pending(task, run_dir, log, progress, clock, start)))

        @contextlib.contextmanager
        def keeping(learner: Learner) -> Iterator[None]:
            """Where a reward fails inside, what was done before is saved."""
            try:
                yield
            except InputError:
                pending.flush()
                _save(checkpoints, learner, best, log)
                raise

        for done, iteration in enumerate(range(start, ppo.iterations)):
            trace.at(done, learner)
            timed = PhaseTimer(clock, enabled=_due(iteration, run.profile_every))
            if timed.enabled:
                pending.flush()
            with keeping(learner):
                learner, metrics, batch = iterate_with_batch(task, learner, iteration, timed)
            pending.flush()
            stopping = stop()
            pending.put(iteration + 1, metrics, timed.seconds, batch)
            checkpoints.look()
            last = iteration + 1 == ppo.iterations
            if _evaluates(task.config, iteration + 1):
                pending.flush()
                with keeping(learner):
                    best = _evaluate(task, learner, iteration + 1, log, best)
                pending.restart_clock()
            if last or stopping or pending.halts or _due(iteration, run.save_every):
                pending.flush()
                _save(checkpoints, learner, best, log)
                pending.restart_clock()
            if pending.halts:
                checkpoints.wait()
                raise _end_of(task, learner, pending)
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
    learner, metrics, _ = iterate_with_batch(task, learner, iteration, timed)
    return learner, metrics


def iterate_with_batch(
    task: PpoTask, learner: Learner, iteration: int, timed: PhaseTimer
) -> tuple[Learner, dict[str, jax.Array], Batch]:
    """`iterate`, with what the updates learnt from."""
    steps, policy, config = task.steps, task.steps.policy, task.config
    judge = task.evaluator
    generate_key, shuffle_key = jax.random.split(
        jax.random.fold_in(jax.random.key(config.run.seed), iteration)
    )
    rows = batch_indices(
        iteration,
        count=len(task.prompts),
        batch_size=config.ppo.batch_size,
        seed=config.run.seed,
        what="prompts",
    )
    messages = [task.prompts[i] for i in rows]
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
    scored = timed("reward", judge.scorer, rollout, messages, texts)
    scores_B, failed_B = settled(
        judge.scale(scored.scores_B), scored.reasons, rows.tolist(), fallback=judge.fallback
    )
    scores_B = put(scores_B, rollout.truncated_B.sharding)
    shuffle_key = put_key(shuffle_key, replicated(task.views.train))

    statistics = Statistics(scores_B, old_logprobs_BT, ref_logprobs_BT, values_BT, final_values_B)
    with jax.transfer_guard("disallow"):
        experience, metrics = timed("adv", steps.experience, rollout, statistics, learner.kl_coef)
        warming_up = iteration < config.critic.warmup_iterations
        batch = Batch(experience, shuffle_key, learner.kl_coef, warming_up)
        learner, update_metrics = _learn(task, learner, batch, timed)
        learner = steps.advance(learner, metrics["reward/kl"])
    metrics |= update_metrics
    if judge.gold is not None:
        metrics["reward/gold_mean"] = np.mean(
            [judge.gold(*pair) for pair in zip(messages, texts, strict=True)]
        )
    metrics |= {
        "reward/kl_coef": learner.kl_coef,
        "reward/failed": failed_B.sum(),
        "prompt_length_B": prompts.mask_BP.sum(-1),
        "length_B": rollout.length_B,
    }
    if config.rollout.top_k > 0 or config.rollout.top_p < 1:
        metrics["rollout/truncated_sampling"] = 1.0  # the ratios are biased: see `make_ppo_task`
    return learner, metrics, batch


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
    task: PpoTask, learner: Learner, batch: Batch, timed: PhaseTimer
) -> tuple[Learner, dict[str, jax.Array]]:
    """Critic and, unless it is only warming up, actor after the passes over an experience."""
    actor, critic, steps, bases = learner.actor, learner.critic, task.steps, task.bases
    experience, key, shared = batch.experience, batch.shuffle_key, steps.shared
    if shared is not None and batch.warming_up:
        critic, metrics = timed(
            "update_critic", shared.update_head, critic, task.actor_params(learner), experience, key
        )
        return dataclasses.replace(learner, critic=critic), metrics
    if shared is not None:
        pair, metrics = timed(
            "update_actor", shared.update, Pair(actor, critic), experience, batch.kl_coef, key, bases.actor
        )
        return dataclasses.replace(learner, actor=pair.actor, critic=pair.critic), metrics
    critic, numbers = timed("update_critic", steps.update_critic, critic, experience, key, bases.critic)
    metrics = {f"critic/{name}": number for name, number in numbers.items() if name != "loss"}
    if not batch.warming_up:
        actor, numbers = timed(
            "update_actor", steps.update_actor, actor, experience, batch.kl_coef, key, bases.actor
        )
        metrics |= {f"actor/{name}": number for name, number in numbers.items()}
    return dataclasses.replace(learner, actor=actor, critic=critic), metrics


def _end_of(task: PpoTask, learner: Learner, pending: Pending) -> Halted:
    """Why a run ends; the dump of one whose updates are not finite any more gets the names of the leaves."""
    if pending.fatal is not None and not pending.diverged:
        return Unhealthy(f"{pending.fatal.text}; its state is saved, and the same command goes on from there")
    assert pending.dump is not None
    path, batch = pending.dump
    leaves = nonfinite_gradients(task, learner, batch)
    on_primary(lambda: note_in_dump(path, nonfinite_gradients=leaves))
    named = f" (first {next(iter(leaves))})" if leaves else ""
    return Diverged(
        f"{pending.bad_steps} updates in a row were not finite{named}; the last good state is saved: see "
        f"`rlhf-jax debug {path}`, lower the learning rates or mend the reward"
    )


def _due(iteration: int, every: int) -> bool:
    """True at the end of every `every`-th iteration; never where it is 0."""
    return every > 0 and (iteration + 1) % every == 0


def _evaluates(config: Config, step: int) -> bool:
    """True where the actor is evaluated after so many iterations."""
    every = config.eval.every
    return every > 0 and step > 0 and (step % every == 0 or step == config.ppo.iterations)


def _resume(
    checkpoints: Checkpoints, shapes: Learner, first_learner: Callable[[], Learner], log: MetricsLog
) -> tuple[Learner, dict[str, float]]:
    step, learner, host = checkpoints.resume(shapes) or (-1, first_learner(), {})
    log.rewind(PHASE, step)
    log.rewind("eval", step)
    return learner, host


def _save(checkpoints: Checkpoints, learner: Learner, best: dict[str, float], log: MetricsLog) -> None:
    log.flush()
    step = int(learner.iteration)
    if step > 0 and step != checkpoints.latest_step():
        checkpoints.save(step, learner, best)


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
        "eval/failed": sum(r.failed for r in responses),
        "eval/response_length": float(np.mean([r.length for r in responses])),
    }
    golds = [r.gold for r in responses if r.gold is not None]
    if golds:
        numbers["eval/gold_mean"] = float(np.mean(golds))
    log.write("eval", step, numbers)
    if not score > best.get("score", -np.inf):
        return best
    task.save_policy(task.actor_params(learner), step)
    return {"score": score, "step": step}

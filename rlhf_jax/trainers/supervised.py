"""The loop that fine-tuning and the reward model share: step, log, sometimes evaluate, keep the best."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.data.batches import batch_indices, steps_per_epoch
from rlhf_jax.metrics import MetricsLog, Progress
from rlhf_jax.models.lora import frozen, join, learnt
from rlhf_jax.settings import Reward, Run, Sft
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.processes import is_primary
from rlhf_jax.sharding.rules import in_view
from rlhf_jax.trainers.dump import write_dump
from rlhf_jax.trainers.interrupt import stop_on_signal, stopped
from rlhf_jax.trainers.optimizer import (
    Diverged,
    Learning,
    TrainState,
    init_state,
    make_optimizer,
    make_schedule,
    on_base,
    state_shardings,
    update_step,
)
from rlhf_jax.trainers.roles import LoadedModel, shardings_of
from rlhf_jax.trainers.timing import CompileClock, FirstStep


@dataclasses.dataclass(frozen=True)
class SupervisedTask:
    """What is learnt, from what, and how it is judged."""

    phase: str  # sft or reward
    settings: Sft | Reward
    run: Run
    count: int  # training rows
    rows: str  # what a row is called in messages
    batch: Callable[[np.ndarray, int], Any]  # (row numbers, groups) -> a batch on the devices, [groups, ...];
    # its `count` is the loss's denominator
    loss: Callable[..., Any]  # (params, groups of a batch, denominator=) -> (loss, metrics), sums over groups
    evaluate: Callable[[Any], dict[str, float]]  # params -> numbers on held-out rows
    goodness: Callable[[dict[str, float]], float]  # of those numbers; the highest is kept
    save_best: Callable[[Any, dict[str, float]], None]  # exports parameters with the numbers


def train_supervised(
    task: SupervisedTask,
    start: LoadedModel,
    view: View,
    run_dir: Any,
    log: MetricsLog,
    clock: CompileClock,
) -> dict[str, float]:
    """Runs the steps that are left, from the last checkpoint or from `start`.

    Returns the best evaluation's numbers; its parameters are exported.
    """
    settings, first = task.settings, FirstStep(task.phase, clock)
    per_epoch = steps_per_epoch(task.count, settings.batch_size, what=task.rows)
    total = settings.epochs * per_epoch
    steps = _make_steps(task, start, view, total)
    checkpoints = Checkpoints(run_dir, task.phase, keep=task.run.keep)
    done, state, best = checkpoints.resume(steps.shapes) or (0, steps.first_state(), {})
    log.rewind(task.phase, done)

    with Progress(task.phase, shown=is_primary()) as progress, stop_on_signal(run_dir) as stop, checkpoints:
        for number in range(done, total):
            began, compiled = time.perf_counter(), clock.seconds
            index = batch_indices(
                number, count=task.count, batch_size=settings.batch_size, seed=task.run.seed
            )
            batch = task.batch(index, steps.groups)
            state, metrics = steps.step(state, batch, steps.base)
            numbers = {f"{task.phase}/{name}": value for name, value in jax.device_get(metrics).items()}
            compiling = clock.seconds - compiled
            seconds = time.perf_counter() - began - compiling
            numbers |= {"epoch": number / per_epoch, "timing_s/step": seconds, "timing_s/compile": compiling}
            numbers |= {"perf/samples_per_s": settings.batch_size / seconds}
            last = number + 1 == total
            due = (number + 1) % settings.eval_every == 0
            if due or last:
                params = join(steps.base, state.params)
                held_out = task.evaluate(params)
                numbers |= {f"{task.phase}/{name}": value for name, value in held_out.items()}
                finite = all(map(math.isfinite, held_out.values()))
                if finite and (not best or task.goodness(held_out) > task.goodness(best)):
                    best = {**held_out, "step": number + 1}
                    task.save_best(params, best)
            first.done()
            log.write(task.phase, number + 1, numbers)
            progress.update(number + 1, total, numbers)
            checkpoints.look()
            bad, stopping = int(state.bad_steps), stop()
            diverged, dump = bad >= task.run.max_bad_steps, None
            if bad == 1 or diverged:
                dump = write_dump(run_dir, task.phase, number + 1, batch, numbers)
            if due or last or stopping or diverged:
                log.flush()
                checkpoints.save(number + 1, state, best)
            if diverged:
                checkpoints.wait()
                raise Diverged(
                    f"{task.phase}: {bad} updates in a row were not finite; the last good state is saved: "
                    f"see `rlhf-jax debug {dump}`, or lower {task.phase}.learning_rate"
                )
            if stopping:
                checkpoints.wait()
                stopped(stop, run_dir)
    if not best:
        raise Diverged(
            f"{task.phase}: no evaluation was finite; lower {task.phase}.learning_rate, in another run.dir"
        )
    return best


@dataclasses.dataclass(frozen=True)
class _Steps:
    """What changes a state, and where one comes from."""

    step: Callable[..., Any]  # (state, batch, base) -> (state, metrics)
    groups: int  # of a batch: micro-batches times shards
    base: Any  # what adapters lie beside, where these are what learns
    shapes: TrainState  # of ShapeDtypeStructs with their shardings
    first_state: Callable[[], TrainState]


def _make_steps(task: SupervisedTask, start: LoadedModel, view: View, total: int) -> _Steps:
    settings, shards = task.settings, view.batch_shards
    micro_batches = settings.batch_size // (settings.micro_batch_size or settings.batch_size)
    learns = learning_of(settings, start, view, total)

    def step(state: TrainState, batch: Any, base: Any):
        loss = on_base(functools.partial(task.loss, denominator=batch.count), base)
        rate = learns.rate(state.steps)
        state, metrics = update_step(learns.tx, loss, state, batch, micro_batch_size=shards)
        return state, {**metrics, "lr": rate}

    return _Steps(
        step=in_view(view, step, donate_argnums=0, out_shardings=(learns.places, None)),
        groups=micro_batches * shards,
        base=base_of(start, view),
        shapes=state_of(learns, start),
        first_state=lambda: init_state(learns.tx, start.place(view, _learnt_of(start)), learns.places),
    )


def learning_of(settings: Sft | Reward, start: LoadedModel, view: View, total: int) -> Learning:
    """How a model learns in so many steps."""
    schedule = make_schedule(
        settings.learning_rate,
        steps=total,
        warmup_steps=round(settings.warmup_fraction * total),
        schedule=settings.schedule,
    )
    tx = make_optimizer(schedule, weight_decay=settings.weight_decay, max_grad_norm=settings.max_grad_norm)
    shapes = _learnt_of(start)(start.shapes)
    return Learning(schedule, tx, state_shardings(tx, shapes, shardings_of(start.model, shapes, view), view))


def state_of(learns: Learning, start: LoadedModel) -> TrainState:
    """What a checkpoint of this model's training is restored to."""
    return learns.shapes(_learnt_of(start)(start.shapes))


def base_of(start: LoadedModel, view: View) -> Any:
    """What adapters lie beside, where these are what learns; None: all learns."""
    return start.place(view, frozen) if _has_adapters(start) else None


def _learnt_of(start: LoadedModel) -> Callable[[Any], Any]:
    return learnt if _has_adapters(start) else lambda tree: tree


def _has_adapters(start: LoadedModel) -> bool:
    return getattr(start.model, "lora", None) is not None

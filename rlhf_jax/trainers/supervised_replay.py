"""The step of a dump of SFT or of the reward model's training, done again without changing anything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import read_metrics
from rlhf_jax.models.lora import join
from rlhf_jax.settings import Config, Reward, Sft
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.sharding.processes import fetch, put
from rlhf_jax.sharding.rules import batch_sharding, in_view
from rlhf_jax.trainers import roles
from rlhf_jax.trainers.dump import Dump
from rlhf_jax.trainers.findings import bad_names, look_lines, nearest_state, state_line, verdict
from rlhf_jax.trainers.optimizer import accumulate, on_base
from rlhf_jax.trainers.replay import (
    Applied,
    Finite,
    Looked,
    counted,
    counted_gradients,
    first_bad_module,
    nonfinite_leaves,
)
from rlhf_jax.trainers.reward import PairBatch, packs, pair_scores, reward_loss
from rlhf_jax.trainers.sft import Dialogues, sft_loss, target_logprobs
from rlhf_jax.trainers.supervised import base_of, learning_of, state_of


@dataclasses.dataclass(frozen=True)
class _Phase:
    """What one of the two learns with."""

    start: roles.LoadedModel
    settings: Sft | Reward
    view: View
    batch: type  # of its leaves
    loss: Callable[..., Any]  # (params, batch, denominator=) -> (loss, metrics)
    denominator: Callable[[Any], Any]
    outputs: Callable[[Any, Any], dict[str, tuple[Any, Any]]]  # (params, batch) -> name -> (array, mask)
    applied: Callable[[Any, Any], Applied]  # (params, batch) -> the model's call, module by module


def explain_supervised(config: Config, dump: Dump, policy: roles.LoadedModel) -> str:
    """Replays the dumped step at the nearest checkpoint, and says what is not finite.

    Args:
      policy: the one that this phase begins with.
    """
    phase = {"sft": _sft, "reward": _reward}[dump.phase](config, policy)
    if dump.batch.keys() != {field.name for field in dataclasses.fields(phase.batch)}:
        raise InputError(
            f"{dump.path} has other arrays than a batch of {dump.phase}; it is damaged, take another"
        )
    start, view = phase.start, phase.view
    learns = learning_of(phase.settings, start, view, total=1)
    checkpoints = Checkpoints(dump.run_dir, dump.phase, keep=config.run.keep)
    taken = {
        r["step"]: 1 - int(r.get(f"{dump.phase}/skipped") or 0)
        for r in read_metrics(dump.run_dir)
        if r["phase"] == dump.phase
    }
    step, moved = nearest_state(checkpoints.steps(), taken, dump.step)
    state, _ = checkpoints.restore(step, state_of(learns, start))
    params, base = state.params, base_of(start, view)
    batch = phase.batch(**put(dump.batch, batch_sharding(view)))
    looked = _look(phase, params, base, batch)
    skipped = int(dump.metrics.get(f"{dump.phase}/skipped") or 0)
    lines = [
        f"dump        {dump.path}: step {dump.step} of {dump.phase}, skipped updates: {skipped}",
        state_line(checkpoints.directory / str(step), moved),
        "",
        f"update of {dump.phase}",
        *look_lines(looked),
    ]
    causes: list[str] = []
    if not looked.finite:
        causes = [f"parameter {name}" for name in nonfinite_leaves(params)]
        module = first_bad_module(phase.applied(join(base, params), batch))
        causes += [f"output of {module}"] if module else []
        causes += bad_names(looked.outputs, "{name}") + bad_names(looked.terms, "{name} in the loss")
        causes += bad_names(looked.gradients, "gradient of {name}")
    return "\n".join(lines + verdict(int(not looked.finite), 1, causes))


def _look(phase: _Phase, params: Any, base: Any, batch: Any) -> Looked:
    shards = phase.view.batch_shards

    def measured(params, base, batch):
        loss = functools.partial(phase.loss, denominator=phase.denominator(batch))
        (value, terms), grads = accumulate(on_base(loss, base), params, batch, shards)
        found = {name: counted(*pair) for name, pair in phase.outputs(join(base, params), batch).items()}
        terms = {name: counted(x, True) for name, x in (terms | {"loss": value}).items()}
        return found, terms, counted_gradients(grads)

    found = fetch(in_view(phase.view, measured)(params, base, batch))
    outputs, terms, gradients = jax.tree.map(lambda x: x.item(), found)
    return Looked(0, outputs, _loss_last(terms), {name: tuple(pair) for name, pair in gradients.items()})


def _loss_last(terms: Finite) -> Finite:
    return {name: terms[name] for name in sorted(terms, key=lambda name: name == "loss")}


def _sft(config: Config, policy: roles.LoadedModel) -> _Phase:
    start = roles.adapted(policy, config.lora, config.run.seed)
    model: Any = start.model

    def applied(params, batch):
        tokens_NL, segments_NL, _ = (x.reshape(-1, x.shape[-1]) for x in jax.tree.leaves(batch))
        return Applied("policy", model, "hidden", params, tokens_NL[:, :-1], segments_NL[:, :-1])

    return _Phase(
        start=start,
        settings=config.sft,
        view=make_views(config).train,
        batch=Dialogues,
        loss=functools.partial(sft_loss, model=model),
        denominator=lambda batch: batch.target_GRL.sum(),
        outputs=lambda params, batch: {"log-probabilities": target_logprobs(params, batch, model=model)},
        applied=applied,
    )


def _reward(config: Config, policy: roles.LoadedModel) -> _Phase:
    start = roles.reward_start(config, policy)
    model: Any = start.model

    def applied(params, batch):
        tokens_NL, segments_NL = (x.reshape(-1, x.shape[-1]) for x in (batch.tokens_GRL, batch.segments_GRL))
        if packs(model):
            return Applied("reward model", model.clone(head="value"), None, params, tokens_NL, segments_NL)
        return Applied("reward model", model, None, params, tokens_NL, segments_NL > 0)

    return _Phase(
        start=start,
        settings=config.reward,
        view=make_views(config).reward,
        batch=PairBatch,
        loss=functools.partial(reward_loss, model=model, settings=config.reward),
        denominator=lambda batch: batch.last_GP2.size // 2,
        outputs=lambda params, batch: {"scores": (pair_scores(model, params, batch), True)},
        applied=applied,
    )

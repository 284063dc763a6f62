"""The step of a dump of SFT or of the reward model's training, done again without changing anything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from rlhf_jax.errors import InputError
from rlhf_jax.models.lora import join
from rlhf_jax.settings import Config, Reward, Sft
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.sharding.processes import put
from rlhf_jax.sharding.rules import batch_sharding, in_view
from rlhf_jax.trainers import roles
from rlhf_jax.trainers.dump import Dump
from rlhf_jax.trainers.findings import bad_names, look_lines, nearest_checkpoint, verdict
from rlhf_jax.trainers.optimizer import on_base
from rlhf_jax.trainers.replay import (
    Looked,
    counted_update,
    first_bad_output,
    layer_by_layer,
    looked,
    nonfinite_leaves,
)
from rlhf_jax.trainers.reward import PairBatch, pair_scores, reward_loss
from rlhf_jax.trainers.sft import Dialogues, sft_loss, target_logprobs
from rlhf_jax.trainers.supervised import base_of, learning_of, state_of


@dataclasses.dataclass(frozen=True)
class _Phase:
    """What one of the two learns with."""

    name: str  # of the model, in the report
    settings: Sft | Reward
    view: View
    batch: type  # of its leaves
    loss: Callable[..., Any]  # (params, batch, denominator=) -> (loss, metrics)
    outputs: Callable[
        [Any, Any, Any], dict[str, tuple[Any, Any]]
    ]  # (model, params, batch): arrays with masks
    inputs: slice  # of a row's tokens: those that the model reads


def explain_supervised(config: Config, dump: Dump, start: roles.LoadedModel) -> str:
    """Replays the dumped step at the nearest checkpoint, and says what is not finite.

    Args:
      start: the model that this phase begins with.
    """
    phase = {"sft": _sft, "reward": _reward}[dump.phase](config, start.model)
    if dump.batch.keys() != {field.name for field in dataclasses.fields(phase.batch)}:
        raise InputError(
            f"{dump.path} has other arrays than a batch of {dump.phase}; it is damaged, take another"
        )
    checkpoints, step, state_line = nearest_checkpoint(dump, config.run.keep)
    learns = learning_of(phase.settings, start, phase.view, total=1)
    state, _ = checkpoints.restore(step, state_of(learns, start))
    params, base = state.params, base_of(start, phase.view)
    batch = phase.batch(**put(dump.batch, batch_sharding(phase.view)))
    found = _look(phase, start.model, params, base, batch)
    skipped = int(dump.metrics.get(f"{dump.phase}/skipped") or 0)
    lines = [
        f"dump        {dump.path}: step {dump.step} of {dump.phase}, skipped updates: {skipped}",
        state_line,
        "",
        f"update of {dump.phase}",
        *look_lines(found),
    ]
    causes: list[str] = []
    if not found.finite:
        causes = [f"parameter {name}" for name in nonfinite_leaves(params)]
        model, whole = layer_by_layer(start.model, join(base, params))
        rows_NL = batch.segments_GRL.reshape(-1, batch.segments_GRL.shape[-1])[:, phase.inputs]
        module = first_bad_output(functools.partial(phase.outputs, model, whole, batch), rows_NL != 0)
        causes += [f"output of {phase.name}: {module}"] if module else []
        causes += bad_names(found.outputs, "{name}") + bad_names(found.terms, "{name} in the loss")
        causes += bad_names(found.gradients, "gradient of {name}")
    return "\n".join(lines + verdict(int(not found.finite), 1, causes))


def _look(phase: _Phase, model: Any, params: Any, base: Any, batch: Any) -> Looked:
    def measured(params, base, batch):
        loss = on_base(functools.partial(phase.loss, denominator=batch.count), base)
        outputs = phase.outputs(model, join(base, params), batch)
        return counted_update(loss, params, batch, phase.view.batch_shards, outputs)

    return looked(0, in_view(phase.view, measured)(params, base, batch))


def _sft(config: Config, model: Any) -> _Phase:
    return _Phase(
        name="policy",
        settings=config.sft,
        view=make_views(config).train,
        batch=Dialogues,
        loss=functools.partial(sft_loss, model=model),
        outputs=lambda model, params, batch: {
            "log-probabilities": target_logprobs(params, batch, model=model)
        },
        inputs=slice(-1),
    )


def _reward(config: Config, model: Any) -> _Phase:
    return _Phase(
        name="reward model",
        settings=config.reward,
        view=make_views(config).reward,
        batch=PairBatch,
        loss=functools.partial(reward_loss, model=model, settings=config.reward),
        outputs=lambda model, params, batch: {"scores": (pair_scores(model, params, batch), True)},
        inputs=slice(None),
    )

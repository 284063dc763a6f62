"""Supervised fine-tuning of the policy on the chosen responses."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import struct

from rlhf_jax.data.batches import pad_rows, sequential_batches, width_for
from rlhf_jax.data.preferences import Preference
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.errors import InputError
from rlhf_jax.losses.masked import counts, token_weights, weighted_sum
from rlhf_jax.metrics import MetricsLog
from rlhf_jax.rollout.reward_model import WIDTH_STEP
from rlhf_jax.rollout.score import hidden_logprobs
from rlhf_jax.settings import Run, Sft
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.processes import put
from rlhf_jax.sharding.rules import batch_sharding, in_view
from rlhf_jax.trainers.roles import LoadedModel
from rlhf_jax.trainers.supervised import SupervisedTask, train_supervised
from rlhf_jax.trainers.timing import CompileClock

log = logging.getLogger("rlhf_jax")


@struct.dataclass
class Dialogues:
    """Rendered dialogues, padded on the right."""

    tokens_BT: jax.Array
    mask_BT: jax.Array  # True on prompt and response
    target_BT: jax.Array  # True on the response, its EOS included: the tokens that are learnt


@dataclasses.dataclass(frozen=True)
class RenderedDialogue:
    tokens: list[int]
    response_length: int


def render_dialogues(
    pairs: Sequence[Preference], renderer: Renderer, max_length: int, what: str
) -> list[RenderedDialogue]:
    """Prompts with their chosen responses; where the response alone does not fit, dropped and counted."""
    rendered = [
        RenderedDialogue(tokens, len(renderer.response(pair.chosen)))
        for pair in pairs
        if (tokens := renderer.dialogue(pair.prompt, pair.chosen, max_length)) is not None
    ]
    if dropped := len(pairs) - len(rendered):
        log.info("%s: dropped %d dialogues with a response longer than %d tokens", what, dropped, max_length)
    if not rendered:
        raise InputError(f"{what}: none of {len(pairs)} dialogues fits sft.max_length={max_length}; raise it")
    return rendered


def dialogue_batch(dialogues: Sequence[RenderedDialogue], max_length: int, view: View) -> Dialogues:
    """Dialogues on the devices, padded to one of a few widths."""
    rows = [dialogue.tokens for dialogue in dialogues]
    tokens_BT, mask_BT = pad_rows(rows, width_for(max(map(len, rows)), WIDTH_STEP, max_length), "right", 0)
    start_B1 = np.array([[len(d.tokens) - d.response_length] for d in dialogues])
    target_BT = mask_BT & (np.arange(tokens_BT.shape[1]) >= start_B1)
    return Dialogues(*put((tokens_BT, mask_BT, target_BT), batch_sharding(view)))


def sft_loss(
    params: Any, batch: Dialogues, *, model: nn.Module, denominator: dict[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Negative log-likelihood in nats a response token: a sum over rows over the whole batch's tokens."""
    hidden_BTD: Any = model.apply(
        {"params": params}, batch.tokens_BT[:, :-1], batch.mask_BT[:, :-1], method="hidden"
    )
    logprobs_BT, _ = hidden_logprobs(model, params, hidden_BTD, batch.tokens_BT[:, 1:], temperature=1.0)
    weights_BT = token_weights(batch.target_BT[:, 1:], "token_mean", **denominator, dtype=logprobs_BT.dtype)
    return -weighted_sum(logprobs_BT, weights_BT), {}


def train_sft(
    start: LoadedModel,
    train: Sequence[Preference],
    held_out: Sequence[Preference],
    *,
    settings: Sft,
    run: Run,
    view: View,
    run_dir: Any,
    metrics: MetricsLog,
    clock: CompileClock,
    save_best: Callable[[Any, dict[str, float]], None],
) -> dict[str, float]:
    """Trains on the chosen responses of `train`; the parameters with the lowest held-out loss are kept.

    Args:
      start: the model to begin with; its weights are read where there is no checkpoint to go on from.
      save_best: called with parameters and numbers whenever the held-out loss falls.
    Returns:
      the best evaluation: validation_loss in nats a token, step.
    """
    model, renderer = start.model, start.renderer
    dialogues = render_dialogues(train, renderer, settings.max_length, "training dialogues")
    held_out_dialogues = render_dialogues(held_out, renderer, settings.max_length, "held-out dialogues")

    def batch(rows: Sequence[RenderedDialogue]) -> Dialogues:
        return dialogue_batch(rows, settings.max_length, view)

    def loss(params, batch, *, denominator):
        return sft_loss(params, batch, model=model, denominator=denominator)

    def total_nats(params, batch, valid_B):
        one = {"tokens": 1, "rows": 1}
        targets = dataclasses.replace(batch, target_BT=batch.target_BT & valid_B[:, None])
        return loss(params, targets, denominator=one)[0], counts(targets.target_BT)["tokens"]

    total_nats = in_view(view, total_nats)

    def evaluate(params: Any) -> dict[str, float]:
        nats = tokens = 0.0
        for index, valid in sequential_batches(len(held_out_dialogues), settings.batch_size):
            rows = batch([held_out_dialogues[i] for i in index])
            part = jax.device_get(total_nats(params, rows, valid))
            nats, tokens = nats + float(part[0]), tokens + float(part[1])
        return {"validation_loss": nats / max(tokens, 1)}

    task = SupervisedTask(
        phase="sft",
        settings=settings,
        run=run,
        count=len(dialogues),
        rows="dialogues",
        batch=lambda index: batch([dialogues[i] for i in index]),
        loss=loss,
        denominator=lambda batch: counts(batch.target_BT[:, 1:]),
        evaluate=evaluate,
        goodness=lambda numbers: -numbers["validation_loss"],
        save_best=save_best,
    )
    return train_supervised(task, start, view, run_dir, metrics, clock)

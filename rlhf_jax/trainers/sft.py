"""Supervised fine-tuning of the policy on the chosen responses."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rlhf_jax.data.batches import sequential_batches
from rlhf_jax.data.packing import pack, row_width
from rlhf_jax.data.preferences import Preference
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.errors import InputError
from rlhf_jax.losses.masked import weighted_sum
from rlhf_jax.metrics import MetricsLog
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
    """Rendered dialogues in G groups, packed into R rows: see data/packing.py."""

    tokens_GRL: jax.Array
    segments_GRL: jax.Array
    target_GRL: jax.Array  # True on the responses, their EOS included: the tokens that are learnt

    @property
    def count(self) -> jax.Array:
        """Tokens that are learnt: what a batch's loss is a mean over."""
        return self.target_GRL.sum()


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


def dialogue_batch(dialogues: Sequence[RenderedDialogue], width: int, view: View, groups: int) -> Dialogues:
    """Dialogues on the devices, packed into rows of one width."""
    rows = pack([(dialogue.tokens,) for dialogue in dialogues], width, groups)
    target_GRL = np.zeros(rows.tokens_GRL.shape, bool)
    for cells, items, starts in zip(
        target_GRL.reshape(groups, -1), rows.item_GP, rows.first_GPK[..., 0], strict=True
    ):
        for i, start in zip(items, starts, strict=True):
            end = start + len(dialogues[i].tokens)
            first = max(
                end - dialogues[i].response_length, start + 1
            )  # nothing predicts a text's first token
            cells[first:end] = True
    return Dialogues(*put((rows.tokens_GRL, rows.segments_GRL, target_GRL), batch_sharding(view)))


def sft_loss(
    params: Any, batch: Dialogues, *, model: nn.Module, denominator: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Negative log-likelihood, a sum over response tokens over `denominator`: their count in the batch."""
    logprobs_NL, target_NL = target_logprobs(params, batch, model=model)
    return -weighted_sum(logprobs_NL, target_NL / jnp.maximum(denominator, 1)), {}


def target_logprobs(params: Any, batch: Dialogues, *, model: nn.Module) -> tuple[jax.Array, jax.Array]:
    """(log-probabilities of all tokens but the first of a row, True on those that are learnt), [N, L - 1]."""
    tokens_NL, segments_NL, target_NL = (x.reshape(-1, x.shape[-1]) for x in jax.tree.leaves(batch))
    hidden_NLD: Any = model.apply({"params": params}, tokens_NL[:, :-1], segments_NL[:, :-1], method="hidden")
    logprobs_NL, _ = hidden_logprobs(model, params, hidden_NLD, tokens_NL[:, 1:], temperature=1.0)
    return logprobs_NL, target_NL[:, 1:]


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
    model: Any = start.model
    renderer = start.renderer
    dialogues = render_dialogues(train, renderer, settings.max_length, "training dialogues")
    held_out_dialogues = render_dialogues(held_out, renderer, settings.max_length, "held-out dialogues")

    longest = max(len(dialogue.tokens) for dialogue in (*dialogues, *held_out_dialogues))
    width = row_width(longest, model.config.max_positions)

    def loss(params, batch, *, denominator):
        return sft_loss(params, batch, model=model, denominator=denominator)

    def total_nats(params, batch):
        return loss(params, batch, denominator=jnp.float32(1))[0], batch.count

    total_nats = in_view(view, total_nats)

    def evaluate(params: Any) -> dict[str, float]:
        nats = tokens = 0.0
        for index, valid in sequential_batches(len(held_out_dialogues), settings.batch_size):
            rows = [
                held_out_dialogues[i] if v else RenderedDialogue(held_out_dialogues[i].tokens, 0)
                for i, v in zip(index, valid, strict=True)
            ]
            part = total_nats(params, dialogue_batch(rows, width, view, view.batch_shards))
            part_nats, part_tokens = jax.device_get(part)
            nats, tokens = nats + float(part_nats), tokens + float(part_tokens)
        return {"validation_loss": nats / max(tokens, 1)}

    task = SupervisedTask(
        phase="sft",
        settings=settings,
        run=run,
        count=len(dialogues),
        rows="dialogues",
        batch=lambda index, groups: dialogue_batch([dialogues[i] for i in index], width, view, groups),
        loss=loss,
        evaluate=evaluate,
        goodness=lambda numbers: -numbers["validation_loss"],
        save_best=save_best,
    )
    return train_supervised(task, start, view, run_dir, metrics, clock)

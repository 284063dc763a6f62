"""Training a reward model on preference pairs (Bradley-Terry), with the best on held-out pairs kept."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import struct

from rlhf_jax.data.batches import pad_rows, width_for
from rlhf_jax.data.preferences import Preference
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.errors import InputError
from rlhf_jax.losses import ranking_loss
from rlhf_jax.metrics import MetricsLog
from rlhf_jax.rollout.reward_model import WIDTH_STEP, RewardModel
from rlhf_jax.settings import Reward, Run
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.processes import put
from rlhf_jax.sharding.rules import batch_sharding
from rlhf_jax.trainers.roles import LoadedModel
from rlhf_jax.trainers.supervised import SupervisedTask, train_supervised
from rlhf_jax.trainers.timing import CompileClock

log = logging.getLogger("rlhf_jax")


@struct.dataclass
class PairBatch:
    """Rendered pairs, padded on the right. Axis 1 is chosen, rejected: a pair stays on one device."""

    tokens_B2T: jax.Array
    mask_B2T: jax.Array


@dataclasses.dataclass(frozen=True)
class RenderedPair:
    chosen: list[int]
    rejected: list[int]


def render_pairs(
    pairs: Sequence[Preference], renderer: Renderer, max_length: int, what: str
) -> list[RenderedPair]:
    """Token ids of both sides. A pair of which a response alone does not fit is dropped and counted.

    Raises:
      InputError: no pair is left.
    """
    rendered = [
        RenderedPair(chosen, rejected)
        for pair in pairs
        if (chosen := renderer.dialogue(pair.prompt, pair.chosen, max_length)) is not None
        and (rejected := renderer.dialogue(pair.prompt, pair.rejected, max_length)) is not None
    ]
    if dropped := len(pairs) - len(rendered):
        log.info("%s: dropped %d pairs with a response longer than %d tokens", what, dropped, max_length)
    if not rendered:
        raise InputError(f"{what}: none of {len(pairs)} pairs fits reward.max_length={max_length}; raise it")
    return rendered


def reward_loss(
    params: Any, pairs: PairBatch, *, model: nn.Module, settings: Reward, denominator: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Ranking loss of a batch of pairs, a sum over pairs divided by `denominator`."""
    T = pairs.tokens_B2T.shape[-1]
    scores_N: Any = model.apply(
        {"params": params}, pairs.tokens_B2T.reshape(-1, T), pairs.mask_B2T.reshape(-1, T)
    )
    scores_B2 = scores_N.reshape(-1, 2)
    return ranking_loss(
        scores_B2[:, 0],
        scores_B2[:, 1],
        margin=settings.margin,
        kind=settings.loss,
        centering_coef=settings.centering_coef,
        denominator=denominator,
    )


def pair_batch(pairs: Sequence[RenderedPair], max_length: int, view: View) -> PairBatch:
    """Pairs on the devices, padded to one of a few widths."""
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    width = width_for(max(map(len, rows)), WIDTH_STEP, max_length)
    tokens, mask = pad_rows(rows, width, "right", 0)
    shape = (len(pairs), 2, width)
    return PairBatch(*put((tokens.reshape(shape), mask.reshape(shape)), batch_sharding(view)))


def pair_accuracy(reward_model: RewardModel, pairs: Sequence[RenderedPair]) -> tuple[float, float]:
    """(accuracy, mean margin): the share of pairs whose chosen side scores higher, ties one half."""
    scores = reward_model.score_tokens([row for pair in pairs for row in (pair.chosen, pair.rejected)])
    margin = scores[::2] - scores[1::2]
    return float(np.mean((1 + np.sign(margin)) / 2)), float(margin.mean())


def train_reward_model(
    start: LoadedModel,
    train: Sequence[Preference],
    held_out: Sequence[Preference],
    *,
    settings: Reward,
    run: Run,
    view: View,
    run_dir: Any,
    metrics: MetricsLog,
    clock: CompileClock,
    save_best: Callable[[Any, dict[str, float]], None],
) -> dict[str, float]:
    """Trains on `train` and evaluates on `held_out`.

    Args:
      start: the model to begin with; its weights are read where there is no checkpoint to go on from.
      save_best: called with parameters and numbers whenever the held-out accuracy rises.
    Returns:
      the best evaluation: validation_accuracy, validation_margin, validation_pairs, step.
    """
    model, renderer = start.model, start.renderer
    pairs = render_pairs(train, renderer, settings.max_length, "training pairs")
    held_out_pairs = render_pairs(held_out, renderer, settings.max_length, "held-out pairs")
    scorer = RewardModel(
        model, None, renderer, view=view, max_length=settings.max_length, batch_size=2 * settings.batch_size
    )

    def evaluate(params: Any) -> dict[str, float]:
        scorer.params = params
        accuracy, margin = pair_accuracy(scorer, held_out_pairs)
        scorer.params = None
        return {
            "validation_accuracy": accuracy,
            "validation_margin": margin,
            "validation_pairs": len(held_out_pairs),
        }

    def loss(params, batch, *, denominator):
        return reward_loss(params, batch, model=model, settings=settings, denominator=denominator)

    task = SupervisedTask(
        phase="reward",
        settings=settings,
        run=run,
        count=len(pairs),
        rows="pairs",
        batch=lambda index: pair_batch([pairs[i] for i in index], settings.max_length, view),
        loss=loss,
        denominator=lambda batch: batch.tokens_B2T.shape[0],
        evaluate=evaluate,
        goodness=lambda numbers: numbers["validation_accuracy"],
        save_best=save_best,
    )
    return train_supervised(task, start, view, run_dir, metrics, clock)


def train_accuracy(
    reward: LoadedModel, pairs: Sequence[Preference], count: int, settings: Reward, view: View
) -> float:
    """Accuracy of a trained reward model on its first `count` training pairs."""
    rendered = render_pairs(pairs[:count], reward.renderer, settings.max_length, "training pairs")
    return pair_accuracy(
        RewardModel(
            reward.model,
            reward.place(view),
            reward.renderer,
            view=view,
            max_length=settings.max_length,
            batch_size=2 * settings.batch_size,
        ),
        rendered,
    )[0]

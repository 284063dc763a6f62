"""Training a reward model on preference pairs (Bradley-Terry), with the best on held-out pairs kept."""

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

from rlhf_jax.data.batches import width_for
from rlhf_jax.data.packing import pack, row_width
from rlhf_jax.data.preferences import Preference
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.errors import InputError
from rlhf_jax.losses import ranking_loss
from rlhf_jax.metrics import MetricsLog
from rlhf_jax.models.transformer import Transformer
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
    """Rendered pairs in G groups of P pairs, packed into R rows: see data/packing.py."""

    tokens_GRL: jax.Array
    segments_GRL: jax.Array
    last_GP2: jax.Array  # the cell of the last token of chosen and rejected

    @property
    def count(self) -> int:
        """Pairs: what a batch's loss is a mean over."""
        return self.last_GP2.size // 2


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
    scores_B2 = pair_scores(model, params, pairs)
    return ranking_loss(
        scores_B2[:, 0],
        scores_B2[:, 1],
        margin=settings.margin,
        kind=settings.loss,
        centering_coef=settings.centering_coef,
        denominator=denominator,
    )


def pair_scores(model: nn.Module, params: Any, pairs: PairBatch) -> jax.Array:
    """Scores of chosen and rejected, [G * P, 2]; each side is scored as it is alone."""
    G, R, L = pairs.tokens_GRL.shape
    tokens_NL, segments_NL = pairs.tokens_GRL.reshape(-1, L), pairs.segments_GRL.reshape(-1, L)
    if not packs(model):
        scores_N: Any = model.apply({"params": params}, tokens_NL, segments_NL > 0)
        return scores_N.reshape(-1, 2)
    values_NL: Any = model.clone(head="value").apply({"params": params}, tokens_NL, segments_NL)
    last_GN = pairs.last_GP2.reshape(G, -1)
    return jnp.take_along_axis(values_NL.reshape(G, R * L), last_GN, axis=1).reshape(-1, 2)


def packs(model: nn.Module) -> bool:
    """True where texts may share a row: an encoder scores a row by its first token."""
    return isinstance(model, Transformer)


def pair_batch(
    pairs: Sequence[RenderedPair], width: int, view: View, groups: int, *, packed: bool
) -> PairBatch:
    """Pairs on the devices, in rows of one width."""
    sides = [(pair.chosen, pair.rejected) for pair in pairs]
    rows = pack(sides, width, groups, together=packed)
    lengths_B2 = np.array([[len(text) for text in item] for item in sides], np.int32)
    last_GP2 = rows.first_GPK + lengths_B2[rows.item_GP] - 1
    return PairBatch(*put((rows.tokens_GRL, rows.segments_GRL, last_GP2), batch_sharding(view)))


def longest_side(pairs: Sequence[RenderedPair]) -> int:
    """Tokens of the longest text."""
    return max(len(side) for pair in pairs for side in (pair.chosen, pair.rejected))


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
    model: Any = start.model
    renderer = start.renderer
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

    longest = longest_side(pairs)

    def batch(index: np.ndarray, groups: int) -> PairBatch:
        rows = [pairs[i] for i in index]
        if packs(model):
            return pair_batch(rows, row_width(longest, model.config.max_positions), view, groups, packed=True)
        width = width_for(longest_side(rows), WIDTH_STEP, settings.max_length)
        return pair_batch(rows, width, view, groups, packed=False)

    def loss(params, batch, *, denominator):
        return reward_loss(params, batch, model=model, settings=settings, denominator=denominator)

    task = SupervisedTask(
        phase="reward",
        settings=settings,
        run=run,
        count=len(pairs),
        rows="pairs",
        batch=batch,
        loss=loss,
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

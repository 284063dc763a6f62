"""Scores of finished responses by a reward model, and the scale that they are put on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import numpy as np

from rlhf_jax.data.batches import pad_rows, width_for
from rlhf_jax.data.messages import Dialogue
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.rollout.rooms import packed
from rlhf_jax.rollout.score import packing_of, with_final_eos
from rlhf_jax.rollout.scored import Scored
from rlhf_jax.rollout.token_rows import rendered_rows
from rlhf_jax.sharding.mesh import View
from rlhf_jax.sharding.offload import to_device
from rlhf_jax.sharding.processes import fetch, put
from rlhf_jax.sharding.reshard import to_devices
from rlhf_jax.sharding.rules import batch_sharding, batch_shards, in_view
from rlhf_jax.types import Rollout

WIDTH_STEP = 64  # texts are padded to a multiple of this, so that few widths are compiled


class RewardModel:
    """A frozen reward model with its own tokenizer.

    Args:
      model: `apply(variables, tokens_BT, mask_BT)` gives raw scores `[B]`.
      params: its parameters, already placed on the devices, or in host memory beside them.
      renderer: how it reads a dialogue.
      view: its view of the device grid.
      max_length: longest dialogue in tokens.   batch_size: dialogues a forward pass.
      reads_rollouts: its tokenizer and rendering are the policy's, so that a rollout's tokens can be scored
        on the device.
      packing: such rollouts are scored without their padding.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Any,
        renderer: Renderer,
        *,
        view: View,
        max_length: int,
        batch_size: int,
        reads_rollouts: bool = False,
        packing: bool = False,
    ):
        self.params, self.renderer, self.view = params, renderer, view
        self.max_length, self.reads_rollouts = max_length, reads_rollouts
        shards = view.batch_shards
        self.batch_size = -(-batch_size // shards) * shards

        def score(params, *inputs):
            return model.apply({"params": params}, *inputs)

        def score_rollout(params, rollout):
            assert renderer.eos_id is not None  # only an encoder may have none, and it reads no rollouts
            tokens_BS, mask_BS = with_final_eos(rollout, renderer.eos_id)
            more = len(tokens_BS) // batch_shards()  # a final EOS a row
            return score(params, tokens_BS, mask_BS, *packing_of(mask_BS, rollout.room, more=more))

        self._score = in_view(view, score)
        self._score_rollout = in_view(view, packed(score_rollout) if packing else score_rollout)

    def __call__(self, rollout: Rollout, prompts: Sequence[Dialogue], responses: Sequence[str]) -> Scored:
        if self.reads_rollouts:
            there = to_devices(rollout, batch_sharding(self.view))
            return Scored(self._score_rollout(to_device(self.params), there))
        return Scored(self.score_texts(prompts, responses))

    def score_texts(self, prompts: Sequence[Dialogue], responses: Sequence[str]) -> np.ndarray:
        """Raw scores of dialogues as text, rendered as in the reward model's training.

        A response that alone is longer than max_length is cut short: another tokenizer may need many tokens
        for what is few tokens to the policy, and a run must not end over it.
        """

        def render(row: int) -> list[int]:
            return self.renderer.clipped_dialogue(prompts[row], responses[row], self.max_length)

        return self.score_tokens(rendered_rows(render, len(responses), self.max_length))

    def score_tokens(self, rows: Sequence[list[int]]) -> np.ndarray:
        """Raw scores of rendered dialogues, of any number and lengths."""
        scores, params = np.zeros(len(rows), np.float32), to_device(self.params)
        by_length = np.argsort([len(row) for row in rows], kind="stable")
        for start in range(0, len(rows), self.batch_size):
            index = by_length[start : start + self.batch_size]
            batch = [rows[i] for i in index] + [rows[index[0]]] * (self.batch_size - len(index))
            width = width_for(max(map(len, batch)), WIDTH_STEP, self.max_length)
            arrays = put(pad_rows(batch, width, "right", 0), batch_sharding(self.view))
            scores[index] = fetch(self._score(params, *arrays))[: len(index)]
        return scores


@dataclasses.dataclass(frozen=True)
class Scale:
    """score = gain * raw + bias. Chosen so that scores of the reference policy have mean 0 and variance 1."""

    gain: float = 1.0
    bias: float = 0.0

    def __call__(self, raw_B: Any) -> Any:
        return self.gain * raw_B + self.bias


def scale_of(raw_scores: np.ndarray) -> Scale:
    """The scale that standardises these raw scores."""
    std = max(float(raw_scores.std()), 1e-6)
    return Scale(gain=1.0 / std, bias=-float(raw_scores.mean()) / std)

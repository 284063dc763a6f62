"""The fair comparison: the same held-out prompts, keys, lengths and reward model, before and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.data.batches import sequential_batches
from rlhf_jax.data.messages import Dialogue
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.rollout.prompt_batch import prompt_batch
from rlhf_jax.rollout.reward_model import Scale
from rlhf_jax.rollout.scored import Scorer, settled
from rlhf_jax.settings import Eval
from rlhf_jax.sharding.processes import fetch
from rlhf_jax.trainers.inputs import Gold
from rlhf_jax.trainers.ppo_steps import PolicySteps
from rlhf_jax.types import Rollout

BOOTSTRAP_DRAWS = 10_000


@dataclasses.dataclass(frozen=True)
class Response:
    """One sampled response to a held-out prompt."""

    prompt_id: int
    sample: int
    prompt: Dialogue
    text: str
    score: float  # standardised
    gold: float | None  # the true reward, where it is known
    length: int  # tokens, the EOS included
    truncated: bool
    kl: float  # nats, summed over the response: log policy - log reference of the sampled tokens
    failed: bool = False  # it could not be scored: the score is reward.fallback

    def record(self, step: int, when: str) -> dict[str, Any]:
        """The response as a line of samples.jsonl."""
        fields = dataclasses.asdict(self)
        text = fields.pop("text")
        if self.gold is None:
            fields.pop("gold")
        if not self.failed:
            fields.pop("failed")
        return {"step": step, "phase": "eval", "when": when, **fields, "response": text}


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Samples responses to held-out prompts, scores them, and measures their KL to the reference."""

    steps: PolicySteps
    reference_params: Any
    renderer: Renderer
    scorer: Scorer
    scale: Scale
    fallback: float | None  # standardised score of a response that could not be scored
    gold: Gold | None
    settings: Eval
    prompt_length: int
    key: jax.Array  # the same at every call, so that two policies are compared in pairs

    def __call__(self, params: Any, prompts: Sequence[Dialogue]) -> list[Response]:
        """`settings.samples` responses to each prompt from parameters that are placed for training."""
        view = self.steps.views.generate
        generation_params = self.steps.sampler.place(params)
        rows = [self.renderer.prompt(prompt, self.prompt_length) for prompt in prompts]
        samples, shards = self.settings.samples, view.batch_shards
        size = min(max(self.settings.batch_size // samples, 1), len(rows))  # prompts a batch
        by_length = np.argsort([len(row) for row in rows], kind="stable")
        responses = []
        for index, valid in sequential_batches(len(rows), -(-size // shards) * shards):
            ids = by_length[index]
            batch = prompt_batch(lambda b, ids=ids: rows[ids[b]], ids, limit=self.prompt_length, view=view)
            rollout = self.steps.sampler.generate_samples(generation_params, batch, self.key)
            tasks = [(i, s) for i in ids.tolist() for s in range(samples)]
            scored = self._score(self.steps.to_train(rollout), prompts, [i for i, _ in tasks])
            used = np.flatnonzero(np.repeat(valid, samples)).tolist()
            responses += [self._response(tasks[b], prompts, scored, b) for b in used]
        return sorted(responses, key=lambda response: (response.prompt_id, response.sample))

    def _score(self, rollout: Rollout, prompts: Sequence[Dialogue], rows: list[int]) -> tuple[Any, ...]:
        ref_logprobs_BT = self.steps.reference_logprobs(self.reference_params, rollout)
        kl_B = jnp.where(rollout.mask_BT, rollout.logprobs_BT - ref_logprobs_BT, 0.0).sum(-1)
        texts = response_texts(self.renderer, rollout)
        scored = self.scorer(rollout, [prompts[i] for i in rows], texts)
        scores_B, failed_B = settled(
            self.scale(fetch(scored.scores_B)),
            scored.reasons,
            rows,
            fallback=self.fallback,
            what="held-out prompt",
        )
        return texts, scores_B, failed_B, *fetch((kl_B, rollout.length_B, rollout.truncated_B))

    def _response(
        self, task: tuple[int, int], prompts: Sequence[Dialogue], scored: tuple[Any, ...], b: int
    ) -> Response:
        texts, scores_B, failed_B, kl_B, length_B, truncated_B = scored
        prompt = prompts[task[0]]
        return Response(
            prompt_id=task[0],
            sample=task[1],
            prompt=prompt,
            text=texts[b],
            score=float(scores_B[b]),
            gold=None if self.gold is None else float(self.gold(prompt, texts[b])),
            length=int(length_B[b]),
            truncated=bool(truncated_B[b]),
            kl=float(kl_B[b]),
            failed=bool(failed_B[b]),
        )


def response_texts(renderer: Renderer, rollout: Rollout) -> list[str]:
    """The responses of a rollout as text, all of them on every process. Copies the tokens to the host."""
    tokens_BT, length_B = fetch((rollout.response_BT, rollout.length_B))
    return [renderer.text(tokens_T[:length]) for tokens_T, length in zip(tokens_BT, length_B, strict=True)]


def compare(before: Sequence[Response], after: Sequence[Response], *, seed: int) -> dict[str, Any]:
    """The `policy` and, where the truth is known, `gold` sections of eval.json.

    The paired difference is averaged over a prompt's samples first; its 95 % interval is the percentile
    bootstrap over prompts (Efron & Tibshirani 1993, chapter 13). A win is a higher score on the same prompt
    and key, a tie counts one half.
    """
    old, new = _scores(before), _scores(after)
    by_prompt = np.array([r.prompt_id for r in before])
    difference = np.array([(new - old)[by_prompt == i].mean() for i in np.unique(by_prompt)])
    low, high = bootstrap_interval(difference, seed=seed)
    policy = {
        "prompts": len(difference),
        "before": _spread(old),
        "after": _spread(new),
        "paired_difference": {"mean": float(difference.mean()), "ci95_low": low, "ci95_high": high},
        "win_rate": float(np.mean((new > old) + 0.5 * (new == old))),
        "kl": float(np.mean([r.kl for r in after])),
        "response_length": {
            "before": float(np.mean([r.length for r in before])),
            "after": float(np.mean([r.length for r in after])),
        },
    }
    if before[0].gold is None:
        return {"policy": policy}
    gold = {"before": _spread(_golds(before)), "after": _spread(_golds(after))}
    return {"policy": policy, "gold": gold}


def bootstrap_interval(values: np.ndarray, *, seed: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (BOOTSTRAP_DRAWS, len(values)))].mean(-1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _scores(responses: Sequence[Response]) -> np.ndarray:
    return np.array([r.score for r in responses])


def _golds(responses: Sequence[Response]) -> np.ndarray:
    return np.array([r.gold for r in responses], float)


def _spread(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(values.mean()), "std": float(values.std())}

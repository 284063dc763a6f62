"""PPO on one model in all four roles, through the library's own loop: what the benchmarks run."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlhf_jax.data.messages import Dialogue, opening_turn
from rlhf_jax.data.prompts import read_prompts
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.data.synthetic import synthetic_preferences
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.errors import InputError
from rlhf_jax.models.configs import shape_config
from rlhf_jax.models.parameters import build_model
from rlhf_jax.models.weights import FreshWeights
from rlhf_jax.rollout.reward_model import Scale
from rlhf_jax.settings import Config
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.trainers.inputs import texts_of
from rlhf_jax.trainers.ppo import Learner
from rlhf_jax.trainers.ppo_loop import PpoTask
from rlhf_jax.trainers.ppo_setup import make_evaluator, make_ppo_task, scorer_of
from rlhf_jax.trainers.roles import NEW, POLICY, LoadedModel, load_backbone, load_language_model


class TokenPrompts(Renderer):
    """Renders prompts that are token ids already. `eos_ids` end a response: none, and all reach the limit."""

    def __init__(self, renderer: Renderer, eos_ids: Sequence[int] = ()):
        super().__init__(renderer.tokenizer, renderer.eos_ids)
        self.eos_ids = tuple(eos_ids)

    def prompt(self, messages: Any, max_length: int) -> list[int]:
        return list(messages)

    def text(self, ids: Iterable[int]) -> str:
        return super().text(id % len(self.tokenizer) for id in ids)  # a new model's vocabulary may be larger


def mesh_settings(mesh: str) -> list[str]:
    """Settings that give training and generation the mesh `data,fsdp,tensor`."""
    layout = dict(zip(("data", "fsdp", "tensor"), mesh.split(","), strict=True))
    return [f"placement.{role}.{axis}={n}" for role in ("train", "generate") for axis, n in layout.items()]


def random_prompts(count: int, lengths: Sequence[int], vocab_size: int) -> list[Any]:
    """Rows of random token ids that keep away from both ends of the vocabulary, where special tokens are."""
    pick = random.Random(0)
    margin = min(100, vocab_size // 4)
    return [
        tuple(pick.randrange(margin, vocab_size - margin) for _ in range(pick.choice(lengths)))
        for _ in range(count)
    ]


def first_turns(file: str, renderer: Renderer, count: int, longest: int) -> list[Dialogue]:
    """First human turns of a file of preference pairs that render to at most `longest` tokens, in order."""
    found = []
    for dialogue in read_prompts(file)[0]:
        turn = opening_turn(dialogue)
        if len(renderer.prompt(turn, 10**6)) <= longest:
            found.append(turn)
        if len(found) == count:
            return found
    raise InputError(
        f"{file} has {len(found)} prompts of at most {longest} tokens and {count} are needed; "
        "use fewer updates, a smaller batch or longer prompts"
    )


def load_model(config: Config) -> LoadedModel:
    """The policy of policy.model; `new` takes the vocabulary of policy.shape whatever its tokenizer has."""
    if config.policy.model != NEW:
        return load_language_model(config.policy.model, config.policy)
    texts = texts_of(synthetic_preferences(200, 0))
    tokenizer = train_tokenizer(texts, min(512, config.policy.shape.vocab_size))
    model = build_model(shape_config(config.policy.shape), head="lm", dtype=config.policy.dtype)
    weights = FreshWeights(model, config.run.seed)
    return LoadedModel(model.clone(remat=config.policy.remat), weights, Renderer(tokenizer))


def make_task(
    config: Config, policy: LoadedModel, prompts: Sequence[Any]
) -> tuple[PpoTask, Callable[[], Learner]]:
    """The task on these prompts, and its first learner. Each role has weights of its own."""
    views = make_views(config)
    reward_settings = dataclasses.replace(config.reward, model=POLICY, dtype=config.policy.dtype)
    reward = load_backbone(reward_settings, policy, config.run.seed)
    scorer = scorer_of(config, reward, policy, views)
    evaluator = make_evaluator(config, policy, scorer, Scale(), views, gold=None)
    return make_ppo_task(
        config, views, policy, reward, evaluator, prompts, held_out=(), save_policy=lambda params, step: None
    )

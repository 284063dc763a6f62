"""Evaluation: every held-out prompt has its samples, whatever batch and width they are generated in."""

import dataclasses

import jax
import numpy as np
import pytest

from rlhf_jax.config import load_config
from rlhf_jax.data.messages import Message
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.models import TransformerConfig, init_model
from rlhf_jax.rollout.prompt_batch import prompt_batch
from rlhf_jax.trainers.evaluate import response_texts
from rlhf_jax.trainers.own_policy import own_policy_task

# Two long prompts among short ones: the last in the order of lengths.
PROMPTS = [[Message("user", "x" * (40 if i in (1, 4) else 3) + str(i))] for i in range(10)]
SHAPE = TransformerConfig(
    vocab_size=300, layers=1, embed=16, heads=2, kv_heads=2, head_dim=8, mlp=16, max_positions=128
)
OVERRIDES = ["eval.samples=3", "eval.batch_size=24", "rollout.prompt_length=64", "rollout.response_length=5"]


@pytest.fixture(scope="module")
def task():
    """(task, actor's parameters); the score is the length of the text."""
    config = load_config(None, [*OVERRIDES, "ppo.batch_size=8"])
    tokenizer = train_tokenizer(["no yes " * 9, "0123456789"], 300)
    models = [init_model(SHAPE, head=head, seed=i) for i, head in enumerate(("lm", "value"))]
    reward = lambda prompts, responses: [float(len(text)) for text in responses]  # noqa: E731
    task, learner = own_policy_task(config, *models, tokenizer, reward, PROMPTS, PROMPTS)
    return task, learner.actor.params


def test_samples_of_every_prompt_in_order(task):
    task, params = task
    evaluator = task.evaluator
    widths = []

    def watched(params, prompts, key, generate=evaluator.steps.sampler.generate_samples):
        widths.append(prompts.tokens_BP.shape[1])
        return generate(params, prompts, key)

    sampler = dataclasses.replace(evaluator.steps.sampler, generate_samples=watched)
    steps = dataclasses.replace(evaluator.steps, sampler=sampler)
    responses = dataclasses.replace(evaluator, steps=steps)(params, PROMPTS)
    assert [(r.prompt_id, r.sample) for r in responses] == [(i, s) for i in range(10) for s in range(3)]
    assert all(r.prompt == PROMPTS[r.prompt_id] for r in responses)
    assert [r.score for r in responses] == [float(len(r.text)) for r in responses]
    assert widths == [32, 64]
    assert len({r.text for r in responses}) > 25


def test_samples_are_those_of_copies_of_the_prompt(task):
    """Prompt i's sample s is row 3 i + s of one batch of copies, each with keys and values of its own."""
    task, params = task
    evaluator, sampler = task.evaluator, task.steps.policy.sampler
    rows = [evaluator.renderer.prompt(PROMPTS[i // 3], 64) for i in range(30)] + [[1], [1]]
    batch = prompt_batch(rows.__getitem__, np.arange(32), limit=64, view=task.views.generate)
    rollout = sampler.generate(sampler.reshard(params), batch, evaluator.key)
    texts = response_texts(evaluator.renderer, jax.device_get(rollout))[:30]
    assert [r.text for r in evaluator(params, PROMPTS)] == texts

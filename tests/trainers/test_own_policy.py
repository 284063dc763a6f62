"""The example of docs/own-policy.md runs and learns; what it promises of own modules holds."""

import json
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.config import load_config
from rlhf_jax.data.messages import Message
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.errors import InputError
from rlhf_jax.models.parameters import logical_axes
from rlhf_jax.rollout.scored import settled
from rlhf_jax.trainers.own_policy import own_policy_task

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "own-policy.md"
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1]


def test_the_example_on_the_page_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    exec(compile(EXAMPLE, str(PAGE), "exec"), names)
    lines = (tmp_path / "runs/own-policy/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    scores = [record["reward/score_mean"] for record in records if record["phase"] == "ppo"]
    assert scores[0] < 0.2
    assert scores[-1] > 0.8
    assert abs(records[0]["reward/kl"]) < 1e-4  # the reference is the module's first parameters
    assert records[0]["rollout/logprob_diff_max"] < 1e-4
    assert int(names["learner"].iteration) == len(scores) == 12
    assert (tmp_path / "runs/own-policy/checkpoints/ppo/12").is_dir()


class Named(nn.Module):
    """A module of which one parameter names its axes and one does not."""

    @nn.compact
    def __call__(self, tokens_BT, mask_BT):
        table = self.param(
            "table", nn.with_logical_partitioning(nn.initializers.normal(), ("vocab", "embed")), (8, 4)
        )
        return nn.Dense(8, use_bias=False, name="out")(table[tokens_BT])


def test_axis_names_are_optional():
    assert logical_axes(Named()) == {"table": ("vocab", "embed"), "out": {"kernel": (None, None)}}


class Constant(nn.Module):
    """The same outputs whatever it reads."""

    outputs: int

    @nn.compact
    def __call__(self, tokens_BT, mask_BT):
        bias = self.param("bias", nn.initializers.zeros, (self.outputs,))
        return jnp.broadcast_to(bias, (*tokens_BT.shape, self.outputs))


def constant(outputs):
    module = Constant(outputs)
    return module, module.init(jax.random.key(0), jnp.zeros((1, 1), int), jnp.ones((1, 1), bool))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda prompts, responses: [0.0], "gave shape"),
        (lambda prompts, responses: [np.nan] * len(responses), "finite"),
    ],
    ids=["one number for all", "not a number"],
)
def test_a_reward_of_the_wrong_form_is_refused_by_name(reward, message):
    prompts = [(Message("user", "a"),)]
    tokenizer = train_tokenizer(["a"], vocab_size=260)
    task, _ = own_policy_task(
        load_config(None, []), constant(len(tokenizer)), constant(1), tokenizer, reward, prompts
    )
    scored = task.evaluator.scorer(None, prompts * 2, ["one", "two"])
    with pytest.raises(InputError, match=f"<lambda>.*{message}"):
        settled(scored.scores_B, scored.reasons, [0, 1], fallback=task.evaluator.fallback)


class Counting(nn.Module):
    """A module that remembers how often it was called."""

    @nn.compact
    def __call__(self, tokens_BT, mask_BT):
        self.variable("counts", "calls", jnp.zeros, ()).value += 1
        return constant(4)[0](tokens_BT, mask_BT)


@pytest.mark.parametrize(
    ("setting", "module", "message"),
    [
        ("ppo.batch_size=9", Constant(4), r"ppo\.batch_size=9"),
        ("eval.every=5", Constant(4), "held_out"),
        ("lora.rank=2", Constant(4), "use lora.rank=0"),
        ("ppo.batch_size=16", Counting(), "'counts'.*keeps state"),
    ],
    ids=["a batch that does not divide", "evaluation without prompts", "adapters", "a module with state"],
)
def test_what_cannot_work_is_refused_at_once(setting, module, message):
    variables = module.init(jax.random.key(0), jnp.zeros((1, 1), int), jnp.ones((1, 1), bool))
    tokenizer = train_tokenizer(["a"], vocab_size=260)
    with pytest.raises(InputError, match=message):
        own_policy_task(
            load_config(None, [setting]), (module, variables), constant(1), tokenizer, lambda p, r: [], []
        )

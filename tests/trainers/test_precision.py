"""bfloat16 is a type of the computation: weights, moments, log-probabilities, values, losses are float32."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.losses.masked import counts
from rlhf_jax.models import export_model, init_model, shape_config
from rlhf_jax.rollout.score import response_logprobs, response_values
from rlhf_jax.settings import Ppo, Shape
from rlhf_jax.trainers import pipeline, ppo_loop
from rlhf_jax.trainers.ppo import actor_loss, critic_loss
from tests.trainers.test_ppo import actor, critic, on_one_device


def share_of_letters(prompts, responses):
    return [sum(c in "abcdefghijklmnopqrstuvwxyz" for c in text) / max(len(text), 1) for text in responses]


def test_log_probabilities_and_values_are_near_those_of_float32():
    """bfloat16 has 8 significant bits: a relative error of 2^-9 in each product, of logits of about 3."""
    rollout = on_one_device()["rollout"]
    mask, (model, params), (value_model, value_params) = rollout.mask_BT, actor(), critic()
    exact, _ = response_logprobs(model, params, rollout, temperature=0.8)
    rounded, _ = response_logprobs(model.clone(dtype=jnp.bfloat16), params, rollout, temperature=0.8)
    assert rounded.dtype == jnp.float32
    assert 1e-4 < np.abs(exact - rounded)[mask].max() < 0.1
    exact, _ = response_values(value_model, value_params, rollout)
    rounded, _ = response_values(value_model.clone(dtype=jnp.bfloat16), value_params, rollout)
    assert rounded.dtype == jnp.float32
    np.testing.assert_allclose(exact[mask], rounded[mask], atol=0.02 * np.abs(exact[mask]).max())


def test_losses_and_gradients_are_float32_and_near_those_of_float32():
    result = on_one_device()
    experience, denominator = result["experience"], counts(result["rollout"].mask_BT)
    for loss, (model, params), options in (
        (actor_loss, actor(), {"kl_coef": jnp.float32(0.1), "temperature": 0.8}),
        (critic_loss, critic(), {}),
    ):

        def value_and_grad(dtype, loss=loss, model=model, params=params, options=options):
            def of(params):
                own = model.clone(dtype=dtype)
                return loss(params, experience, model=own, ppo=Ppo(), denominator=denominator, **options)[0]

            return jax.jit(jax.value_and_grad(of))(params)

        (exact, grads), (rounded, rounded_grads) = value_and_grad(jnp.float32), value_and_grad(jnp.bfloat16)
        assert rounded.dtype == jnp.float32
        np.testing.assert_allclose(rounded, exact, rtol=0.02, atol=0.02)
        flat, rounded_flat = (
            np.concatenate([np.ravel(g) for g in jax.tree.leaves(tree)]) for tree in (grads, rounded_grads)
        )
        assert rounded_flat.dtype == np.float32
        assert np.linalg.norm(rounded_flat - flat) < 0.1 * np.linalg.norm(flat)


LEARNING = [
    "reward.function=tests.trainers.test_precision:share_of_letters",
    *("ppo.iterations=12", "ppo.batch_size=48", "ppo.minibatches=1", "ppo.kl_coef=0"),
    *("rollout.prompt_length=24", "run.save_every=100", "run.profile_every=0", "ppo.learning_rate=0.03"),
]


LORA = ["lora.rank=8", "lora.alpha=32", "ppo.iterations=40"]


def base(directory):
    """A model whose matrices are large enough that adapters between them change what it says a little."""
    tokenizer = train_tokenizer(["say something or nothing"], 300)
    shape = Shape(
        vocab_size=len(tokenizer), layers=2, embed=16, heads=4, kv_heads=2, mlp=32, max_positions=128
    )
    model, variables = init_model(shape_config(shape))
    large = jax.tree.map(lambda x: x * (10 if x.ndim > 1 else 1), variables)
    export_model(directory, model, large, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "settings",
    [
        ["policy.dtype=bfloat16", "critic.shared=true"],
        pytest.param(["policy.dtype=bfloat16"], marks=pytest.mark.slow),
        pytest.param(["policy.dtype=bfloat16", *LORA], marks=pytest.mark.slow),
    ],
    ids=["bfloat16, shared critic", "bfloat16", "adapters in bfloat16"],
)
def test_a_policy_learns(tiny, tmp_path, monkeypatch, settings):
    if settings[1:] == LORA:
        base(tmp_path / "base")
        settings = [*settings, f"policy.model={tmp_path / 'base'}"]
    learners, iterate = [], ppo_loop.iterate_with_batch

    def watched(*args):
        result = iterate(*args)
        learners.append(result[0])
        return result

    monkeypatch.setattr(ppo_loop, "iterate_with_batch", watched)
    pipeline.ppo(tiny(*LEARNING, *settings))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    scores = [json.loads(line)["reward/score_mean"] for line in lines]
    assert np.mean(scores[-5:]) > scores[0] + (0.08 if "lora.rank=8" in settings else 0.3)
    floats = [x for x in jax.tree.leaves(learners[-1]) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {np.dtype("float32")}

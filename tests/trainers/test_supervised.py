"""Fine-tuning and reward-model training: the losses by hand, what is learnt, what is kept."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.config import load_config
from rlhf_jax.data.messages import Message
from rlhf_jax.data.preferences import Preference
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.errors import InputError
from rlhf_jax.losses import token_logprobs
from rlhf_jax.models.configs import shape_config
from rlhf_jax.models.parameters import init_model
from rlhf_jax.settings import Reward, Shape
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.trainers import pipeline
from rlhf_jax.trainers.inputs import read_pairs
from rlhf_jax.trainers.reward import pair_batch, render_pairs, reward_loss
from rlhf_jax.trainers.sft import dialogue_batch, render_dialogues, sft_loss
from tests.trainers.conftest import TINY


def pair(prompt="hello there", chosen="good day", rejected="go away"):
    return Preference((Message("user", prompt),), chosen, rejected)


@functools.cache
def renderer():
    return Renderer(train_tokenizer(["hello there good day go away " * 3], 280))


@functools.cache
def model(head):
    shape = Shape(vocab_size=280, layers=1, embed=16, heads=2, kv_heads=2, mlp=32, max_positions=128)
    return init_model(shape_config(shape), head=head, seed=0)


@functools.cache
def view():
    return training_view({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])


def test_only_response_tokens_are_learnt_and_the_eos_is_one_of_them():
    dialogues = render_dialogues([pair()], renderer(), 100, "pairs")
    batch = dialogue_batch(dialogues, 100, view(), 1)
    learnt = np.asarray(batch.tokens_GRL)[np.asarray(batch.target_GRL)]
    assert list(learnt) == renderer().response("good day")
    assert learnt[-1] == renderer().eos_id


TEXTS = (pair(), pair(chosen="a much longer good day to you"), pair(rejected="go"), pair("hello", "there"))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_sft_loss_is_the_mean_over_response_tokens_of_dialogues_read_alone(groups):
    """However they are packed: neighbours in a row do not see each other."""
    lm, variables = model("lm")
    dialogues = render_dialogues(TEXTS, renderer(), 100, "pairs")
    batch = dialogue_batch(dialogues, 80, view(), groups)
    assert batch.tokens_GRL.shape == (groups, {1: 2, 2: 1, 4: 1}[groups], 80)
    loss, _ = sft_loss(variables["params"], batch, model=lm, denominator=batch.target_GRL.sum())
    nats = tokens = 0.0
    for dialogue in dialogues:
        row = jnp.asarray([dialogue.tokens])
        logprobs_T = np.asarray(token_logprobs(lm.apply(variables, row)[:, :-1], row[:, 1:]))[0]
        nats -= logprobs_T[-dialogue.response_length :].sum()
        tokens += dialogue.response_length
    np.testing.assert_allclose(loss, nats / tokens, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_both_sides_of_a_pair_are_scored_as_they_are_alone(groups, packed):
    """Padding, the neighbour in the row or the neighbour in the batch changed a score."""
    scorer, variables = model("score")
    pairs = render_pairs(TEXTS, renderer(), 100, "pairs")
    batch = pair_batch(pairs, 60, view(), groups, packed=packed)
    assert (batch.tokens_GRL.shape[:2] == (groups, 8 // groups)) is not packed
    loss, metrics = reward_loss(
        variables["params"], batch, model=scorer, settings=Reward(), denominator=len(pairs)
    )
    alone = [
        [float(scorer.apply(variables, jnp.asarray([row]))[0]) for row in (p.chosen, p.rejected)]
        for p in pairs
    ]
    margins = np.array([chosen - rejected for chosen, rejected in alone])
    np.testing.assert_allclose(loss, np.log1p(np.exp(-margins)).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], (margins > 0).mean())


def test_a_pair_that_does_not_fit_is_dropped_and_none_left_is_an_error():
    long = pair(chosen="good day " * 50)
    assert len(render_pairs([pair(), long], renderer(), 40, "pairs")) == 1
    with pytest.raises(InputError, match=r"none of 1 pairs fits reward\.max_length=40; raise it"):
        render_pairs([long], renderer(), 40, "pairs")


def records(directory, phase):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["phase"] == phase]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """SFT and then a reward model on pairs that are easy to tell apart."""
    folder = tmp_path_factory.mktemp("supervised")
    rng = np.random.default_rng(0)
    kind, unkind = ["good", "day", "friend", "welcome"], ["go", "away", "never", "stop"]
    rows = [
        {
            "prompt": f"say {' '.join(rng.permutation(['hello', 'please', 'there', 'now']))} {i}",
            "chosen": " ".join(rng.choice(kind, 3)),
            "rejected": " ".join(rng.choice(unkind, 3)),
        }
        for i in range(160)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = [f"data.train={folder / 'pairs.jsonl'}", "data.limit=160"]
    settings = ["sft.epochs=2", "reward.epochs=2", f"run.dir={folder / 'run'}"]
    config = load_config(None, [*TINY, *data, *settings])
    pipeline.sft(config)
    pipeline.reward(config)
    return config, folder / "run"


def test_the_loss_falls_and_every_step_is_logged_once(trained):
    config, directory = trained
    for phase in ("sft", "reward"):
        steps = records(directory, phase)
        assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
        losses = [record[f"{phase}/loss"] for record in steps]
        assert np.mean(losses[-4:]) < np.mean(losses[:4])
    assert len(records(directory, "sft")) == 2 * (len(read_pairs(config.data, 0).train) // 8)


def test_the_best_evaluation_is_the_one_that_is_exported(trained):
    """The best checkpoint was chosen by the wrong counter."""
    _, directory = trained
    notes = json.loads((directory / "best_reward_model" / "config.json").read_text())["rlhf_jax"]
    accuracy = {
        r["step"]: r["reward/validation_accuracy"]
        for r in records(directory, "reward")
        if "reward/validation_accuracy" in r
    }
    assert len(accuracy) > 2
    assert notes["validation_accuracy"] == max(accuracy.values())
    assert accuracy[notes["step"]] == max(accuracy.values())


def test_scores_of_the_reference_have_mean_zero_and_variance_one_on_the_stored_scale(trained):
    config, directory = trained
    notes = json.loads((directory / "best_reward_model" / "config.json").read_text())["rlhf_jax"]
    assert notes["gain"] > 0
    with pipeline._job(config, "reward") as job:
        policy, reward = pipeline._initial_policy(job), pipeline._trained_reward_model(job)
        again = pipeline._measure_scale(job, policy, reward)
    assert again.gain == pytest.approx(notes["gain"], rel=1e-4)
    assert again.bias == pytest.approx(notes["bias"], rel=1e-3, abs=1e-4)


def test_the_exported_reward_model_scores_as_the_one_in_training(trained):
    """Accuracy measured again from the directory equals the logged one."""
    from rlhf_jax.rollout.reward_model import RewardModel
    from rlhf_jax.trainers import roles
    from rlhf_jax.trainers.reward import pair_accuracy

    config, directory = trained
    notes = json.loads((directory / "best_reward_model" / "config.json").read_text())["rlhf_jax"]
    loaded = roles.load_reward_model(str(directory / "best_reward_model"), "float32")
    reward_view = make_views(config).reward
    scorer = RewardModel(
        loaded.model,
        loaded.place(reward_view),
        loaded.renderer,
        view=reward_view,
        max_length=config.reward.max_length,
        batch_size=8,
    )
    pairs = render_pairs(
        read_pairs(config.data, 0).held_out, loaded.renderer, config.reward.max_length, "pairs"
    )
    assert pair_accuracy(scorer, pairs)[0] == pytest.approx(notes["validation_accuracy"])
    assert len(pairs) == notes["validation_pairs"]


def test_a_backbone_is_refused_as_a_trained_reward_model(trained, tiny):
    """A model without a score head was scored by a random one, with no word."""
    _, directory = trained
    with pytest.raises(InputError, match="no trained score head"):
        pipeline.ppo(tiny(f"reward.model={directory / 'sft_policy'}"))


def test_nothing_is_made_where_the_input_is_wrong(tiny, tmp_path):
    with pytest.raises(InputError, match=r"missing\.jsonl"):
        pipeline.reward(tiny(f"data.train={tmp_path / 'missing.jsonl'}"))
    with pytest.raises(InputError, match=r"sft\.epochs=0 leaves nothing to do"):
        pipeline.sft(tiny())
    assert not (tmp_path / "run").exists()

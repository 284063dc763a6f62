"""The PPO benchmark from end to end, and the work that it counts."""

import jax
import numpy as np
import products
import pytest
from ppo_step import TINY
from ppo_task import TokenPrompts, first_turns, load_model, make_task, random_prompts
from ppo_work import Work, iteration_work

from rlhf_jax.config import load_config
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.errors import InputError
from rlhf_jax.models.flops import forward_flops
from tests.benchmarks.scripts import TINY_SHAPE, result_of

PHASES = {"reshard", "gen", "old", "ref", "values", "reward", "adv", "update_critic", "update_actor"}
SIZES = ("--batch", 8, "--prompt", 8, "--response", 6, "--updates", 2)


@pytest.mark.slow
def test_a_new_model_on_a_mesh():
    result = result_of("ppo_step.py", "new", *TINY_SHAPE, *SIZES, "--mesh", "2,2,2", "--micro", 4, devices=8)
    assert result["devices"] == 8
    assert result["response_tokens"] == [48, 48]  # no token ends a response
    assert set(result["phases"]) == PHASES


def test_the_tiny_model_compiles_nothing_after_the_first_iterations():
    sizes = ("--batch", 4, "--prompt", 12, "--response", 8)
    result = result_of("ppo_step.py", "--tiny", *TINY_SHAPE, *sizes, "--updates", 7)
    assert result["compiled_first"] > 5
    assert result["compiled_after"] == 0
    assert 0 < result["host_overhead_ms"] < 1000


def test_the_tiny_model_has_a_million_parameters():
    config = load_config(None, list(TINY))
    assert sum(leaf.size for leaf in jax.tree.leaves(load_model(config).shapes)) == pytest.approx(
        1e6, rel=0.05
    )


@pytest.fixture
def task():
    config = load_config(
        None, [*TINY_SHAPE, "ppo.batch_size=2", "ppo.epochs=3", "ppo.minibatches=2", "placement.train.data=8"]
    )
    policy = load_model(config)
    return make_task(config, policy, random_prompts(2, [5], 300))[0]


def test_work_by_hand(task):
    prompts_B, responses_B = np.array([3, 5]), np.array([2, 4])
    work = iteration_work(task, prompts_B, responses_B)
    config = task.steps.policy.model.config
    size = 300 * 16 + (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32 + 2 * 16) + 16
    assert set(work) == PHASES
    forward = forward_flops(config, [4, 8], unembed_positions=6)
    assert work["gen"].flops == work["ref"].flops == forward
    assert work["old"].flops == 0  # those of the rollout are taken
    assert work["update_actor"].flops == 3 * 3 * forward
    assert work["values"].flops == work["reward"].flops == forward_flops(config, [5, 9])
    assert work["update_critic"].flops == 9 * forward_flops(config, [5, 9])
    # four decode steps read the weights; a token attends to all before it: 3 + 4 and 5 + 6 + 7 + 8 of them,
    # each with keys and values of 2 heads of 4 numbers in one layer
    assert work["gen"].bytes == 4 * (4 * size + (7 + 26) * 2 * 2 * 4)
    # six optimizer steps: weights twice, gradients once, and Adam's seven passes
    assert work["update_actor"].bytes == 6 * size * (3 * 4 + 7 * 4)


def flops(products):
    return sum(2 * p.batch * p.rows * p.inner * p.columns * n for p, n in products.items())


def test_products_by_hand(task):
    """Those of a forward pass have its FLOPs, but that every token attends to all; a backward pass twice."""
    config = task.steps.policy.model.config
    assert products.forward_pass(config, 2, 4, 6) == {
        products.Product(1, 8, 16, 16): 2,  # queries; back to the width
        products.Product(1, 8, 16, 8): 2,  # keys, values
        products.Product(1, 8, 16, 32): 2,  # gate, up
        products.Product(1, 8, 32, 16): 1,
        products.Product(4, 8, 4, 4): 2,  # two rows of two keys' heads, each with two queries' over 4 tokens
        products.Product(1, 6, 16, 300): 1,
    }
    rest = flops(products.of_attention(config, 2, 4)) - 2 * 2 * 10 * 2 * 16  # 10 pairs of a row are counted
    forward = flops(products.forward_pass(config, 2, 4, 6))
    assert forward == forward_flops(config, [4, 4], unembed_positions=6) + rest
    assert flops(products.update(config, 2, 4, 6, "layers")) == 4 * forward
    assert flops(products.update(config, 2, 4, 0, "none")) == 3 * flops(products.forward_pass(config, 2, 4))
    gate_and_up = 2 * 2 * 8 * 16 * 32
    again = flops(products.update(config, 2, 4, 0, "products")) - flops(
        products.update(config, 2, 4, 0, "none")
    )
    assert again == gate_and_up + flops(products.of_attention(config, 2, 4))


def test_products_of_an_iteration(task):
    found = products.of_iteration(task, 5, 3)
    config = task.steps.policy.model.config
    assert found["update_critic"] == products.times(products.update(config, 1, 8, 0, "products"), 3 * 2)
    decoding = flops(found["gen"]) - flops(products.forward_pass(config, 2, 5, 2))
    more_columns = 2 * (8 - 1) * 2 * 2 * 16  # the cache has eight, of which the FLOPs count one
    assert decoding == 2 * (forward_flops(config, [1, 1], unembed_positions=2) + more_columns)
    assert 0 < products.seconds(found["ref"], "float32") < 1


def test_the_floor_is_the_longer_of_both_limits():
    limits = {"flops_s": 10.0, "bytes_s": 5.0}
    assert Work(flops=100, bytes=10).seconds(limits) == 10
    assert Work(flops=100, bytes=100).seconds(limits) == 20


def renderer():
    return Renderer(train_tokenizer(["why is the sky blue"], vocab_size=270))


def test_prompts_of_tokens_end_where_they_are_told():
    prompts = TokenPrompts(renderer(), eos_ids=[3])
    assert prompts.prompt((5, 6, 7), 64) == [5, 6, 7]
    assert prompts.eos_ids == (3,)
    assert prompts.text([70, 71]) == prompts.text([70 + len(prompts.tokenizer), 71])
    assert TokenPrompts(renderer()).eos_ids == ()


def test_random_prompts_repeat_and_keep_away_from_special_tokens():
    rows = random_prompts(50, range(3, 6), 1000)
    assert rows == random_prompts(50, range(3, 6), 1000)
    assert {len(row) for row in rows} == {3, 4, 5}
    assert min(map(min, rows)) >= 100
    assert max(map(max, rows)) < 900


def test_natural_prompts_are_the_first_short_ones(pairs_file):
    found = first_turns(str(pairs_file), renderer(), 10, 30)
    assert [turn[0].content for turn in found[:2]] == ["why 0?", "why why 1?"]
    assert all(len(renderer().prompt(turn, 64)) <= 30 for turn in found)
    with pytest.raises(InputError, match="use fewer updates"):
        first_turns(str(pairs_file), renderer(), 61, 64)

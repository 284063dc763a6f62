"""The reward model's loss: by hand, by slope, by property."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.losses import ranking_loss

from . import oracles

jitted = jax.jit(ranking_loss, static_argnames="kind")


def numbers(chosen, rejected, **options):
    loss, metrics = jitted(np.array(chosen, np.float32), np.array(rejected, np.float32), **options)
    return float(loss), {k: float(v) for k, v in metrics.items()}


def test_bradley_terry_by_hand():
    loss, metrics = numbers([2.0, 0.5, 1.0], [1.0, 1.5, 1.0])
    expected = (math.log1p(math.exp(-1)) + math.log1p(math.exp(1)) + math.log(2)) / 3
    assert loss == pytest.approx(expected, rel=1e-6)
    assert metrics == pytest.approx({"accuracy": 0.5, "score_margin": 0.0})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "hinge", "margin": 1.5}, (0 + 1.0) / 2),
        ({"kind": "hinge", "margin": np.array([3.0, 0.0])}, (1 + 0) / 2),
        ({"margin": 2.0}, (math.log(2) + math.log1p(math.exp(1.5))) / 2),
        ({"kind": "hinge", "centering_coef": 0.1}, 0.1 * (4**2 + 0.5**2) / 2),
    ],
    ids=["hinge", "a margin for each pair", "Bradley-Terry with margin", "centred"],
)
def test_options_by_hand(options, expected):
    loss, metrics = numbers([3.0, 0.5], [1.0, 0.0], **options)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert metrics == {"accuracy": 1, "score_margin": 1.25}  # whatever the loss asks for


def test_ties_count_one_half():
    assert numbers([1.0, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0])[1]["accuracy"] == 0.5
    assert numbers([1.0], [1.0])[1]["accuracy"] == 0.5


@pytest.mark.parametrize("kind", ["bradley_terry", "hinge"])
def test_slopes(kind):
    with oracles.x64():
        chosen, rejected = oracles.normal(0, 2, 5)
        f = jax.jit(
            lambda pair: ranking_loss(pair[0], pair[1], kind=kind, margin=0.3, centering_coef=0.05)[0]
        )
        pair = np.stack([chosen, rejected])
        np.testing.assert_allclose(jax.grad(f)(pair), oracles.slope(f, pair), atol=1e-8)


@pytest.mark.parametrize("gap", [1e4, -1e4], ids=["certain", "certainly wrong"])
def test_huge_differences_stay_finite(gap):
    loss, slope = jax.value_and_grad(lambda x: ranking_loss(x, jnp.zeros(1))[0])(jnp.array([gap]))
    np.testing.assert_allclose(loss, max(0, -gap), atol=1e-6)
    np.testing.assert_allclose(slope, [0 if gap > 0 else -1], atol=1e-6)


scores = st.lists(st.integers(-64, 64).map(lambda x: x / 8), min_size=4, max_size=4)


@settings(max_examples=40, deadline=None)
@given(scores, scores, st.integers(-64, 64))
def test_properties(chosen, rejected, shift):
    """Scores matter by their differences; swapping the sides mirrors accuracy and margin."""
    chosen, rejected = np.array(chosen, np.float32), np.array(rejected, np.float32)
    loss, metrics = jitted(chosen, rejected)
    assert loss >= 0
    assert 0 <= metrics["accuracy"] <= 1
    np.testing.assert_array_equal(jitted(chosen + shift, rejected + shift)[0], loss)
    swapped = jitted(rejected, chosen)[1]
    assert swapped["accuracy"] == 1 - metrics["accuracy"]
    assert swapped["score_margin"] == -metrics["score_margin"]


def test_micro_batches_add_up_to_the_whole():
    """Loss and accuracy depended on the micro-batch size: parts of 3, 2 and 3 pairs."""
    with oracles.x64():
        chosen, rejected = oracles.normal(1, 2, 8)
        f = jax.jit(
            jax.value_and_grad(
                lambda c, r, n: ranking_loss(c, r, centering_coef=0.1, denominator=n), has_aux=True
            )
        )
        whole, slope = f(chosen, rejected, None)
        parts = [f(chosen[i:j], rejected[i:j], 8) for i, j in ((0, 3), (3, 5), (5, 8))]
        total = jax.tree.map(lambda *x: sum(x), *[value for value, _ in parts])
        for x, y in zip(jax.tree.leaves(total), jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12)
        np.testing.assert_allclose(np.concatenate([s for _, s in parts]), slope, rtol=1e-12)


def test_no_pairs_give_0():
    loss, metrics = numbers([], [])
    assert loss == 0
    assert metrics == {"accuracy": 0, "score_margin": 0}


def test_bfloat16_scores_are_raised_before_the_difference():
    """256.0 - 0.5 is 256 in bfloat16."""
    loss, metrics = ranking_loss(jnp.array([256.0], jnp.bfloat16), jnp.array([0.5], jnp.bfloat16))
    assert loss.dtype == metrics["score_margin"].dtype == jnp.float32
    assert metrics["score_margin"] == 255.5


def test_wrong_kind_names_the_right_ones():
    with pytest.raises(ValueError, match="'logistic' is unknown; use bradley_terry, hinge"):
        ranking_loss(jnp.zeros(1), jnp.zeros(1), kind="logistic")

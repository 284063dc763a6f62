"""Schedules by hand, micro-batches against the whole batch, and updates that a bad gradient cannot spoil."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlhf_jax.losses.masked import counts
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.rules import batch_sharding, parameter_shardings
from rlhf_jax.trainers.optimizer import (
    accumulate,
    init_state,
    make_optimizer,
    make_schedule,
    state_shardings,
    update_step,
)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4]),
    ],
)
def test_schedule_by_hand(schedule, expected):
    rate = make_schedule(1.0, steps=6, warmup_steps=2, schedule=schedule)
    np.testing.assert_allclose([rate(step) for step in range(6)], expected, rtol=1e-6)


def test_without_warm_up_the_first_step_has_the_peak():
    assert make_schedule(0.3, steps=4, warmup_steps=0, schedule="linear")(0) == pytest.approx(0.3)


def quadratic(params, rows, *, denominator):
    """A masked squared error: a sum over rows, divided by the whole batch's tokens."""
    error = jnp.where(rows["mask"], (rows["x"] @ params["kernel"] - rows["y"]) ** 2, 0.0)
    return error.sum() / denominator["tokens"], {"error": error.sum() / denominator["tokens"]}


def ragged_batch(rows=8, length=5, width=3):
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.normal(size=(rows, length, width)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=(rows, length)), jnp.float32),
        "mask": jnp.asarray(np.arange(length)[None, :] < rng.integers(0, length + 1, (rows, 1))),
    }


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_micro_batches_add_up_to_the_whole_batch(micro_batch_size):
    """The loss depended on the size of the micro-batch, because each divided by its own tokens."""
    batch, params = ragged_batch(), {"kernel": jnp.arange(3.0)}

    def loss(params, rows):
        return quadratic(params, rows, denominator=counts(batch["mask"]))

    (whole, whole_metrics), whole_grads = accumulate(loss, params, batch, None)
    (value, metrics), grads = accumulate(loss, params, batch, micro_batch_size)
    np.testing.assert_allclose(value, whole, rtol=1e-6)
    np.testing.assert_allclose(metrics["error"], whole_metrics["error"], rtol=1e-6)
    np.testing.assert_allclose(grads["kernel"], whole_grads["kernel"], rtol=1e-5, atol=1e-6)


def small_state(learning_rate=0.1, weight_decay=0.0):
    params = {"kernel": jnp.ones(3), "scale": jnp.ones(3)}
    view = training_view({"data": 8, "fsdp": 1, "tensor": 1})
    axes = {"kernel": ("embed",), "scale": ("norm",)}
    tx, state, _ = placed_state(view, params, axes, learning_rate, weight_decay)
    return tx, state


def placed_state(view, params, axes, learning_rate=0.1, weight_decay=0.0):
    """(optimizer, state in this view, its shardings)."""
    tx = make_optimizer(optax.constant_schedule(learning_rate), weight_decay=weight_decay, max_grad_norm=1.0)
    places = state_shardings(tx, params, parameter_shardings(view, axes, params), view)
    return tx, init_state(tx, jax.device_put(params, places.params), places), places


def constant_gradient(params, slope):
    return (slope * (params["kernel"] + params["scale"])).sum(), {}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad):
    """One NaN gradient destroyed the run unnoticed."""
    tx, state = small_state()
    good, _ = update_step(tx, constant_gradient, state, jnp.ones(3))
    after = good
    for count in (1, 2):
        after, metrics = update_step(tx, constant_gradient, after, jnp.asarray([1.0, bad, 1.0]))
        assert metrics["skipped"] == 1
        assert after.bad_steps == count
        assert after.steps == 1
        assert all(np.isfinite(number) for number in metrics.values())
        before, now = (jax.tree.leaves((s.params, s.opt_state)) for s in (good, after))
        for left, right in zip(before, now, strict=True):
            np.testing.assert_array_equal(left, right)
    after, metrics = update_step(tx, constant_gradient, after, jnp.ones(3))
    assert (after.bad_steps, after.steps, metrics["skipped"]) == (0, 2, 0)


def test_only_matrices_decay():
    tx, state = small_state(learning_rate=0.1, weight_decay=0.5)
    state, _ = update_step(tx, constant_gradient, state, jnp.zeros(3))
    np.testing.assert_allclose(state.params["kernel"], 0.95)
    np.testing.assert_allclose(state.params["scale"], 1.0)


def test_the_reported_norm_is_that_before_clipping():
    tx, state = small_state()
    _, metrics = update_step(tx, constant_gradient, state, jnp.full(3, 2.0))
    assert metrics["grad_norm"] == pytest.approx(2 * 6**0.5)


@pytest.mark.parametrize("slope", [0.1, 2.0])
def test_gradients_are_clipped_as_by_optax(slope):
    """Adam hides a common factor of all its gradients but in eps: the first moment shows it."""
    tx, state = small_state()
    state, _ = update_step(tx, constant_gradient, state, jnp.full(3, slope))
    grads = {"kernel": jnp.full(3, slope), "scale": jnp.full(3, slope)}
    clipped, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    for name, moment in optax.tree_utils.tree_get(state.opt_state, "mu").items():
        np.testing.assert_allclose(moment, 0.1 * clipped[name], rtol=1e-6)


def test_no_device_waits_for_another_inside_the_condition():
    """Collectives in a branch held up virtual CPU devices for ever."""
    view = training_view({"data": 2, "fsdp": 2, "tensor": 2})
    params = {"kernel": jnp.ones((8, 16))}
    tx, state, places = placed_state(view, params, {"kernel": ("embed", "mlp")}, weight_decay=0.1)

    def loss(params, rows):
        return ((rows @ params["kernel"]) ** 2).sum(), {}

    step = jax.jit(lambda state, rows: update_step(tx, loss, state, rows), out_shardings=(places, None))
    rows = jax.device_put(jnp.ones((4, 8)), batch_sharding(view))
    text = step.lower(state, rows).compile().as_text()
    assert "all-reduce" in text
    branches = re.findall(r"branch_computations=\{(.*?)\}|(?:true|false)_computation=(%[\w.-]+)", text)
    names = [name.strip() for pair in branches for part in pair for name in part.split(",") if name]
    assert len(names) == 2
    for name in names:
        body = text[text.index(f"\n{name} (") :].partition("\n}")[0]
        assert "fusion" in body or "add" in body
        assert not re.search(r"all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter", body)


def test_moments_lie_where_their_parameters_lie():
    """jit(tx.init) put Adam's moments of all parameters on one device."""
    view = training_view({"data": 1, "fsdp": 4, "tensor": 2})
    params = {"kernel": jnp.zeros((8, 16))}
    _, state, _ = placed_state(view, params, {"kernel": ("embed", "mlp")})
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (8, 16)]
    assert len(moments) == 2
    for moment in moments:
        assert moment.sharding == state.params["kernel"].sharding
        assert moment.addressable_shards[0].data.shape == (2, 8)

"""What every function with a mask promises about padding, empty batches, jit, vmap and types."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.losses import (
    gae,
    kl_estimate,
    kl_shaped_rewards,
    masked_mean,
    masked_whiten,
    ppo_policy_loss,
    ppo_value_loss,
)

from . import oracles
from .oracles import MASK, B, T

SCORES = np.array([0.5, -1.0, 2.0, 3.0], np.float32)

# Each takes `inputs` arrays of [B, T] and a mask.
FUNCTIONS = {
    "mean": (1, masked_mean),
    "mean of rows": (1, functools.partial(masked_mean, axis=-1)),
    "whiten": (1, masked_whiten),
    "KL in the loss": (2, lambda x, ref, mask: masked_mean(kl_estimate(x, ref, "k3", mask), mask)),
    "KL in the reward": (1, lambda kl, mask: kl_shaped_rewards(jnp.asarray(SCORES, kl.dtype), kl, mask, 0.1)),
    "GAE": (2, jax.vmap(functools.partial(gae, gamma=0.9, lam=0.8))),
    "policy loss": (3, functools.partial(ppo_policy_loss, clip_low=0.2, clip_high=0.2, dual_clip=3.0)),
    "value loss": (3, functools.partial(ppo_value_loss, clip=0.2, aggregation="seq_mean_token_mean")),
}
every = pytest.mark.parametrize(("inputs", "f"), FUNCTIONS.values(), ids=FUNCTIONS)


def all_outputs_and_slopes(f):
    """Every output, and the slopes of a scalar in which every output counts."""

    def scalar(arrays, mask):
        out = f(*arrays, mask)
        return sum((jnp.sin(x) * (i + 1)).sum() for i, x in enumerate(jax.tree.leaves(out))), out

    return jax.value_and_grad(scalar, has_aux=True)


def assert_equal(x, y, **tolerance):
    x, y = jax.tree.leaves(x), jax.tree.leaves(y)
    for a, b in zip(x, y, strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@every
def test_what_stands_in_the_padding_changes_neither_value_nor_slope(inputs, f):
    """NaN in padding leaked into the loss, or only into its gradient."""
    f = jax.jit(all_outputs_and_slopes(f))
    arrays = oracles.normal(0, inputs, B, T).astype(np.float32)
    clean = f(np.where(MASK, arrays, np.float32(0)), MASK)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean))
    for garbage in (np.nan, np.inf, -np.inf, 1e30, -1.0):
        dirty = f(np.where(MASK, arrays, np.float32(garbage)), MASK)
        assert_equal(dirty, clean, rtol=0)
    empty = f(np.full_like(arrays, np.nan), np.zeros_like(MASK))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(empty)), (
        "a batch without a valid token gives 0"
    )


@every
def test_jit_and_vmap_change_nothing(inputs, f):
    arrays = oracles.normal(1, 2, inputs, B, T).astype(np.float32)
    masks = np.stack([MASK, MASK[::-1]])
    plain = [f(*map(jnp.asarray, x), m) for x, m in zip(arrays, masks, strict=True)]
    stacked = jax.jit(jax.vmap(lambda x, m: f(*x, m)))(arrays, masks)
    for i in range(2):
        assert_equal(jax.tree.map(lambda x, i=i: x[i], stacked), plain[i], rtol=1e-5, atol=1e-6)


@every
def test_bfloat16_is_raised_and_float64_kept(inputs, f):
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in oracles.normal(2, inputs, B, T)]
    raised = f(*arrays, MASK)
    assert {x.dtype for x in jax.tree.leaves(raised)} == {jnp.dtype("float32")}
    assert_equal(raised, f(*(x.astype(jnp.float32) for x in arrays), MASK.astype(np.float32)), rtol=0)
    with oracles.x64():
        for mask in (MASK, MASK.astype(np.float32)):
            wide = f(*(jnp.asarray(x) for x in oracles.normal(2, inputs, B, T)), mask)
            assert {x.dtype for x in jax.tree.leaves(wide)} == {jnp.dtype("float64")}


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_of_garbage_is_0_where_masked(kind):
    x = np.where(MASK, -1.0, np.nan).astype(np.float32)
    np.testing.assert_array_equal(kl_estimate(x, 2 * x, kind, MASK)[~MASK], 0)


def test_statistics_of_a_rollout_on_eight_devices_are_those_of_one():
    """Whitening depended on the device count."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x, mask = oracles.normal(3, 8, T).astype(np.float32), np.concatenate([MASK, MASK[:, ::-1]])
    whiten = jax.jit(masked_whiten)
    np.testing.assert_allclose(
        whiten(jax.device_put(x, place), jax.device_put(mask, place)), whiten(x, mask), rtol=1e-5, atol=1e-6
    )

"""Log-probabilities and entropy, whole and in chunks."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.losses import chunked_logprobs, entropy_from_logits, masked_mean, token_logprobs

from . import oracles

B, T, V, D = 3, 7, 5, 4
TOKENS = np.random.default_rng(0).integers(0, V, (B, T))

logprobs_of, entropy_of = jax.jit(token_logprobs), jax.jit(entropy_from_logits)


def test_by_hand():
    p = jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]])
    np.testing.assert_allclose(
        logprobs_of(jnp.log(p) + 3, jnp.array([[1, 2]])), np.log([[0.25, 0.8]]), rtol=1e-6
    )
    np.testing.assert_allclose(
        entropy_of(jnp.log(p) - 7),
        [[1.5 * math.log(2), -0.2 * math.log(0.1) - 0.8 * math.log(0.8)]],
        rtol=1e-6,
    )


def test_by_loop():
    with oracles.x64():
        z = oracles.normal(1, B, T, V) * 3
        logprobs, entropy = np.zeros((B, T)), np.zeros((B, T))
        for b in range(B):
            for t in range(T):
                p = np.exp(z[b, t]) / np.exp(z[b, t]).sum()
                logprobs[b, t] = np.log(p[TOKENS[b, t]])
                entropy[b, t] = -(p * np.log(p)).sum()
        np.testing.assert_allclose(logprobs_of(z, TOKENS), logprobs, rtol=1e-12)
        np.testing.assert_allclose(entropy_of(z), entropy, rtol=1e-12)


def test_slopes():
    with oracles.x64():
        z, w = oracles.normal(2, 1, 2, V), oracles.normal(3, 1, 2)
        for f in (
            jax.jit(lambda z: (logprobs_of(z, TOKENS[:1, :2]) * w).sum()),
            jax.jit(lambda z: (entropy_of(z) * w).sum()),
        ):
            np.testing.assert_allclose(jax.grad(f)(z), oracles.slope(f, z), atol=1e-8)


def test_an_offset_of_all_logits_costs_no_digits():
    """logsumexp(z) - sum(p z) of logits around 8192 would keep three digits of the entropy in float32."""
    z = np.random.default_rng(1).integers(-3, 4, (2, 3, V)).astype(np.float32)
    np.testing.assert_array_equal(entropy_of(z + 8192), entropy_of(z))
    np.testing.assert_array_equal(logprobs_of(z + 8192, TOKENS[:2, :3]), logprobs_of(z, TOKENS[:2, :3]))


def test_impossible_tokens_add_nothing_to_the_entropy():
    z = jnp.array([[[1.0, 2.0, -jnp.inf, 0.5]]])
    entropy, slope = jax.value_and_grad(lambda z: entropy_of(z).sum())(z)
    np.testing.assert_allclose(entropy, entropy_of(z[..., jnp.array([0, 1, 3])])[0, 0], rtol=1e-6)
    assert np.isfinite(slope).all()


def test_ids_outside_the_vocabulary_in_padding_leave_the_slope_alone():
    z, mask = oracles.normal(4, B, T, V).astype(np.float32), np.arange(T) < np.array([[7], [3], [0]])
    f = jax.jit(jax.grad(lambda z, tokens: masked_mean(logprobs_of(z, tokens), mask)))
    for pad in (-100, V, -1):
        np.testing.assert_array_equal(f(z, np.where(mask, TOKENS, pad)), f(z, np.where(mask, TOKENS, 0)))


@pytest.mark.parametrize("f", [lambda z: logprobs_of(z, TOKENS), entropy_of])
def test_bfloat16_logits_are_raised_before_the_softmax(f):
    z = jnp.asarray(oracles.normal(5, B, T, V) * 5, jnp.bfloat16)
    assert f(z).dtype == jnp.float32
    np.testing.assert_array_equal(f(z), f(z.astype(jnp.float32)))


def plain(hidden, table, tokens, temperature):
    z = hidden @ table / temperature
    return logprobs_of(z, tokens), entropy_of(z)


def chunked(hidden, table, tokens, temperature, chunk):
    return chunked_logprobs(hidden, lambda h: h @ table, tokens, temperature=temperature, chunk=chunk)


def values_and_slopes(f):
    """Log-probs and entropy, and the slopes of a weighted sum of both by hidden states and table."""
    weights = oracles.normal(6, 2, B, T)

    def scalar(hidden, table):
        logprobs, entropy = f(hidden, table)
        return (logprobs * weights[0] + entropy * weights[1]).sum(), (logprobs, entropy)

    return jax.jit(jax.value_and_grad(scalar, (0, 1), has_aux=True))


plain_form = values_and_slopes(lambda hidden, table: plain(hidden, table, TOKENS, 0.7))


@pytest.mark.parametrize(
    "chunk", [1, 6, 7 * B, 1000], ids=["below the batch", "not dividing T", "all of T", "beyond T"]
)
def test_chunks_equal_the_plain_form_with_slopes(chunk):
    with oracles.x64():
        hidden, table = oracles.normal(7, B, T, D), oracles.normal(8, D, V)
        got = values_and_slopes(lambda h, w: chunked(h, w, TOKENS, 0.7, chunk))(hidden, table)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(plain_form(hidden, table)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)


def test_chunks_of_a_bfloat16_model_are_float32():
    hidden, table = (
        jnp.asarray(oracles.normal(i, *s), jnp.bfloat16) for i, s in ((7, (B, T, D)), (8, (D, V)))
    )
    for x, y in zip(chunked(hidden, table, TOKENS, 1.0, 6), plain(hidden, table, TOKENS, 1.0), strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, atol=1e-6)  # the products are the same bfloat16 numbers


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_the_logits(temperature):
    hidden, table = oracles.normal(7, B, T, D).astype(np.float32), np.eye(D, V, dtype=np.float32)
    tempered = np.exp(np.pad(hidden, ((0, 0), (0, 0), (0, 1))) / temperature)
    p = np.take_along_axis(tempered / tempered.sum(-1, keepdims=True), TOKENS[..., None], -1)[..., 0]
    np.testing.assert_allclose(
        chunked(hidden, table, TOKENS, temperature, 6)[0], np.log(p), rtol=1e-4, atol=1e-6
    )


def test_temperature_0_is_refused():
    with pytest.raises(ValueError, match=r"temperature 0.0 .* above 0"):
        chunked(np.zeros((B, T, D)), np.zeros((D, V)), TOKENS, 0.0, 6)


def test_chunks_never_hold_all_logits():
    """Neither forward nor backward: no array of the program has B * T * V entries, whatever its shape."""
    hidden, table, tokens = jnp.zeros((2, 16, 3)), jnp.zeros((3, 101)), jnp.zeros((2, 16), jnp.int32)
    f = jax.value_and_grad(lambda h, w: sum(x.sum() for x in chunked(h, w, tokens, 1.0, 8)), (0, 1))
    largest = max(
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"f32\[([\d,]+)\]", str(jax.make_jaxpr(f)(hidden, table)))
    )
    assert largest == 8 * 101


def test_chunks_keep_the_batch_sharded():
    """On eight devices each holds its own rows' logits only, and the numbers are those of one device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    hidden, table = oracles.normal(9, 8, 6, D).astype(np.float32), oracles.normal(8, D, 97).astype(np.float32)
    tokens = np.random.default_rng(2).integers(0, 97, (8, 6))
    f = jax.jit(lambda h, y: chunked(h, table, y, 1.0, 16))
    sharded = f.lower(jax.device_put(hidden, place), jax.device_put(tokens, place)).compile()
    assert "f32[1,2,97]" in sharded.as_text()
    assert "f32[8,2,97]" not in sharded.as_text()
    got = sharded(jax.device_put(hidden, place), jax.device_put(tokens, place))
    for x, y in zip(got, f(hidden, tokens), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)

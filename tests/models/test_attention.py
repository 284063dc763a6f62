"""Attention against a float64 loop; rotary frequencies by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models.attention import (
    attend,
    attend_cached,
    attend_fused,
    attend_plain,
    rope_frequencies,
    rotate,
    rotation,
)
from rlhf_jax.models.configs import Rope

B, T, H, K, E = 2, 5, 4, 2, 6
MASK = np.array([[0, 1, 1, 1, 1], [1, 1, 0, 1, 0]], bool)


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(B, T, n, E)).astype(dtype) for n in (H, K, K)]


def loop(q, k, v, mask, causal):
    """Float64, one query at a time; NaN where nothing may be attended to."""
    out = np.full(q.shape, np.nan)
    for b, t, h in np.ndindex(B, T, H):
        at = [s for s in range(T) if mask[b, s] and (s <= t or not causal)]
        if at:
            group = h * K // H
            scores = np.array([q[b, t, h] @ k[b, s, group] for s in at], np.float64) / np.sqrt(E)
            weights = np.exp(scores - scores.max())
            out[b, t, h] = (weights / weights.sum()) @ np.array([v[b, s, group] for s in at], np.float64)
    return out


@pytest.mark.parametrize("causal", [True, False])
def test_equals_the_loop(causal):
    q, k, v = arrays()
    wanted = loop(q, k, v, MASK, causal)
    found = np.asarray(attend(q, k, v, jnp.asarray(MASK), causal=causal))
    assert np.isfinite(found).all()
    reached = ~np.isnan(wanted)
    np.testing.assert_allclose(found[reached], wanted[reached], atol=1e-6)


def test_segments_of_a_packed_row_do_not_see_each_other():
    q, k, v = arrays()
    segments = np.array([[1, 1, 2, 2, 2], [1, 2, 2, 3, 0]], np.int32)
    found = np.asarray(attend(q, k, v, jnp.asarray(segments), causal=True))
    for number in (1, 2, 3):
        wanted = loop(q, k, v, segments == number, True)
        at = segments == number
        np.testing.assert_allclose(found[at], wanted[at], atol=1e-6)
    assert np.isfinite(found).all()


def test_the_fused_form_equals_the_plain_one_with_its_gradients():
    """By XLA in place of cuDNN, which has the same interface."""
    qkv, weights = arrays(), np.random.default_rng(1).normal(size=(B, T, H, E))
    allowed = jnp.asarray(MASK)[:, None, :] & jnp.tril(jnp.ones((1, T, T), bool))
    reached = jnp.asarray(~np.isnan(loop(*qkv, MASK, True)))

    def both(form, **options):
        return jax.value_and_grad(
            lambda *x: jnp.where(reached, form(*x, allowed, **options) * weights, 0).sum(), (0, 1, 2)
        )(*qkv)

    wanted, found = both(attend_plain), both(attend_fused, implementation="xla")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, wanted)


def test_a_gpu_takes_flash_attention_for_sixteen_bits_and_the_plain_form_for_more(monkeypatch):
    asked, xla = [], jax.nn.dot_product_attention

    def spy(*args, implementation, **options):
        asked.append(implementation)
        return xla(*args, implementation="xla", **options)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    for dtype, wanted in ((jnp.float32, []), (jnp.bfloat16, ["cudnn"])):
        attend(*(jnp.asarray(x, dtype) for x in arrays()), jnp.asarray(MASK), causal=True)
        assert asked == wanted


def test_over_a_cache_equals_the_last_query():
    q, k, v = arrays()
    whole = attend(q, k, v, jnp.asarray(MASK), causal=False)
    cached = attend_cached(q[:, -1], k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), jnp.asarray(MASK))
    np.testing.assert_allclose(cached, whole[:, -1], atol=1e-6)


def test_nothing_to_attend_to_gives_finite_gradients():
    q, k, v = arrays()
    nothing = jnp.zeros((B, T), bool)
    gradients = jax.grad(lambda *x: attend(*x, nothing, causal=True).sum(), (0, 1, 2))(q, k, v)
    assert all(np.isfinite(g).all() for g in gradients)


def test_bfloat16_has_a_float32_softmax():
    """Many equal weights sum to 1 within bfloat16's last bit only if they are normalised in float32."""
    n = 512
    q = jnp.zeros((1, n, 1, 8), jnp.bfloat16)
    v = jnp.ones((1, n, 1, 8), jnp.bfloat16)
    out = attend(q, q, v, jnp.ones((1, n), bool), causal=False)
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, atol=2**-8)


def test_linear_and_llama3_frequencies_by_hand():
    plain = rope_frequencies(Rope(theta=100.0), 4)
    np.testing.assert_allclose(plain, [1.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rope_frequencies(Rope(100.0, "linear", 4.0), 4), [0.25, 0.025], rtol=1e-6)
    # Over 40 positions the two turn 40/2pi = 6.37 and 0.637 times: above 4 kept, below 1 divided by 8.
    scaled = rope_frequencies(Rope(100.0, "llama3", 8.0, 1.0, 4.0, 40), 4)
    np.testing.assert_allclose(scaled, [1.0, 0.0125], rtol=1e-6)
    # Over 160 the second turns 2.546 times: (2.546 - 1) / 3 = 0.5154 of the way from 0.0125 to 0.1.
    scaled = rope_frequencies(Rope(100.0, "llama3", 8.0, 1.0, 4.0, 160), 4)
    np.testing.assert_allclose(scaled, [1.0, 0.0125 + 0.51549 * 0.0875], rtol=1e-4)


def test_rotation_by_hand_and_relative():
    rope = Rope(theta=100.0)
    cos, sin = rotation(rope, 4, jnp.array([[0, 3]]))
    x = jnp.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    turned = rotate(jnp.concatenate([x, x], 1), cos, sin)[0, :, 0]
    np.testing.assert_allclose(turned[0], x[0, 0, 0])
    wanted = [np.cos(3.0), -2 * np.sin(0.3), np.sin(3.0), 2 * np.cos(0.3)]  # pairs (0, 2) and (1, 3)
    np.testing.assert_allclose(turned[1], wanted, rtol=1e-5)

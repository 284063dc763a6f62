"""The projection's own gradient, against JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models.layers import product, projection

SHAPES = {
    "wide to narrow": ((2, 5, 24), (24, 8), 1),
    "narrow to wide": ((2, 5, 8), (8, 24), 1),
    "into heads": ((2, 5, 8), (8, 4, 6), 1),
    "out of heads": ((2, 5, 4, 6), (4, 6, 8), 2),
    "one row": ((7, 8), (8, 3), 1),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("x", "kernel", "inputs"), SHAPES.values(), ids=SHAPES.keys())
def test_a_projection_has_the_gradient_of_its_product(x, kernel, inputs, dtype):
    x_key, kernel_key, dy_key = jax.random.split(jax.random.key(0), 3)
    x, kernel = jax.random.normal(x_key, x, dtype), jax.random.normal(kernel_key, kernel, dtype)
    y, back = jax.vjp(lambda x, kernel: projection(x, kernel, inputs), x, kernel)
    expected, plain = jax.vjp(lambda x, kernel: product(x, kernel, inputs), x, kernel)
    np.testing.assert_array_equal(y, expected)
    dy = jax.random.normal(dy_key, y.shape, dtype)
    for ours, theirs in zip(back(dy), plain(dy), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-2  # sums of at most 24 products, in another order
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=tolerance, atol=5 * tolerance
        )

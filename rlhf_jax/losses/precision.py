"""The type of the arithmetic: float32 at least, whatever the model computes in."""

import jax
import jax.numpy as jnp


def at_least_float32(x) -> jax.Array:
    """x in float32, or in float64 where it is float64: bfloat16, float16, integers and bools are raised."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))

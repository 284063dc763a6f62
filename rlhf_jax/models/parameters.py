"""Trees of parameters: fresh ones, stacked or not, and the logical names of their axes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import meta

from rlhf_jax.errors import InputError
from rlhf_jax.models.configs import EncoderConfig, TransformerConfig
from rlhf_jax.models.encoder import Encoder
from rlhf_jax.models.transformer import Transformer

DTYPES = ("float32", "bfloat16")


def build_model(config: TransformerConfig | EncoderConfig, *, head: str, dtype: Any = "float32"):
    """The module for a config; dtype is the type of the computation, the parameters are float32."""
    name = jnp.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    if isinstance(config, EncoderConfig):
        return Encoder(config, head=head, dtype=jnp.dtype(name))
    return Transformer(config, head=head, dtype=jnp.dtype(name))


def init_model(
    config: TransformerConfig | EncoderConfig, *, head: str = "lm", dtype: Any = "float32", seed: int = 0
):
    """(model, variables) with fresh weights: normal with standard deviation 0.02, biases 0, norm scales 1."""
    model = build_model(config, head=head, dtype=dtype)
    return model, {"params": _fresh(model, jax.random.key(seed))}


def fresh_head(model, seed: int):
    """The subtree params["head"] of `init_model` with the same seed, without the backbone."""
    return _fresh_head(model, jax.random.key(seed))


def shapes(model) -> dict:
    """The tree of parameters as jax.ShapeDtypeStruct leaves."""
    return meta.unbox(jax.eval_shape(lambda: _boxed(model, jax.random.key(0))))


def logical_axes(model) -> dict:
    """The tree of parameters with each leaf's tuple of logical axis names; None where it has none."""
    boxed = jax.eval_shape(lambda: _boxed(model, jax.random.key(0)))
    is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)  # noqa: E731
    names = lambda x: tuple(x.names) if is_box(x) else (None,) * x.ndim  # noqa: E731
    return jax.tree.map(names, boxed, is_leaf=is_box)


@functools.partial(jax.jit, static_argnums=0)
def _fresh(model, key):
    return meta.unbox(_boxed(model, key))


@functools.partial(jax.jit, static_argnums=0)
def _fresh_head(model, key):
    return meta.unbox(_boxed(model, key)["head"])


def _boxed(model, key):
    return model.init(key, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool))["params"]


def unstack_layers(params: Mapping) -> dict:
    """Parameters for scan_layers=False: `layers` with a leading axis becomes `layers_0`, `layers_1`, ..."""
    stacked = params["layers"]
    count = jax.tree.leaves(stacked)[0].shape[0]
    rest = {name: value for name, value in params.items() if name != "layers"}
    return rest | {f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count)}


def stack_layers(params: Mapping) -> dict:
    """Parameters for scan_layers=True: the inverse of `unstack_layers`."""
    names = sorted(
        (n for n in params if n.startswith("layers_")), key=lambda n: int(n.removeprefix("layers_"))
    )
    rest = {name: value for name, value in params.items() if name not in names}
    return rest | {"layers": jax.tree.map(lambda *x: jnp.stack(x), *(params[name] for name in names))}

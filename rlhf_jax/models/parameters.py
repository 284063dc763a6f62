"""Trees of parameters: fresh ones, stacked or not, and the logical names of their axes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import meta
from jax.sharding import Sharding

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
    return model, {"params": fresh_params(model, seed, anywhere(shapes(model)))}


def fresh_params(model, seed: int, shardings: dict) -> dict:
    """The weights of `init_model` with this seed, made where they lie: the same numbers on any devices.

    Args:
      shardings: tree of Sharding, or of None for the default device, over the parameters that are wanted;
        the others are not made.
    """
    words = np.asarray(jax.random.key_data(jax.random.key(seed)))  # host memory goes to any devices
    return unflatten(_initializer(model, tuple(flatten(shardings).items()))(words))


@functools.lru_cache(maxsize=16)
def _initializer(model, places: tuple[tuple[str, Sharding | None], ...]):
    def init(words):
        made = flatten(meta.unbox(_boxed(model, jax.random.wrap_key_data(words))))
        return {path: made[path] for path, _ in places}

    return jax.jit(init, out_shardings=dict(places))


def anywhere(tree: dict) -> dict:
    """None for each leaf: on the default device."""
    return jax.tree.map(lambda _: None, tree)


def shapes(model) -> dict:
    """The tree of parameters as jax.ShapeDtypeStruct leaves."""
    return meta.unbox(jax.eval_shape(lambda: _boxed(model, jax.random.key(0))))


def logical_axes(model) -> dict:
    """The tree of parameters with each leaf's tuple of logical axis names; None where it has none."""
    boxed = jax.eval_shape(lambda: _boxed(model, jax.random.key(0)))
    is_box = lambda x: isinstance(x, nn.LogicallyPartitioned)  # noqa: E731
    names = lambda x: tuple(x.names) if is_box(x) else (None,) * x.ndim  # noqa: E731
    return jax.tree.map(names, boxed, is_leaf=is_box)


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


def like(part: Mapping, whole: Mapping) -> dict:
    """The entries of `whole` at the places that `part` has."""
    return {
        name: like(value, whole[name]) if isinstance(value, Mapping) else whole[name]
        for name, value in part.items()
    }


def flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested dict by paths like layers/mlp/up/kernel."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat |= flatten(value, f"{path}/") if isinstance(value, dict) else {path: value}
    return flat


def unflatten(flat: dict[str, Any]) -> dict:
    """The inverse of `flatten`."""
    tree: dict = {}
    for path, value in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree

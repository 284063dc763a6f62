"""Layers that all models share. Parameters are cast to the type of the computation where they are used."""

from __future__ import annotations

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from rlhf_jax.settings import Lora
from rlhf_jax.sharding.rules import constrain

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
INIT_STDDEV = 0.02


def normal(key, shape, dtype):
    return INIT_STDDEV * jax.random.normal(key, shape, dtype)


def parameter(module: nn.Module, name: str, shape, axes, dtype, init=normal) -> jax.Array:
    """A parameter of the module, with the logical names of its axes."""
    value: Any = module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype)
    return value


def product(x, kernel, inputs: int = 1, *, out: Any = None):
    """x @ kernel over the last axes of x and the first axes of kernel; out is the type of the result."""
    contract = (tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs)))
    return lax.dot_general(x, kernel, (contract, ((), ())), preferred_element_type=out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def projection(x, kernel, inputs: int):
    """`product`, with the kernel's gradient as a product whose left side is the narrower of x and dy.

    Left to JAX, dy is on the left and XLA writes it out transposed; where dy is the wide one, as behind a
    gated activation, that costs a CPU more than the product.
    """
    return product(x, kernel, inputs)


def _projection_forward(x, kernel, inputs):
    return product(x, kernel, inputs), (x, kernel)


def _projection_backward(inputs, saved, dy):
    x, kernel = saved
    outputs, rows = kernel.ndim - inputs, tuple(range(x.ndim - inputs))
    contract = tuple(range(dy.ndim - outputs, dy.ndim)), tuple(range(inputs, kernel.ndim))
    dx = lax.dot_general(dy, kernel, (contract, ((), ())))
    if math.prod(kernel.shape[:inputs]) <= math.prod(kernel.shape[inputs:]):
        return dx, lax.dot_general(x, dy, ((rows, rows), ((), ())))
    d_kernel = lax.dot_general(dy, x, ((rows, rows), ((), ())))
    return dx, d_kernel.transpose(*range(outputs, kernel.ndim), *range(outputs))


projection.defvjp(_projection_forward, _projection_backward)


def spread(vector, ndim: int):
    """The array with leading axes of size 1, up to ndim axes."""
    return vector.reshape((1,) * (ndim - vector.ndim) + vector.shape)


class Linear(nn.Module):
    """x @ kernel + bias, where kernel is [*inputs, *outputs] and x ends in the axes of inputs.

    Where its name is a target of `lora`, it has a low-rank adapter beside the kernel: see models/lora.py.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    axes: tuple[str, ...]  # logical names of the kernel's axes
    use_bias: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    lora: Lora | None = None

    @nn.compact
    def __call__(self, x):
        n = len(self.inputs)
        kernel = parameter(self, "kernel", (*self.inputs, *self.outputs), self.axes, self.param_dtype)
        y: Any = projection(x.astype(self.dtype), kernel.astype(self.dtype), n)
        if self.use_bias:
            # A bias along the model width is small and added everywhere: never split.
            axes = tuple("norm" if axis == "embed" else axis for axis in self.axes[n:])
            bias = parameter(self, "bias", self.outputs, axes, self.param_dtype, nn.initializers.zeros)
            y = y + spread(bias.astype(self.dtype), y.ndim)
        if self.lora is not None and self.name in self.lora.targets.split(","):
            y = y + self._adapter(x, self.lora)
        return y

    def _adapter(self, x, lora: Lora):
        """(alpha / rank) (x A) B."""
        n, axes = len(self.inputs), self.axes
        size_kept = nn.initializers.normal(math.prod(self.inputs) ** -0.5)
        shape_a, axes_a = (*self.inputs, lora.rank), (*axes[:n], "rank")
        shape_b, axes_b = (lora.rank, *self.outputs), ("rank", *axes[n:])
        a = parameter(self, "lora_a", shape_a, axes_a, self.param_dtype, size_kept)
        b = parameter(self, "lora_b", shape_b, axes_b, self.param_dtype, nn.initializers.zeros)
        low: Any = projection(x.astype(self.dtype), a.astype(self.dtype), n)
        return projection(low * (lora.alpha / lora.rank), b.astype(self.dtype), 1)


class Norm(nn.Module):
    """RMS norm (kind rms) or layer norm (kind layer) over the last axis, in float32."""

    width: int
    kind: str
    eps: float
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        def vector(name, init):
            value = parameter(self, name, (self.width,), ("norm",), self.param_dtype, init)
            return spread(value.astype(jnp.float32), x.ndim)

        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y = y * vector("scale", nn.initializers.ones)
        if self.kind == "layer":
            y = y + vector("bias", nn.initializers.zeros)
        return y.astype(self.dtype)


class Table(nn.Module):
    """Rows of learned vectors."""

    rows: int
    width: int
    axis: str  # logical name of the rows
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def setup(self):
        shape, axes = (self.rows, self.width), (self.axis, "embed")
        self.embedding = parameter(self, "embedding", shape, axes, self.param_dtype)

    def __call__(self, ids):
        # rows whole, as fsdp wants them in use: looking up parts of rows would replicate the batch
        return constrain(self.embedding, self.axis, None)[ids].astype(self.dtype)

    def attend(self, x_BTD):
        """Float32 inner products with every row: the tied unembedding."""
        table = self.embedding.astype(self.dtype)
        return lax.dot_general(
            x_BTD.astype(self.dtype),
            table,
            (((x_BTD.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )


class Mlp(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) if gated."""

    embed: int
    mlp: int
    activation: str
    gated: bool
    bias: bool
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    lora: Lora | None = None

    def setup(self):
        D, F, types = self.embed, self.mlp, (self.dtype, self.param_dtype, self.lora)
        if self.gated:
            self.gate = Linear((D,), (F,), ("embed", "mlp"), self.bias, *types)
        self.up = Linear((D,), (F,), ("embed", "mlp"), self.bias, *types)
        self.down = Linear((F,), (D,), ("mlp", "embed"), self.bias, *types)

    def __call__(self, x):
        act = ACTIVATIONS[self.activation]
        return self.down(act(self.gate(x)) * self.up(x) if self.gated else act(self.up(x)))


def positions_of(mask_BT):
    """Position of each valid token in its row, whatever the padding, or in its segment.

    Args:
      mask_BT: bool, or segment numbers, each in one stretch of its row.
    """
    if mask_BT.dtype == bool:
        return jnp.maximum(jnp.cumsum(mask_BT.astype(jnp.int32), -1) - 1, 0)
    column_1T = jnp.arange(mask_BT.shape[1])[None]
    begins_BT = jnp.diff(mask_BT, axis=1, prepend=0) != 0
    return column_1T - lax.cummax(jnp.where(begins_BT, column_1T, 0), axis=1)


def last_valid(mask_BT):
    """Index of the last valid position of each row."""
    return mask_BT.shape[1] - 1 - jnp.argmax(mask_BT[:, ::-1], -1)


def take_position(x_BTD, index_B):
    """x_BTD at one position a row: [B, D]."""
    return jnp.take_along_axis(x_BTD, index_B[:, None, None], 1)[:, 0]

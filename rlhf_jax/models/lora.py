"""Low-rank adapters: small matrices beside frozen ones.

    y = x W + (alpha / rank) (x A) B,   W [in, out] frozen,   A [in, rank] normal,   B [rank, out] 0 at first

LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1.

The parameters of a model with adapters are those of the model without, and beside a kernel `lora_a` and
`lora_b`. What learns are the adapters and the head of a scalar model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from jax import lax
from jax.sharding import Sharding

from rlhf_jax.settings import Lora

A, B, HEAD = "lora_a", "lora_b", "head"


def with_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    """The model with adapters; rank 0: the model itself."""
    return model if lora.rank == 0 else model.clone(lora=lora)


def learnt(params: Mapping) -> dict:
    """The part of a tree that learns where there are adapters: these, and a head."""
    return _part(params, lambda path: path[0] == HEAD or path[-1] in (A, B))


def frozen(params: Mapping) -> dict:
    """The rest: the base."""
    return _part(params, lambda path: path[0] != HEAD and path[-1] not in (A, B))


def _part(node: Mapping, wanted: Any, above: tuple[str, ...] = ()) -> dict:
    part = {}
    for name, value in node.items():
        path = (*above, name)
        if isinstance(value, Mapping):
            below = _part(value, wanted, path)
            part |= {name: below} if below else {}
        elif wanted(path):
            part[name] = value
    return part


def join(base: Mapping | None, params: Any) -> Any:
    """One tree of two that share no leaf; without a base, `params` themselves. Copies no array."""
    if not base:
        return params
    joined = dict(base)
    for name, value in params.items():
        both = isinstance(value, Mapping) and name in base
        joined[name] = join(base[name], value) if both else value
    return joined


def deferred_merge(params: Mapping, lora: Lora) -> dict:
    """The tree of the base, its kernels W + (alpha / rank) A B as functions that make them when called.

    Trees without adapters come back as they are.
    """
    if A in params:
        make = functools.partial(_merge, params["kernel"], params[A], params[B], lora.alpha / lora.rank)
        return {name: value for name, value in params.items() if name not in (A, B)} | {"kernel": make}
    return {
        name: deferred_merge(value, lora) if isinstance(value, Mapping) else value
        for name, value in params.items()
    }


def merged(params: Mapping, lora: Lora) -> dict:
    """As `deferred_merge`, all of it made."""
    return jax.tree.map(lambda leaf: leaf() if callable(leaf) else leaf, deferred_merge(params, lora))


def _merge(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    return _merger(kernel.sharding)(kernel, a, b, scale)


@functools.cache
def _merger(sharding: Sharding) -> Any:
    """A jitted merge of kernels that lie so, with or without a leading axis of layers."""

    def merge(kernel, a, b, scale):
        stacked = tuple(range(a.ndim + b.ndim - kernel.ndim - 2))
        axes = ((a.ndim - 1,), (len(stacked),)), (stacked, stacked)
        return kernel + scale * lax.dot_general(a, b, axes)

    return jax.jit(merge, out_shardings=sharding)

"""From logical axes to devices: one table of rules, read through a role's view of the grid.

Models name the axes of their parameters and activations (`nn.with_logical_partitioning`); this table says
which of a role's axes shards each of them. An axis that is not in the table raises.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax.sharding.mesh import View

RULES: dict[str, tuple[str, ...]] = {
    # parameters
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "rank": (),
    "positions": (),
    "norm": (),
    # activations
    "batch": ("data", "fsdp"),
    "length": (),
    "embed_act": (),
    "vocab_act": ("tensor",),
}


def partition(view: View, axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec:
    """The partition of an array with these logical axes.

    A dimension that its mesh axes do not divide stays whole on every device (9 heads over 2 devices, say).

    Raises:
      KeyError: a logical axis is not in `RULES`.
      ValueError: the same devices would shard two dimensions.
    """
    entries = []
    for axis, size in zip(axes, shape, strict=True):
        role_axes = _rule(axis)
        entries.append(view.grid_axes(role_axes) if size % view.size(*role_axes) == 0 else ())
    used = [axis for entry in entries for axis in entry]
    if len(set(used)) < len(used):
        raise ValueError(f"the same devices would shard two dimensions of {tuple(axes)}; rename one axis")
    return PartitionSpec(*(entry or None for entry in entries))


def _rule(axis: str | None) -> tuple[str, ...]:
    """The role axes that shard a logical axis."""
    if axis is None:
        return ()
    if axis not in RULES:
        known = ", ".join(RULES)
        raise KeyError(f"logical axis {axis!r} has no rule; add it to RULES in {__name__} (known: {known})")
    return RULES[axis]


def is_axes(node: Any) -> bool:
    """True for one parameter's axes: a tuple of names."""
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


def parameter_shardings(view: View, axes: Any, shapes: Any) -> Any:
    """A NamedSharding for each parameter.

    Args:
      axes: tree of tuples of logical axis names.   shapes: the same tree of arrays or ShapeDtypeStructs.
    """
    return jax.tree.map(
        lambda names, leaf: NamedSharding(view.mesh, partition(view, names, leaf.shape)),
        axes,
        shapes,
        is_leaf=is_axes,
    )


def replicated_dimensions(view: View, axes: Any, shapes: Any) -> list[str]:
    """A line for each dimension of a parameter that stays whole because its mesh axes do not divide it."""
    found = []
    for (path, names), leaf in zip(
        jax.tree_util.tree_leaves_with_path(axes, is_leaf=is_axes), jax.tree.leaves(shapes), strict=True
    ):
        for name, size in zip(names, leaf.shape, strict=True):
            shards = view.size(*_rule(name))
            if size % shards:
                leaf_name = jax.tree_util.keystr(path, simple=True, separator="/")
                devices = " * ".join(_rule(name))
                found.append(
                    f"{leaf_name} stays whole: {name} {size} is not divisible by {devices} = {shards}"
                )
    return found


def replicated(view: View) -> NamedSharding:
    return NamedSharding(view.mesh, PartitionSpec())


def batch_sharding(view: View) -> NamedSharding:
    """Rows over data and fsdp; every other dimension whole."""
    return NamedSharding(view.mesh, PartitionSpec(view.grid_axes(RULES["batch"]) or None))


_scope: contextvars.ContextVar[View | None] = contextvars.ContextVar("sharding_scope", default=None)


@contextlib.contextmanager
def sharding_scope(view: View) -> Iterator[None]:
    """While a function is traced inside, `constrain` speaks of this view."""
    token = _scope.set(view)
    try:
        yield
    finally:
        _scope.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x`, kept on the devices that its logical axes say; outside a `sharding_scope`, just `x`."""
    view = _scope.get()
    if view is None or view.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(view.mesh, partition(view, axes, x.shape)))


def constrain_rows(x: jax.Array) -> jax.Array:
    """`x`, its first axis split as batches are; where its other axes lie is left to the compiler."""
    view = _scope.get()
    if view is None or view.mesh.size == 1:
        return x
    rows = partition(view, ("batch",), x.shape[:1])
    rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, NamedSharding(view.mesh, PartitionSpec(*rows, *rest)))


def take_rows(batch: Any, rows_R: jax.Array) -> Any:
    """These rows of every array of a batch, split as batches are."""
    return jax.tree.map(lambda x: constrain(x[rows_R], "batch", *[None] * (x.ndim - 1)), batch)


def batch_shards() -> int:
    """Over how many groups of devices the rows of a batch are split in this `sharding_scope`; outside, 1."""
    view = _scope.get()
    return 1 if view is None else view.batch_shards


def in_view(view: View, function: Callable[..., Any], **jit_options: Any) -> Callable[..., Any]:
    """`function`, jitted, its activations constrained to this view."""

    @functools.wraps(function, assigned=("__name__", "__doc__"))
    def scoped(*args):
        with sharding_scope(view):
            return function(*args)

    return jax.jit(scoped, **jit_options)

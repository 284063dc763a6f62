"""Moving parameters from one layout to another, group by group, and counting what has to move."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax.sharding.route import dim_axes, follow, plan_route
from rlhf_jax.sharding.traffic import moved
from rlhf_jax.sharding.transfer import across, containing

STACK = "layers"  # the subtree whose leaves hold all layers along their first axis


@dataclasses.dataclass(frozen=True)
class Move:
    """What one leaf goes through. Equal moves share a compiled program.

    Attributes:
      leaf: shape and dtype.
      source, target: where the leaf lies, and where it, or each layer of it, shall lie.
      unstack: the result is a list of layers, the slices along the first axis.
      dtype: what the leaf is cast to before it moves.
    """

    leaf: jax.ShapeDtypeStruct
    source: NamedSharding
    target: NamedSharding
    unstack: bool
    dtype: Any

    def __call__(self, x: jax.Array) -> Any:
        program = _program(self)
        moved = x if program is None else program(x)
        if self.one_grid:
            return moved
        return jax.tree.map(lambda part: across(part, self.target), moved)

    @property
    def part(self) -> NamedSharding:
        """Where the leaf, or each layer of it, lies before it moves."""
        if not self.unstack:
            return self.source
        return NamedSharding(self.source.mesh, PartitionSpec(*self.source.spec[1:]))

    @property
    def shapes(self) -> Any:
        """The result as a ShapeDtypeStruct, or a list of them."""
        shape = self.leaf.shape[int(self.unstack) :]
        result = jax.ShapeDtypeStruct(shape, self.dtype, sharding=self.target)
        return [result] * self.leaf.shape[0] if self.unstack else result

    @property
    def one_grid(self) -> bool:
        return self.source.mesh == self.target.mesh

    def lowered(self) -> jax.stages.Lowered | None:
        """The program of this move, for shapes alone; None where there is none."""
        program = _program(self)
        leaf = jax.ShapeDtypeStruct(self.leaf.shape, self.leaf.dtype, sharding=self.source)
        return None if program is None else program.lower(leaf)  # type: ignore[attr-defined]


@functools.cache
def _program(move: Move) -> Callable[[jax.Array], Any] | None:
    """The jitted part of a move, on the source's grid; None where nothing is to do there.

    Layers are taken apart before they move: collectives write the results themselves, and their temporaries
    are of one layer.
    """
    grid, skipped = move.source.mesh, int(move.unstack)
    shape = move.leaf.shape[skipped:]
    landing = move.target if move.one_grid else containing(move.part, move.target, shape)
    steps = plan_route(dim_axes(move.part, len(shape)), dim_axes(landing, len(shape)))
    if not steps and not move.unstack and move.dtype == move.leaf.dtype:
        return None

    def run(x):
        x = x.astype(move.dtype).view(wire)
        parts = [follow(x[i] if move.unstack else x, steps, grid.shape) for i in range(count)]
        return [part.view(move.dtype) for part in parts] if move.unstack else parts[0].view(move.dtype)

    # Two-byte types travel as integers: some backends widen their collectives to float32.
    wire = jnp.dtype("uint16") if move.dtype.itemsize == 2 else move.dtype
    count = move.leaf.shape[0] if move.unstack else 1
    places = [landing] * count if move.unstack else landing
    specs = [landing.spec] * count if move.unstack else landing.spec
    # check_vma=False: that a gathered part is the same on all devices cannot be inferred.
    local = jax.shard_map(run, mesh=grid, in_specs=move.source.spec, out_specs=specs, check_vma=False)
    return jax.jit(local, in_shardings=move.source, out_shardings=places)


@dataclasses.dataclass(frozen=True)
class Reshard:
    """A move of a whole tree. The source stays alive; where a leaf has nothing to do, the result is the leaf.

    Attributes:
      moved_bytes: received by the busiest device, the least that is possible.
      moves: one for each leaf of the source tree.
    """

    moved_bytes: int
    structure: Any  # of the source tree
    moves: tuple[Move, ...]

    def __call__(self, params: Any) -> Any:
        return self.assemble(self.groups(params))

    def groups(self, params: Any) -> Iterator[Any]:
        """The results, leaf by leaf: an array, or the list of a stacked leaf's layers.

        A leaf may be a function that makes the array: it is called when its turn comes.

        Beside source and target only one group is in memory: on one grid the devices run one program at a
        time, and between grids a group waits until the one before has arrived. So it does on virtual CPU
        devices, which hang where too many programs with collectives are under way.
        """
        moved, virtual = None, jax.default_backend() == "cpu" and jax.device_count() > 1
        for move, leaf in zip(self.moves, self.structure.flatten_up_to(params), strict=True):
            if virtual or not move.one_grid:
                jax.block_until_ready(moved)
            made: Any = leaf() if callable(leaf) else leaf
            moved = move(made)
            yield moved

    def assemble(self, groups: Iterable[Any]) -> Any:
        """The target tree of all groups."""
        tree = jax.tree.unflatten(self.structure, groups)
        if not any(move.unstack for move in self.moves):
            return tree
        stacked, rest = tree[STACK], {name: part for name, part in tree.items() if name != STACK}
        is_group = lambda node: isinstance(node, list)  # noqa: E731
        count = len(jax.tree.leaves(stacked, is_leaf=is_group)[0])
        layers = [jax.tree.map(lambda group, i=i: group[i], stacked, is_leaf=is_group) for i in range(count)]
        return rest | {f"{STACK}_{i}": layer for i, layer in enumerate(layers)}

    @property
    def shapes(self) -> Any:
        """The target tree as ShapeDtypeStructs with their shardings."""
        return self.assemble(move.shapes for move in self.moves)

    def programs(self) -> list[tuple[str, jax.stages.Lowered, int]]:
        """(name of a leaf, its program, how many leaves run it), for compilation without devices."""
        times = collections.Counter(self.moves)
        names = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(self.structure, self.moves))
        first = {move: jax.tree_util.keystr(path, simple=True, separator="/") for path, move in names[::-1]}
        programs = [(first[move], move.lowered(), count) for move, count in times.items()]
        return [(name, program, count) for name, program, count in programs if program is not None]


def make_reshard(
    shapes: Any, source: Any, target: Any, *, unstack: bool = False, dtype: Any = None
) -> Reshard:
    """The move of a tree from its source to its target shardings.

    Args:
      shapes: tree of arrays or ShapeDtypeStructs.   source: the same tree of NamedShardings.
      target: tree of NamedShardings of the result.
      unstack: the result has `layers_0`, `layers_1`, ... in place of `layers`, whose leaves are stacked.
      dtype: what floating leaves are cast to before they move; None: they stay as they are.
    """
    leaves, structure = jax.tree.flatten(shapes)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    stacked = [unstack and path[0].key == STACK for path in paths]
    goals = dict(jax.tree_util.tree_leaves_with_path(target))
    first = jax.tree_util.DictKey(f"{STACK}_0")
    moves = []
    for path, leaf, place, apart in zip(paths, leaves, structure.flatten_up_to(source), stacked, strict=True):
        cast = dtype if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
        moves.append(
            Move(
                leaf=jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
                source=place,
                target=goals[(first, *path[1:]) if apart else path],
                unstack=apart,
                dtype=jnp.dtype(cast),
            )
        )
    received = collections.Counter()
    for move in moves:
        received.update(_moved_by(move))
    return Reshard(max(received.values(), default=0), structure, tuple(moves))


def to_devices(tree: Any, target: NamedSharding) -> Any:
    """All arrays of a tree in one layout, which may be on other devices."""

    def moved(x):
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
            return jax.device_put(x, target)
        return Move(jax.ShapeDtypeStruct(x.shape, x.dtype), x.sharding, target, False, x.dtype)(x)

    return jax.tree.map(moved, tree)


def _moved_by(move: Move) -> dict[Any, int]:
    """Bytes that each device receives."""
    count, shape = (move.leaf.shape[0], move.leaf.shape[1:]) if move.unstack else (1, move.leaf.shape)
    elements = moved(move.part, move.target, shape)
    return {device: count * number * move.dtype.itemsize for device, number in elements.items()}

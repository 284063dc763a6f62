"""Routes: right for any two partitions, and the shortest for the layouts that regrouping gives."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlhf_jax.sharding.mesh import regroup, training_view
from rlhf_jax.sharding.reshard import to_devices
from rlhf_jax.sharding.route import Exchange, Gather, Slice, dim_axes, plan_route, received_elements
from rlhf_jax.sharding.rules import partition
from rlhf_jax.sharding.traffic import moved

from .layouts import name, shape, shapes


def route(old, new, axes, size):
    """(source, target, steps) of an array whose dimensions have these logical axes."""
    view = training_view(old)
    source, target = (NamedSharding(view.mesh, partition(v, axes, size)) for v in (view, regroup(view, new)))
    return source, target, plan_route(dim_axes(source, len(size)), dim_axes(target, len(size)))


def test_routes_by_hand():
    embed_mlp, size = ("embed", "mlp"), (8, 8)
    assert route(shape(1, 1, 8), shape(8, 1, 1), embed_mlp, size)[2] == (
        Gather(((), ("grid0", "grid1", "grid2"))),
    )
    assert route(shape(8, 1, 1), shape(2, 1, 4), embed_mlp, size)[2] == (Slice(1, "grid0"), Slice(1, "grid1"))
    # What is free comes first, then what keeps shards small.
    assert route(shape(2, 2, 2), shape(2, 1, 4), embed_mlp, size)[2] == (
        Slice(1, "grid0"),
        Gather((("grid1",), ())),
    )
    assert route(shape(1, 8, 1), shape(4, 1, 2), embed_mlp, size)[2] == (
        Exchange(0, 1, ("grid2",), ("grid2",)),
        Gather((("grid0", "grid1"), ())),
    )
    # All of one dimension's axes go to the other at once, in another order.
    assert route(shape(1, 8, 1), shape(1, 1, 8), embed_mlp, size)[2] == (
        Exchange(0, 1, ("grid0", "grid1", "grid2"), ("grid2", "grid1", "grid0")),
    )


# Nine heads divide by no axis, so that this dimension stays whole and its axes are free.
LEAVES = [
    (("embed", "mlp"), (16, 16)),
    (("vocab", "embed"), (16, 8)),
    (("embed", "heads", "head_dim"), (8, 9, 4)),
]


@pytest.mark.parametrize("old", shapes(8), ids=name)
def test_no_route_between_regrouped_layouts_moves_more_than_the_least(old):
    for new, (axes, size) in itertools.product(shapes(8), LEAVES):
        source, target, steps = route(old, new, axes, size)
        received = received_elements(steps, dim_axes(source, len(size)), size, source.mesh.shape)
        assert received == max(moved(source, target, size).values()), (new, axes, steps)


def test_any_two_partitions_reach_each_other_bit_for_bit():
    """Swapped, permuted and factored axes, over 2 x 3 devices: also where no short way is known."""
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    parts = [(), ("a",), ("b",), ("a", "b"), ("b", "a")]
    specs = [pair for pair in itertools.product(parts, repeat=2) if not set(pair[0]) & set(pair[1])]
    x = np.arange(12 * 12, dtype=np.float32).reshape(12, 12)
    for a, b in itertools.product(specs, repeat=2):
        source, target = (NamedSharding(mesh, PartitionSpec(*(axes or None for axes in s))) for s in (a, b))
        got = to_devices(jax.device_put(x, source), target)
        assert got.sharding.is_equivalent_to(target, 2)
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, x[shard.index])

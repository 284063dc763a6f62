"""The grid of devices, its views, and the least that has to move between two of them."""

import itertools

import jax
import pytest
from jax.sharding import AxisType, NamedSharding

from rlhf_jax.sharding import traffic
from rlhf_jax.sharding.mesh import ROLE_AXES, View, prime_factors, regroup, training_view
from rlhf_jax.sharding.rules import partition

from .layouts import name, shapes


@pytest.mark.parametrize("number", [1, 2, 6, 8, 12, 97])
def test_prime_factors(number):
    factors, product = prime_factors(number), 1
    for factor in factors:
        assert all(factor % d for d in range(2, factor))
        product *= factor
    assert product == number


@pytest.mark.parametrize("shape", shapes(8), ids=name)
def test_a_training_view_has_its_shape(shape):
    view = training_view(shape)
    assert view.shape == shape
    assert view.mesh.size == 8
    assert view.batch_shards == shape["data"] * shape["fsdp"]
    assert sorted(view.grid_axes(ROLE_AXES)) == sorted(view.mesh.axis_names)
    assert set(view.mesh.axis_types) == {AxisType.Auto}  # plain gathers raise under Explicit axes


def test_neighbouring_devices_share_a_tensor_group():
    view = training_view({"data": 2, "fsdp": 2, "tensor": 2})
    assert [device.id for device in view.mesh.devices.flatten()] == [device.id for device in jax.devices()]
    assert view.data + view.fsdp + view.tensor == view.mesh.axis_names


def test_one_device_has_a_grid_too():
    view = training_view({"data": 1, "fsdp": 1, "tensor": 1}, jax.devices()[:1])
    assert view.mesh.size == 1
    assert regroup(view, view.shape) == view


def assignments(view, shape):
    """Every way to give the grid's axes to data, fsdp and tensor, in every order."""
    for order in itertools.permutations(view.mesh.axis_names):
        rest, groups = list(order), {}
        for role_axis in ROLE_AXES:
            groups[role_axis], size = [], 1
            while size < shape[role_axis] and rest:
                size *= view.mesh.shape[rest[0]]
                groups[role_axis].append(rest.pop(0))
        found = View(view.mesh, **{role_axis: tuple(axes) for role_axis, axes in groups.items()})
        if not rest and found.shape == shape:
            yield found


def moved(source, target, axes, shape):
    a, b = (NamedSharding(view.mesh, partition(view, axes, shape)) for view in (source, target))
    return max(traffic.moved(a, b, shape).values())


@pytest.mark.parametrize("count", [8, 6])
def test_regrouping_moves_the_least_for_every_pair_of_shapes(count):
    """Against all assignments of the grid's axes, for a matrix that both fsdp and tensor shard.

    Tensor groups that took fsdp's major axes moved up to everything where nothing had to move.
    """
    axes, shape = ("embed", "mlp"), (count, count)
    worse = []
    for old in shapes(count):
        view = training_view(old, jax.devices()[:count])
        for new in shapes(count):
            target = regroup(view, new)
            assert target.shape == new
            assert sorted(target.grid_axes(ROLE_AXES)) == sorted(view.mesh.axis_names)
            least = min(moved(view, other, axes, shape) for other in assignments(view, new))
            if moved(view, target, axes, shape) != least:
                worse.append(f"{name(old)} -> {name(new)}")
    assert worse == []


@pytest.mark.parametrize("old", shapes(8), ids=name)
def test_nested_shapes_only_gather(old):
    """Where no axis of the parameters grows, a device moves exactly what its new shard has over its old one.

    HybridFlow's (t - t_g) / (t_g t) of a layer, for every pair of axes that shrink.
    """
    view, shape = training_view(old), (8, 8)
    for new in shapes(8):
        if old["fsdp"] % new["fsdp"] or old["tensor"] % new["tensor"]:
            continue
        before, after = 64 // (old["fsdp"] * old["tensor"]), 64 // (new["fsdp"] * new["tensor"])
        assert moved(view, regroup(view, new), ("embed", "mlp"), shape) == after - before


@pytest.mark.parametrize("old", shapes(8), ids=name)
def test_finer_shapes_move_nothing(old):
    """Where fsdp and tensor only grow out of data, each device has its new shard already."""
    view = training_view(old)
    for new in shapes(8):
        if not (new["fsdp"] % old["fsdp"] or new["tensor"] % old["tensor"]):
            assert moved(view, regroup(view, new), ("embed", "mlp"), (8, 8)) == 0


def test_regrouping_to_the_same_shape_changes_nothing():
    for shape in shapes(8):
        view = training_view(shape)
        assert regroup(view, shape) == view

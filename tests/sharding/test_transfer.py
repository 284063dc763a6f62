"""Copies to other devices: the right parts, senders that take turns, and no stop on the host."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlhf_jax.sharding.reshard import to_devices
from rlhf_jax.sharding.transfer import across, containing

SPECS = [PartitionSpec(), PartitionSpec("a"), PartitionSpec(None, "b"), PartitionSpec("b", "a")]


def grid(first, rows, columns):
    devices = np.array(jax.devices()[first : first + rows * columns]).reshape(rows, columns)
    return Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("target_grid", [grid(4, 2, 2), grid(6, 1, 2), grid(0, 2, 4)], ids=["4", "2", "8"])
def test_every_partition_arrives_whole_on_other_devices(target_grid):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    source_grid = grid(0, 2, 2)
    for a, b in [(a, b) for a in SPECS for b in SPECS]:
        source, target = NamedSharding(source_grid, a), NamedSharding(target_grid, b)
        got = to_devices(jax.device_put(x, source), target)
        assert got.sharding == target
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, x[shard.index])


def test_a_containing_partition_by_hand():
    """Halves by rows become quarters by rows where devices have the halves twice, and are kept where not."""
    source = NamedSharding(grid(0, 2, 2), PartitionSpec("a"))
    quarters = NamedSharding(grid(4, 2, 2), PartitionSpec(("a", "b")))
    assert containing(source, quarters, (8, 8)).spec == PartitionSpec(("a", "b"), None)
    halves = NamedSharding(grid(6, 2, 1), PartitionSpec("a"))
    assert containing(source, halves, (8, 8)).spec == PartitionSpec("a", None)
    columns = NamedSharding(grid(6, 2, 1), PartitionSpec(None, "a"))
    assert containing(source, columns, (8, 8)).spec == PartitionSpec(None, "b")


def test_what_has_the_whole_is_cut_before_it_is_sent():
    source = NamedSharding(grid(0, 2, 2), PartitionSpec())
    target = NamedSharding(grid(4, 2, 2), PartitionSpec("a", "b"))
    with jax.transfer_guard("disallow"):
        got = across(jax.device_put(np.ones((4, 4), np.float32), source), target)
    assert {shard.data.shape for shard in got.addressable_shards} == {(2, 2)}

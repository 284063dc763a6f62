"""Bytes counted from who holds which part, against sets of indices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax.sharding.reshard import make_reshard
from rlhf_jax.sharding.traffic import moved

SPECS = [
    PartitionSpec(),
    PartitionSpec("a"),
    PartitionSpec(None, "a"),
    PartitionSpec(("a", "b"), None),
    PartitionSpec("b", "a"),
    PartitionSpec("b", ("a", "c")),
    PartitionSpec(("c", "b", "a")),
]


def held(sharding, shape):
    """The set of indices that each device holds."""
    everything = np.arange(np.prod(shape)).reshape(shape)
    return {d: set(everything[index].ravel()) for d, index in sharding.devices_indices_map(shape).items()}


def test_elements_and_bytes_against_sets_of_indices():
    """Every pair of seven layouts of an [8, 4] array; the busiest device is the same for all leaves."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    size = (8, 4)
    for a, b in itertools.product((NamedSharding(mesh, spec) for spec in SPECS), repeat=2):
        have, want = held(a, size), held(b, size)
        expected = {device: len(want[device] - have[device]) for device in want}
        assert moved(a, b, size) == expected
        # Back and forth: a device that receives much in one leaf may receive little in the other.
        back = {device: len(have[device] - want[device]) for device in want}
        tree = [jnp.zeros(size, jnp.float32), jnp.zeros(size, jnp.bfloat16)]
        busiest = max(4 * expected[device] + 2 * back[device] for device in want)
        assert make_reshard(tree, [a, b], [b, a]).moved_bytes == busiest


def test_a_device_that_held_nothing_receives_its_whole_shard():
    few, all_eight = (
        NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:count]), "a"), PartitionSpec("a"))
        for count in (4, 8)
    )
    assert max(moved(few, all_eight, (8,)).values()) == 1
    assert max(moved(all_eight, few, (8,)).values()) == 2
    scalar_few, scalar = (NamedSharding(sharding.mesh, PartitionSpec()) for sharding in (few, all_eight))
    assert [moved(scalar_few, scalar, ())[device] for device in jax.devices()] == [0, 0, 0, 0, 1, 1, 1, 1]

"""Parameters on their way between layouts: bit for bit the same, and as many bytes as counted."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlhf_jax.models import Transformer, TransformerConfig, logical_axes, stack_layers, unstack_layers
from rlhf_jax.models.parameters import shapes
from rlhf_jax.sharding.mesh import regroup, training_view
from rlhf_jax.sharding.reshard import make_reshard, moved_bytes, moved_elements
from rlhf_jax.sharding.rules import parameter_shardings

CONFIG = TransformerConfig(
    vocab_size=24, layers=2, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=32, max_positions=64
)
MODEL = Transformer(CONFIG)
PAIRS = {
    "tensor 8 to data 8": ((1, 1, 8), (8, 1, 1)),
    "fsdp 8 to tensor 2, which is not nested": ((1, 8, 1), (4, 1, 2)),
    "all three to tensor 4": ((2, 2, 2), (2, 1, 4)),
}


def shape(sizes):
    return dict(zip(("data", "fsdp", "tensor"), sizes, strict=True))


def shardings(model, params, view):
    return parameter_shardings(view, logical_axes(model), params)


def random_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes(MODEL))


def held(sharding, shape):
    """The set of indices that each device holds."""
    everything = np.arange(np.prod(shape)).reshape(shape)
    return {d: set(everything[index].ravel()) for d, index in sharding.devices_indices_map(shape).items()}


SPECS = [
    PartitionSpec(),
    PartitionSpec("a"),
    PartitionSpec(None, "a"),
    PartitionSpec(("a", "b"), None),
    PartitionSpec("b", "a"),
    PartitionSpec("b", ("a", "c")),
    PartitionSpec(("c", "b", "a")),
]


def test_moved_elements_and_bytes_against_sets_of_indices():
    """Every pair of seven layouts of an [8, 4] array; the busiest device is the same for all leaves."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    size = (8, 4)
    for a, b in itertools.product((NamedSharding(mesh, spec) for spec in SPECS), repeat=2):
        have, want = held(a, size), held(b, size)
        moved = {device: len(want[device] - have[device]) for device in want}
        assert moved_elements(a, b, size) == max(moved.values())
        # Back and forth: a device that receives much in one leaf may receive little in the other.
        back = {device: len(have[device] - want[device]) for device in want}
        tree = [jnp.zeros(size, jnp.float32), jnp.zeros(size, jnp.bfloat16)]
        busiest = max(4 * moved[device] + 2 * back[device] for device in want)
        assert moved_bytes(tree, [a, b], [b, a]) == busiest


def test_a_device_that_held_nothing_receives_its_whole_shard():
    few, all_eight = (
        NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:count]), "a"), PartitionSpec("a"))
        for count in (4, 8)
    )
    assert moved_elements(few, all_eight, (8,)) == 1
    assert moved_elements(all_eight, few, (8,)) == 2


def test_nothing_moves_where_nothing_changes():
    view = training_view(shape((2, 2, 2)))
    params = random_params()
    places = shardings(MODEL, params, view)
    assert moved_bytes(params, places, places) == 0
    assert moved_bytes({}, {}, {}) == 0


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_to_the_generation_layout_and_back_is_bit_equal(pair):
    """Layers unstacked on the way there and stacked on the way back; the source stays alive."""
    train = training_view(shape(pair[0]))
    generate = regroup(train, shape(pair[1]))
    params, unrolled = random_params(), MODEL.clone(scan_layers=False)
    there_places = shardings(unrolled, jax.eval_shape(unstack_layers, params), generate)
    source_places = shardings(MODEL, params, train)

    source = jax.device_put(params, source_places)
    there = make_reshard(there_places, unstack_layers)(source)
    back = make_reshard(source_places, stack_layers)(there)

    for leaf, place in zip(jax.tree.leaves(there), jax.tree.leaves(there_places), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    for leaf, place in zip(jax.tree.leaves(back), jax.tree.leaves(source_places), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(params), there)
    jax.tree.map(np.testing.assert_array_equal, params, back)
    jax.tree.map(np.testing.assert_array_equal, params, source)

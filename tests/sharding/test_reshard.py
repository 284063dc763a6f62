"""Parameters between layouts: bit for bit the same, as many bytes as counted, in bounded memory."""

import functools
import itertools
import os
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import stack_layers, unstack_layers
from rlhf_jax.models.parameters import shapes as parameter_shapes
from rlhf_jax.sharding.mesh import regroup, training_view
from rlhf_jax.sharding.reshard import make_reshard
from rlhf_jax.sharding.route import dim_axes, plan_route, received_elements

from .layouts import MODELS, name, random_params, shape, shapes, shardings

LLAMA = MODELS["llama"]


def stderr_of(function):
    """What a function writes to the file descriptor, where the compiler's warnings go."""
    with tempfile.TemporaryFile() as caught:
        saved = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            function()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        caught.seek(0)
        return caught.read().decode()


def assert_lies(tree, places):
    for leaf, place in zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


@functools.cache
def stacking(model, view):
    """A jitted `stack_layers` within a layout."""
    return jax.jit(stack_layers, out_shardings=shardings(model, parameter_shapes(model), view))


def there_and_back(model, train, generate):
    """Decoders with their layers unstacked on the way, as a rollout does it."""
    params = random_params(model)
    decoder = hasattr(model, "scan_layers")
    places = shardings(model, params, train)
    away = shardings(model, params, generate)
    there_params = unstack_layers(params) if decoder else params
    unrolled = model.clone(scan_layers=False) if decoder else model
    there_places = shardings(unrolled, there_params, generate)

    source = jax.device_put(params, places)
    there = make_reshard(params, places, there_places, unstack=decoder)(source)
    assert_lies(there, there_places)
    jax.tree.map(np.testing.assert_array_equal, there_params, there)
    back = make_reshard(params, away, places)(stacking(model, generate)(there) if decoder else there)
    assert_lies(back, places)
    jax.tree.map(np.testing.assert_array_equal, params, back)
    jax.tree.map(np.testing.assert_array_equal, params, source)  # the source stays alive


SOME = [((1, 1, 8), (8, 1, 1)), ((1, 8, 1), (4, 1, 2)), ((2, 2, 2), (2, 1, 4)), ((1, 2, 4), (1, 4, 2))]


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_to_the_generation_layout_and_back_is_bit_equal(family):
    for old, new in SOME:
        train = training_view(shape(*old))
        there_and_back(MODELS[family], train, regroup(train, shape(*new)))


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_every_pair_of_layouts_is_bit_equal_there_and_back_and_never_rematerialised(family):
    """XLA gathered whole tables where layouts are not nested (fsdp 8 to tensor 2), and only warned."""

    def every_pair():
        for old, new in itertools.product(shapes(8), repeat=2):
            train = training_view(old)
            there_and_back(MODELS[family], train, regroup(train, new))

    assert "ematerialization" not in stderr_of(every_pair)


def test_the_warning_would_be_seen():
    """The compiler's own way from fsdp 8 to tensor 2 warns: what the test above looks for exists."""
    train = training_view(shape(1, 8, 1))
    params = random_params(LLAMA)
    source, target = (shardings(LLAMA, params, v) for v in (train, regroup(train, shape(4, 1, 2))))
    move = jax.jit(lambda tree: tree, out_shardings=target)
    assert "ematerialization" in stderr_of(lambda: move.lower(jax.device_put(params, source)).compile())


@pytest.mark.parametrize("family", MODELS)
def test_the_bytes_of_the_routes_are_those_of_the_index_maps_for_every_pair(family):
    model = MODELS[family]
    params = parameter_shapes(model)
    for old, new in itertools.product(shapes(8), repeat=2):
        train = training_view(old)
        source, target = (shardings(model, params, v) for v in (train, regroup(train, new)))
        routed = 0
        for leaf, a, b in zip(*map(jax.tree.leaves, (params, source, target)), strict=True):
            held = dim_axes(a, leaf.ndim)
            steps = plan_route(held, dim_axes(b, leaf.ndim))
            routed += 4 * received_elements(steps, held, leaf.shape, train.mesh.shape)
        assert make_reshard(params, source, target).moved_bytes == routed, (name(old), name(new))


def compiled_bytes(reshard):
    """(bytes that a device receives by the compiled programs' collectives, types on the wire)."""
    received, types = 0, set()
    for _, lowered, times in reshard.programs():
        for line in lowered.compile().as_text().splitlines():
            found = re.search(r"= (.*) (all-gather|all-to-all|collective-permute|all-reduce)\(", line)
            if not found:
                continue
            results = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
            elements = sum(int(np.prod([int(n) for n in shape.split(",") if n])) for _, shape in results)
            group = len(re.search(r"replica_groups=\{\{([\d,]+)\}", line)[1].split(","))
            types |= {kind for kind, _ in results}
            size = {"f32": 4, "u16": 2}[results[0][0]]
            received += times * size * elements * (group - 1) // group
    return received, types


@pytest.mark.parametrize("dtype", [None, "bfloat16"], ids=["as they are", "bfloat16"])
@pytest.mark.parametrize(
    ("old", "new"),
    [((1, 1, 8), (8, 1, 1)), ((1, 8, 1), (4, 1, 2)), ((2, 2, 2), (2, 1, 4)), ((1, 8, 1), (1, 1, 8))],
    ids=["gathered", "exchanged and gathered", "sliced and gathered", "exchanged"],
)
def test_compiled_collectives_move_the_counted_bytes_in_the_target_type(old, new, dtype):
    """Cast before the move: two bytes an element on the wire, also where the backend widens bfloat16."""
    train = training_view(shape(*old))
    params = parameter_shapes(LLAMA)
    source, target = (shardings(LLAMA, params, v) for v in (train, regroup(train, shape(*new))))
    reshard = make_reshard(params, source, target, dtype=dtype)
    received, types = compiled_bytes(reshard)
    assert received == reshard.moved_bytes > 0
    assert types <= ({"f32"} if dtype is None else {"u16"})
    if dtype is not None:
        assert reshard.moved_bytes == make_reshard(params, source, target).moved_bytes // 2


def test_a_cast_is_that_of_astype_and_leaves_whole_numbers_alone():
    train = training_view(shape(2, 2, 2))
    params = {"kernel": np.linspace(-3, 3, 64, dtype=np.float32).reshape(8, 8), "count": np.arange(8)}
    axes = {"kernel": ("embed", "mlp"), "count": (None,)}
    from rlhf_jax.sharding.rules import parameter_shardings

    source, target = (parameter_shardings(v, axes, params) for v in (train, regroup(train, shape(8, 1, 1))))
    moved = make_reshard(params, source, target, dtype="bfloat16")(jax.device_put(params, source))
    np.testing.assert_array_equal(moved["kernel"], params["kernel"].astype(jnp.bfloat16))
    assert moved["count"].dtype.kind == "i"


def test_nothing_moves_and_nothing_is_copied_where_nothing_changes():
    view = training_view(shape(2, 2, 2))
    params = random_params(LLAMA)
    places = shardings(LLAMA, params, view)
    reshard = make_reshard(params, places, places)
    assert reshard.moved_bytes == 0
    assert reshard.programs() == []
    source = jax.device_put(params, places)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (source, reshard(source))), strict=True))
    assert make_reshard({}, {}, {}).moved_bytes == 0


def live_bytes():
    """Bytes of all buffers on all devices, each counted once."""
    arrays = (array for array in jax.live_arrays() if not array.is_deleted())
    shards = (shard for array in arrays for shard in array.addressable_shards)
    return sum({(s.device.id, s.data.unsafe_buffer_pointer()): s.data.nbytes for s in shards}.values())


def bytes_in(params, places):
    """Bytes over all devices of a tree in a layout."""
    return sum(
        len(place.device_set) * int(np.prod(place.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf, place in zip(*map(jax.tree.leaves, (params, places)), strict=True)
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((1, 1, 8), (8, 1, 1)),
        ((1, 8, 1), (4, 1, 2)),
        ((2, 2, 2), (2, 1, 4)),
        ((1, 1, 4), (4, 1, 1)),
        ((1, 4, 1), (2, 1, 2)),
        ((1, 2, 2), (1, 1, 2)),
    ],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def test_the_peak_is_source_and_target_and_one_group(old, new):
    """Live buffers between groups, and the temporaries that the compiler states for each group's program.

    Shapes of fewer than eight devices are those of two disjoint grids.
    """
    one_grid = np.prod(old) == 8
    train = training_view(shape(*old), jax.devices()[: np.prod(old)])
    spare = jax.devices()[4 : 4 + np.prod(new)]
    generate = regroup(train, shape(*new)) if one_grid else training_view(shape(*new), spare)
    params = random_params(LLAMA)
    unrolled, layers = LLAMA.clone(scan_layers=False), unstack_layers(params)
    places, there_places = shardings(LLAMA, params, train), shardings(unrolled, layers, generate)
    before = live_bytes()
    source = jax.block_until_ready(jax.device_put(params, places))
    reshard = make_reshard(params, places, there_places, unstack=True)
    peak, result = live_bytes(), []
    for group in reshard.groups(source):
        result.append(jax.block_until_ready(group))
        peak = max(peak, live_bytes())
    there = reshard.assemble(iter(result))
    sizes = [
        [s.data.nbytes for x in jax.tree.leaves(group) for s in x.addressable_shards] for group in result
    ]
    largest = max(map(sum, sizes))
    bound = bytes_in(params, places) + bytes_in(layers, there_places)
    assert bytes_in(params, places) < peak - before <= bound + largest
    del group, result
    assert live_bytes() - before <= bound
    for _, lowered, _ in reshard.programs():
        assert lowered.compile().memory_analysis().temp_size_in_bytes <= largest
    jax.tree.map(np.testing.assert_array_equal, layers, there)

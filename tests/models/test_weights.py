"""Weights that are read where they are needed: each byte once, into arrays of their own, on any devices."""

import dataclasses
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from rlhf_jax.models import EncoderConfig, checkpoints, load_model
from rlhf_jax.models.huggingface import open_model
from rlhf_jax.models.parameters import anywhere, logical_axes, shapes
from rlhf_jax.models.weights import ArrayWeights, FreshWeights, TrunkWeights
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.rules import parameter_shardings

from .test_checkpoints import write
from .tiny import GPT2, LLAMA

BERT = EncoderConfig(vocab_size=64, layers=2, embed=16, heads=4, mlp=24, max_positions=16)
MODELS = {  # 64 entries are divided by 8, as 24 are; 4 heads and 2 key/value heads are not
    "llama": (dataclasses.replace(LLAMA, vocab_size=64), "lm"),
    "gpt2": (dataclasses.replace(GPT2, vocab_size=64), "lm"),
    "gpt2 score": (GPT2, "score"),
    "bert": (BERT, "score"),
    "distilbert": (
        dataclasses.replace(BERT, family="distilbert", token_types=0, pooler_activation="relu"),
        "score",
    ),
}
LAYOUTS = {"fsdp 8": (1, 8, 1), "tensor 8": (1, 1, 8), "2 x 2 x 2": (2, 2, 2), "fsdp 4, tensor 2": (1, 4, 2)}


def layout(*sizes):
    """model -> shardings over the eight devices."""
    view = training_view(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)))
    return lambda model: parameter_shardings(view, logical_axes(model), shapes(model))


@pytest.fixture
def read_bytes(monkeypatch):
    """A list of the sizes of everything that is read from safetensors files."""
    sizes = []
    plain = checkpoints.safe_open

    class Counting:
        def __init__(self, *args, **options):
            self._file = plain(*args, **options)

        def __enter__(self):
            self._open = self._file.__enter__()
            return self

        def __exit__(self, *exc_info):
            return self._file.__exit__(*exc_info)

        def keys(self):
            return self._open.keys()

        def get_slice(self, name):
            return Piece(self._open.get_slice(name))

    class Piece:
        def __init__(self, piece):
            self._piece = piece
            self.get_shape, self.get_dtype = piece.get_shape, piece.get_dtype

        def __getitem__(self, cut):
            tensor = self._piece[cut]
            sizes.append(tensor.nbytes)
            return tensor

    monkeypatch.setattr(checkpoints, "safe_open", Counting)
    return sizes


@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_shards_hold_what_a_plain_reading_gives_and_each_byte_is_read_once(name, sizes, tmp_path, read_bytes):
    config, head = MODELS[name]
    directory, tensors, params = write(tmp_path, config, head)
    model, variables = load_model(directory, head=head, shardings=layout(*sizes))
    assert sum(read_bytes) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(read_bytes) <= max(tensor.nbytes for tensor in tensors.values())
    jax.tree.map(np.testing.assert_array_equal, variables["params"], params)
    jax.tree.map(np.testing.assert_array_equal, load_model(directory, head=head)[1]["params"], params)
    for leaf, place in zip(
        jax.tree.leaves(variables["params"]), jax.tree.leaves(layout(*sizes)(model)), strict=True
    ):
        assert leaf.sharding == place
        assert leaf.dtype == np.float32


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64], ids=["bf16", "f16", "f64"])
def test_other_types_are_converted_shard_by_shard(dtype, tmp_path, read_bytes):
    directory, tensors, _ = write(tmp_path)
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    _, plain = load_model(directory)
    read_bytes.clear()
    _, spread = load_model(directory, shardings=layout(2, 2, 2))
    assert sum(read_bytes) == sum(tensor.nbytes for tensor in tensors.values())
    jax.tree.map(np.testing.assert_array_equal, spread, plain)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(spread))


def test_a_cut_of_any_axis_is_read_to_the_letter(tmp_path):
    """Layouts that no rule makes, such as the head width cut while the heads are whole."""
    directory, _, params = write(tmp_path, GPT2)
    mesh = training_view({"data": 1, "fsdp": 2, "tensor": 4}).mesh

    def minor_first(model):
        """Over the last axes that 2 or 4 divide."""

        def spread(leaf):
            free, spec = ["grid0", "grid1"], []
            for size in reversed(leaf.shape):
                name = next((axis for axis in free if size % mesh.shape[axis] == 0), None)
                free = [axis for axis in free if axis != name]
                spec.append(name)
            return NamedSharding(mesh, PartitionSpec(*reversed(spec)))

        return jax.tree.map(spread, shapes(model))

    _, variables = load_model(directory, shardings=minor_first)
    q = variables["params"]["layers"]["attention"]["q"]["kernel"]
    assert q.sharding.shard_shape(q.shape) != q.shape
    jax.tree.map(np.testing.assert_array_equal, variables["params"], params)


def test_nothing_is_read_before_it_is_wanted(tmp_path, read_bytes):
    directory, tensors, _ = write(tmp_path)
    model, weights = open_model(directory, head="lm", dtype="float32")
    assert weights.shapes["embed"]["embedding"].shape == (53, 16)
    assert read_bytes == []
    weights.read({"embed": layout(1, 8, 1)(model)["embed"]})
    assert sum(read_bytes) == tensors["model.embed_tokens.weight"].nbytes


def buffers(params):
    return {
        shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(params) for shard in x.addressable_shards
    }


@pytest.mark.parametrize("sizes", [(1, 8, 1), (8, 1, 1)], ids=["fsdp 8", "data 8"])
def test_two_roles_share_nothing(sizes, tmp_path):
    """What one role gives away to its training another keeps: no buffer is shared, nor between devices."""
    directory, *_ = write(tmp_path)
    model, stored = open_model(directory, head="lm", dtype="float32")
    places = layout(*sizes)(model)
    sources = (stored, FreshWeights(model, 0), ArrayWeights(stored.read(places)))
    readings = [source.read(places) for source in sources for _ in range(2)]
    count = sum(len(x.addressable_shards) for x in jax.tree.leaves(readings))
    assert len(buffers(readings)) == count
    for first, second in zip(readings[::2], readings[1::2], strict=True):
        jax.tree.map(np.testing.assert_array_equal, first, second)


def test_donated_weights_leave_the_other_reading_alone(tmp_path):
    directory, _, params = write(tmp_path)
    model, stored = open_model(directory, head="lm", dtype="float32")
    places = layout(8, 1, 1)(model)
    first, second = stored.read(places), stored.read(places)
    double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0, out_shardings=places)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * np.asarray(b)), double(first), params)
    jax.tree.map(np.testing.assert_array_equal, second, params)


def test_a_trunk_with_a_fresh_head_reads_no_other_head(tmp_path, read_bytes):
    directory, tensors, params = write(tmp_path)
    model, policy = open_model(directory, head="lm", dtype="float32")
    critic = model.clone(head="value")
    weights = TrunkWeights(policy, FreshWeights(critic, 7))
    found = weights.read(layout(1, 8, 1)(critic))
    unread = tensors["lm_head.weight"].nbytes if "lm_head.weight" in tensors else 0
    assert sum(read_bytes) == sum(tensor.nbytes for tensor in tensors.values()) - unread
    assert found.keys() == weights.shapes.keys() == {"embed", "layers", "final_norm", "head"}
    for name in ("embed", "layers", "final_norm"):
        jax.tree.map(np.testing.assert_array_equal, found[name], params[name])
    head = FreshWeights(critic, 7).read(anywhere(shapes(critic)))["head"]
    np.testing.assert_array_equal(found["head"]["kernel"], head["kernel"])


def test_what_a_checkpoint_lacks_is_said_once(tmp_path, caplog):
    directory, *_ = write(tmp_path, GPT2)
    model, weights = open_model(directory, head="value", dtype="float32", seed=5)
    assert not caplog.records
    places = layout(1, 8, 1)(model)
    first, second = weights.read(places), weights.read(places)
    told = "has no head/kernel: fresh seeded weights are used"
    assert [record.getMessage().removeprefix(f"{directory} ") for record in caplog.records] == [told]
    np.testing.assert_array_equal(first["head"]["kernel"], second["head"]["kernel"])
    plain = load_model(directory, head="value", seed=5)[1]["params"]
    jax.tree.map(np.testing.assert_array_equal, first, plain)


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "minilm-l6"])
@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 1, 8)], ids=["fsdp 8", "tensor 8"])
def test_real_models_are_read_once_to_their_shards(name, sizes, real_models, read_bytes):
    head = "lm" if name.startswith("smollm2") else "score"
    _, variables = load_model(real_models / name, head=head, shardings=layout(*sizes))
    wanted = sum(tensor.nbytes for tensor in load_file(real_models / name / "model.safetensors").values())
    unused = 0.001 * wanted  # position_ids and the like
    assert wanted - unused <= sum(read_bytes) <= wanted
    _, plain = load_model(real_models / name, head=head)
    jax.tree.map(np.testing.assert_array_equal, variables, plain)


def test_the_host_holds_a_shard_at_a_time(tmp_path):
    """Arrays of the devices are not counted: what NumPy holds while they are filled is."""
    wide = dataclasses.replace(LLAMA, vocab_size=16384, embed=64, mlp=4096, tied=False)
    directory, tensors, _ = write(tmp_path, wide)
    total, largest = sum(t.nbytes for t in tensors.values()), 16384 * 64 * 4
    places = layout(1, 8, 1)
    model, weights = open_model(directory, head="lm", dtype="float32")
    weights.read(places(model))  # compiles the copies
    tracemalloc.start()
    try:
        weights.read(places(model))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total > 3 * largest
    assert peak < largest / 2  # what was cut, what it became and what is copied: a few shards of eight

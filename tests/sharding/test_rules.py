"""From logical axes to partitions: the table, its fallback, and constraints inside a function."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rlhf_jax.models import Transformer, TransformerConfig, logical_axes
from rlhf_jax.models.parameters import shapes
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.rules import (
    RULES,
    batch_sharding,
    constrain,
    in_view,
    parameter_shardings,
    partition,
    replicated,
    replicated_dimensions,
    sharding_scope,
)

VIEW = training_view({"data": 2, "fsdp": 2, "tensor": 2})
TENSOR_8 = training_view({"data": 1, "fsdp": 1, "tensor": 8})


def test_a_partition_by_hand():
    """grid0 is data, grid1 fsdp, grid2 tensor."""
    assert partition(VIEW, ("embed", "mlp"), (4, 6)) == PartitionSpec("grid1", "grid2")
    assert partition(VIEW, ("layers", "mlp", "embed"), (3, 2, 2)) == PartitionSpec(None, "grid2", "grid1")
    assert partition(VIEW, ("batch", "length"), (8, 5)) == PartitionSpec(("grid0", "grid1"), None)
    assert partition(VIEW, (None, "norm"), (8, 8)) == PartitionSpec(None, None)
    assert partition(VIEW, (), ()) == PartitionSpec()
    assert partition(TENSOR_8, ("vocab",), (16,)) == PartitionSpec(("grid0", "grid1", "grid2"))


@pytest.mark.parametrize("function", [partition, replicated_dimensions])
def test_an_unknown_axis_raises(function):
    """Taken for replicated, a misspelt axis would cost memory on every device and say nothing."""
    axes, sizes = ("embed", "mpl"), (4, 4)
    tree = (axes, sizes) if function is partition else ({"kernel": axes}, {"kernel": jnp.zeros(sizes)})
    with pytest.raises(KeyError, match="'mpl' has no rule"):
        function(VIEW, *tree)


def test_a_dimension_that_is_not_divisible_stays_whole_and_is_listed():
    """Nine heads, three key/value heads: what SmolLM2 has."""
    axes = {
        "k": ("embed", "kv_heads", "head_dim"),
        "q": ("embed", "heads", "head_dim"),
        "up": ("embed", "mlp"),
    }
    leaves = {"k": jnp.zeros((8, 3, 2)), "q": jnp.zeros((8, 9, 2)), "up": jnp.zeros((8, 6))}
    shardings = parameter_shardings(VIEW, axes, leaves)
    assert shardings["q"].spec == PartitionSpec("grid1", None, None)
    assert shardings["up"].spec == PartitionSpec("grid1", "grid2")
    assert replicated_dimensions(VIEW, axes, leaves) == [
        "k stays whole: kv_heads 3 is not divisible by tensor = 2",
        "q stays whole: heads 9 is not divisible by tensor = 2",
    ]


def test_an_axis_of_devices_is_never_used_twice():
    with pytest.raises(ValueError, match="would shard two dimensions of \\('mlp', 'vocab'\\)"):
        partition(VIEW, ("mlp", "vocab"), (4, 4))
    assert partition(VIEW, ("mlp", "vocab"), (4, 5)) == PartitionSpec("grid2", None)


def test_every_axis_of_the_models_has_a_rule():
    config = TransformerConfig(
        vocab_size=16, layers=2, embed=8, heads=4, kv_heads=2, head_dim=2, mlp=8, max_positions=8
    )
    for head in ("lm", "value"):
        model = Transformer(config, head=head)
        shardings = parameter_shardings(VIEW, logical_axes(model), shapes(model))
        assert not all(sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings))


def test_a_module_without_logical_axes_is_kept_whole_everywhere():
    """A user's own policy need not know of meshes."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, tokens_BT, mask_BT=None):
            return nn.Dense(8)(nn.Embed(8, 4)(tokens_BT))

    shardings = parameter_shardings(VIEW, logical_axes(Own()), shapes(Own()))
    assert len(jax.tree.leaves(shardings)) == 3
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings))


def test_rows_lie_over_data_and_fsdp():
    rows = jax.device_put(np.arange(8.0).reshape(8, 1), batch_sharding(VIEW))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 1)}
    assert replicated(VIEW).is_fully_replicated


def test_constrain_is_nothing_outside_a_scope():
    x = jnp.ones((4, 2))
    assert constrain(x, "batch", "embed_act") is x
    assert "sharding_constraint" not in str(jax.make_jaxpr(lambda x: constrain(x, "batch", "length"))(x))


def test_constrain_speaks_of_the_innermost_scope():
    x = jnp.ones((4, 8))
    with sharding_scope(TENSOR_8):
        with sharding_scope(VIEW):
            assert constrain(x, "batch", "length").sharding.spec == PartitionSpec(("grid0", "grid1"), None)
        inside = constrain(x, "batch", "vocab_act")
        assert inside.sharding.spec == PartitionSpec(None, ("grid0", "grid1", "grid2"))
    assert constrain(x, "batch", "length") is x


def test_an_error_closes_the_scope():
    with pytest.raises(RuntimeError, match="inside"), sharding_scope(VIEW):
        raise RuntimeError("inside")
    x = jnp.ones((4, 2))
    assert constrain(x, "batch", "embed_act") is x


def test_in_view_constrains_what_is_traced_inside():
    def double(x):
        """Twice x."""
        return constrain(2 * x, "batch", "length")

    scoped = in_view(VIEW, double)
    out = scoped(jnp.ones((4, 3)))
    assert {shard.data.shape for shard in out.addressable_shards} == {(1, 3)}
    assert (np.asarray(out) == 2).all()
    assert scoped.__doc__ == "Twice x."


def test_every_rule_names_axes_of_a_view():
    assert {axis for axes in RULES.values() for axis in axes} <= set(VIEW.shape)

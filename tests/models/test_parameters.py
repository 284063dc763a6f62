"""Trees of parameters: fresh weights, stacking, logical axes."""

import jax
import numpy as np
import pytest

from rlhf_jax.models import EncoderConfig, init_model, logical_axes, stack_layers, unstack_layers
from rlhf_jax.models.encoder import Encoder
from rlhf_jax.models.parameters import fresh_params, shapes
from rlhf_jax.models.transformer import Transformer
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.rules import RULES, parameter_shardings

from .tiny import GPT2, LLAMA

ENCODER = EncoderConfig(vocab_size=53, layers=2, embed=16, heads=4, mlp=24, max_positions=16)


@pytest.mark.parametrize(
    "model",
    [
        Transformer(LLAMA),
        Transformer(GPT2, head="value"),
        Transformer(GPT2, scan_layers=False),
        Encoder(ENCODER),
    ],
    ids=["llama", "gpt2 value", "gpt2 unrolled", "encoder"],
)
def test_every_axis_has_a_name_with_a_rule(model):
    is_names = lambda node: isinstance(node, tuple)  # noqa: E731
    axes, leaves = logical_axes(model), shapes(model)
    assert jax.tree.structure(axes, is_leaf=is_names) == jax.tree.structure(leaves)
    for names, leaf in zip(jax.tree.leaves(axes, is_leaf=is_names), jax.tree.leaves(leaves), strict=True):
        assert len(names) == leaf.ndim
        assert set(names) <= set(RULES)
    if "layers" in axes:
        assert axes["layers"]["attention"]["q"]["kernel"] == ("layers", "embed", "heads", "head_dim")
        assert axes["layers"]["attention"]["k"]["kernel"] == ("layers", "embed", "kv_heads", "head_dim")
        assert axes["layers"]["mlp"]["down"]["kernel"] == ("layers", "mlp", "embed")
        assert axes["embed"]["embedding"] == ("vocab", "embed")


def test_stacking_is_the_inverse_of_unstacking():
    leaf = np.arange(12.0)[:, None] * np.ones((12, 3))  # twelve: layers_10 comes after layers_9
    params = {"embed": {"embedding": np.ones(2)}, "layers": {"norm": {"scale": leaf}}}
    apart = unstack_layers(params)
    assert apart["layers_10"]["norm"]["scale"][0] == 10
    jax.tree.map(np.testing.assert_array_equal, stack_layers(apart), params)


def test_fresh_weights_come_from_the_seed():
    model, variables = init_model(LLAMA, head="value", seed=1)
    params = variables["params"]
    other = init_model(LLAMA, head="value", seed=2)[1]["params"]
    assert (np.asarray(params["embed"]["embedding"]) != np.asarray(other["embed"]["embedding"])).any()
    up = np.asarray(params["layers"]["mlp"]["up"]["kernel"])
    assert abs(up.std() - 0.02) < 0.003
    assert (up[0] != up[1]).any()  # each layer its own
    assert (np.asarray(params["final_norm"]["scale"]) == 1).all()
    head = fresh_params(model, 1, {"head": {"kernel": None}})
    jax.tree.map(np.testing.assert_array_equal, head, {"head": params["head"]})
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("shape", [(1, 8, 1), (1, 1, 8), (2, 2, 2)], ids=["fsdp 8", "tensor 8", "2 x 2 x 2"])
def test_fresh_weights_are_the_same_on_any_devices(shape):
    model, variables = init_model(LLAMA, head="lm", seed=3)
    view = training_view(dict(zip(("data", "fsdp", "tensor"), shape, strict=True)))
    places = parameter_shardings(view, logical_axes(model), shapes(model))
    found = fresh_params(model, 3, places)
    jax.tree.map(np.testing.assert_array_equal, found, variables["params"])
    for leaf, place in zip(jax.tree.leaves(found), jax.tree.leaves(places), strict=True):
        assert leaf.sharding == place

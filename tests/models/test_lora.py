"""Adapters against dense matrices: outputs, gradients, and what they leave alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import Transformer
from rlhf_jax.models.configs import EncoderConfig
from rlhf_jax.models.encoder import Encoder
from rlhf_jax.models.lora import deferred_merge, frozen, join, learnt, merged, with_adapters
from rlhf_jax.models.parameters import flatten, shapes, unstack_layers
from rlhf_jax.models.weights import AdapterWeights, ArrayWeights, FreshWeights
from rlhf_jax.settings import Lora

from .tiny import CONFIGS, LLAMA, batch, call, made, quick_jit, randomised

LORA = Lora(rank=3, alpha=6.0, targets="q,k,v,o,gate,up,down")  # alpha / rank = 2


def adapted(config, lora=LORA, head="lm"):
    """(base, model with adapters, its parameters, noise everywhere)."""
    model = with_adapters(Transformer(config, head=head), lora)
    return Transformer(config, head=head), model, randomised(model)["params"]


def dense(params):
    """The base tree with W + 2 A B, layer by layer in float64."""
    flat = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(params).items()}
    for path in [path for path in flat if path.endswith("lora_a")]:
        kernel = path.replace("lora_a", "kernel")
        a, b = flat.pop(path), flat.pop(path.replace("lora_a", "lora_b"))
        delta = [
            np.tensordot(a_layer, b_layer, axes=1).reshape(flat[kernel].shape[1:])
            for a_layer, b_layer in zip(a, b, strict=True)
        ]
        flat[kernel] = flat[kernel] + 2.0 * np.stack(delta)
    tree = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[name] = leaf
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_outputs_are_those_of_the_dense_sum(config):
    base, model, params = adapted(config)
    ours = call(model, "__call__", {"params": params}, *batch())
    theirs = call(base, "__call__", {"params": dense(params)}, *batch())
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    plain = call(base, "__call__", {"params": frozen(params)}, *batch())
    assert np.abs(ours - plain).max() > 0.1


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_fresh_adapters_change_no_bit(config):
    base, variables = made(config)
    weights = ArrayWeights(variables["params"])
    model = with_adapters(base, LORA)
    params = AdapterWeights(_Parts(weights), FreshWeights(model, 3)).read(
        jax.tree.map(lambda _: None, shapes(model))
    )
    a = params["layers"]["attention"]["q"]["lora_a"]
    assert np.std(a) == pytest.approx(16**-0.5, rel=0.3)  # x A has the size of x
    ours = call(model, "__call__", {"params": params}, *batch())
    np.testing.assert_array_equal(ours, call(base, "__call__", variables, *batch()))


class _Parts:
    """Array weights that can be read in part."""

    def __init__(self, weights):
        self.weights = weights

    def read(self, shardings):
        return jax.tree.map(lambda _, leaf: leaf, shardings, self.weights.params, is_leaf=lambda x: x is None)


def test_gradients_are_those_of_the_dense_matrix():
    """dA = 2 G B^T and dB = 2 A^T G, where G is the gradient of the dense matrix."""
    base, model, params = adapted(LLAMA)
    direction = jax.random.normal(jax.random.key(0), (3, 8, 53))

    def loss(model, params):
        return (model.apply({"params": params}, *batch()) * direction).mean()

    grads = quick_jit(jax.grad(lambda own: loss(model, join(frozen(params), own))))(learnt(params))
    of_dense = quick_jit(jax.grad(functools.partial(loss, base)))(dense(params))
    for block, name in (("attention", "k"), ("mlp", "down")):
        own, adapters = grads["layers"][block][name], params["layers"][block][name]
        shape = adapters["kernel"].shape
        g = np.asarray(of_dense["layers"][block][name]["kernel"], np.float64).reshape(2, shape[1], -1)
        a, b = (np.asarray(adapters[key], np.float64) for key in ("lora_a", "lora_b"))
        b = b.reshape(2, 3, -1)
        assert np.abs(own["lora_a"]).max() > 1e-4
        np.testing.assert_allclose(own["lora_a"], 2 * np.einsum("lio,lro->lir", g, b), rtol=2e-3, atol=1e-6)
        np.testing.assert_allclose(
            np.reshape(own["lora_b"], (2, 3, -1)), 2 * np.einsum("lir,lio->lro", a, g), rtol=2e-3, atol=1e-6
        )
    assert {path.rsplit("/", 1)[-1] for path in flatten(grads)} == {"lora_a", "lora_b"}


def test_merging_gives_the_dense_sum_with_and_without_stacked_layers():
    _, _, params = adapted(LLAMA)
    expected = dense(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged(params, LORA), expected)
    apart = merged(unstack_layers(params), LORA)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), apart, unstack_layers(expected))
    plain = frozen(params)
    assert deferred_merge(plain, LORA) == plain


def test_only_the_targets_have_adapters_and_a_head_learns_whole():
    _, _, params = adapted(CONFIGS["gpt2"], Lora(rank=2, targets="v,gate,down"), head="value")
    assert set(flatten(learnt(params))) == {
        *(f"layers/attention/v/lora_{x}" for x in "ab"),
        *(f"layers/mlp/down/lora_{x}" for x in "ab"),
        "head/kernel",
    }
    assert set(flatten(frozen(params))) | set(flatten(learnt(params))) == set(flatten(params))
    jax.tree.map(np.testing.assert_array_equal, join(frozen(params), learnt(params)), params)


def test_encoders_have_adapters_too():
    config = EncoderConfig(vocab_size=53, layers=2, embed=16, heads=2, mlp=24, max_positions=32)
    model = with_adapters(Encoder(config), LORA)
    params = randomised(model)["params"]
    base = Encoder(config)
    ours, theirs = (
        call(m, "__call__", {"params": p}, *batch())
        for m, p in ((model, params), (base, merged(params, LORA)))
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert "head/pooler/kernel" in flatten(learnt(params))

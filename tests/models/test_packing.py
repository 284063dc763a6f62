"""Packed rows: the same hidden states and gradients as padded ones, and nothing from the row beside."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import unstack_layers
from rlhf_jax.models.packing import pack_valid, whole_lines

from .tiny import CONFIGS, batch, made, quick_jit

MASK = jnp.asarray(np.array([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]], bool))


def test_tokens_lie_end_to_end_in_each_group():
    packing = pack_valid(MASK, 2, 6)
    x_BT = jnp.arange(16).reshape(4, 4) + 100
    np.testing.assert_array_equal(
        packing.pack(x_BT), [[102, 103, 104], [105, 106, 0], [112, 114, 115], [0, 0, 0]]
    )
    np.testing.assert_array_equal(packing.unpack(packing.pack(x_BT), 4), jnp.where(MASK, x_BT, 0))


def test_a_size_is_whole_lines():
    assert [whole_lines(tokens) for tokens in (0, 1, 2, 2.5, 7)] == [0, 2, 2, 4, 8]


def test_the_gradient_of_packing_is_that_of_indexing():
    """Written out by hand it is a gather; another index there would teach the neighbour."""
    rng = np.random.default_rng(0)
    x_BTD, weight_GND = rng.normal(size=(4, 4, 3)), rng.normal(size=(2, 6, 3))
    packing = pack_valid(MASK, 2, 6)
    weight = weight_GND.reshape(4, 3, 3)
    slope = jax.grad(lambda x: (packing.pack(x) * weight).sum())(jnp.asarray(x_BTD, jnp.float32))
    wanted = np.zeros((4, 4, 3))
    for group in range(2):
        places = np.argwhere(np.asarray(MASK)[2 * group : 2 * group + 2])
        for n, (row, t) in enumerate(places):
            wanted[2 * group + row, t] = weight_GND[group, n]
    np.testing.assert_allclose(slope, wanted, rtol=1e-6)
    back = jax.grad(lambda x: (packing.unpack(x, 4) * x_BTD).sum())(jnp.asarray(weight, jnp.float32))
    kept = np.asarray(packing.pack(jnp.asarray(x_BTD, jnp.float32)))
    np.testing.assert_allclose(back, kept, rtol=1e-6)


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_hidden_states_and_gradients_are_those_of_padded_rows(kind, scan_layers):
    """Left padding, right padding and none; room for two tokens more than there are."""
    model, variables = made(CONFIGS[kind])
    if not scan_layers:
        model, variables = model.clone(scan_layers=False), {"params": unstack_layers(variables["params"])}
    tokens, mask = batch()
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(3, 8, 16)), jnp.float32)

    def loss(variables, packing):
        hidden: Any = model.apply(variables, tokens, mask, packing, method="hidden")
        return (jnp.where(mask[..., None], hidden, 0) * weight).sum(), hidden

    of = quick_jit(jax.value_and_grad(loss, has_aux=True))
    (_, wanted), slopes = of(variables, None)
    (_, found), gradient = of(variables, pack_valid(mask, 1, whole_lines(int(mask.sum()) + 2)))
    valid = np.asarray(mask)
    # the same sums over other shapes, of numbers of about 1
    np.testing.assert_allclose(np.asarray(found)[valid], np.asarray(wanted)[valid], atol=1e-5)
    assert not np.asarray(found)[~valid].any()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient, slopes)


def test_a_token_sees_its_own_row_up_to_itself():
    """The gradient of one hidden state by the token embeddings is zero after it and in every other row."""
    tokens, mask = batch()
    packing = pack_valid(mask, 1, whole_lines(int(mask.sum())))
    # each token of the batch has an entry of the table of its own
    model, variables = made(dataclasses.replace(CONFIGS["llama"], vocab_size=tokens.size))
    own, params = jnp.arange(tokens.size).reshape(tokens.shape), variables["params"]

    def state(embedding):
        changed = {"params": {**params, "embed": {"embedding": embedding}}}
        hidden: Any = model.apply(changed, own, mask, packing, method="hidden")
        return hidden[1, 3].sum()

    slopes = quick_jit(jax.grad(state))(params["embed"]["embedding"])
    reach = np.asarray(jnp.abs(slopes).sum(-1)).reshape(3, 8)
    wanted = np.zeros((3, 8), bool)
    wanted[1, :4] = True
    np.testing.assert_array_equal(reach > 0, wanted)

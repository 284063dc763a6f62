"""The decoder by property: padding, causality, cache, scanned and unrolled layers, recomputation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from rlhf_jax.checks import CHOICES
from rlhf_jax.errors import InputError
from rlhf_jax.models import Transformer, init_model, stack_layers, unstack_layers
from rlhf_jax.models.remat import POLICIES, recomputed
from rlhf_jax.models.transformer import Block

from .tiny import CONFIGS, GPT2, LLAMA, batch, call, made, prefill, quick_jit

# Logits here spread over about 5; float32 products of two layers agree to a few units in the seventh digit.
ATOL = 2e-5


def unrolled(model, variables):
    return model.clone(scan_layers=False), {"params": unstack_layers(variables["params"])}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_prefill_and_decode_give_the_logits_of_the_whole_sequence(config):
    model, variables = made(config)
    tokens, _ = batch()
    mask = jnp.arange(8)[None] >= jnp.array([[3], [0], [4]])
    whole = call(model, None, variables, tokens, mask)
    looped = unrolled(model, variables)
    logits, scanned_cache = prefill(model, variables, tokens[:, :5], mask[:, :5], 12)
    np.testing.assert_allclose(logits, whole[:, 4], atol=ATOL)
    logits, cache = prefill(*looped, tokens[:, :5], mask[:, :5], 12)
    np.testing.assert_allclose(logits, whole[:, 4], atol=ATOL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=ATOL), cache, scanned_cache)
    assert cache.length == 12
    for t in range(5, 8):
        logits, cache = call(looped[0], "decode", looped[1], tokens[:, t], cache)
        np.testing.assert_allclose(logits, whole[:, t], atol=ATOL)
    np.testing.assert_array_equal(cache.column, 8)
    np.testing.assert_array_equal(cache.position_B, mask.sum(-1))


def test_prefill_reads_the_last_valid_token_of_a_prompt_padded_on_the_right():
    model, variables = made(LLAMA)
    tokens, _ = batch()
    mask = jnp.arange(8)[None] < jnp.array([[3], [8], [5]])
    logits, _ = prefill(model, variables, tokens, mask, 8)
    whole = call(model, None, variables, tokens, mask)
    np.testing.assert_allclose(logits, whole[np.arange(3), np.array([2, 7, 4])], atol=ATOL)


def test_decoding_in_a_loop_copies_no_cache():
    """The `while_loop` carries the buffers and writes in place: its body has no copy of their shape."""
    model, variables = unrolled(*made(LLAMA))
    tokens, mask = batch()

    def generate(variables, tokens, mask):
        def body(carry):
            t, token, cache = carry
            logits, cache = model.apply(variables, token, cache, method="decode")
            return t + 1, jnp.argmax(logits, -1), cache

        logits, cache = model.apply(variables, tokens, mask, 24, method="prefill")
        return lax.while_loop(lambda carry: carry[0] < 16, body, (0, jnp.argmax(logits, -1), cache))[2]

    text = jax.jit(generate).lower(variables, tokens, mask).compile().as_text()
    name = re.findall(r"while\(.*body=%?([\w.-]+)", text)
    bodies = [block for block in re.split(r"\n\n", text) if re.match(rf"%?({'|'.join(name)}) ", block)]
    body = next(block for block in bodies if "f32[3,2,24,4]" in block)
    assert "dot(" in body or "fusion(" in body
    assert not re.findall(r"f32\[3,2,24,4\]\S* copy\(", body)


def test_decode_of_scanned_layers_says_what_to_do():
    model, variables = made(LLAMA)
    tokens, mask = batch()
    _, cache = prefill(model, variables, tokens, mask, 8)
    with pytest.raises(ValueError, match="unstack_layers"):
        model.apply(variables, tokens[:, 0], cache, method="decode")
    with pytest.raises(ValueError, match="cache_length 7 is below the prompt's width 8"):
        prefill(model, variables, tokens, mask, 7)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_unrolled_layers_equal_scanned_ones(config):
    model, variables = made(config)
    tokens, mask = batch()
    looped, params = unrolled(model, variables)
    np.testing.assert_allclose(
        call(model, None, variables, tokens, mask), call(looped, None, params, tokens, mask), atol=ATOL
    )
    wanted = jax.eval_shape(looped.init, jax.random.key(0), tokens)["params"]
    assert set(wanted) == set(params["params"])


def test_neither_recomputation_nor_unrolling_changes_a_gradient():
    model, variables = made(LLAMA)
    tokens, mask = batch()

    def loss(model):
        return lambda v: jnp.square(model.apply(v, tokens, mask)).mean()

    def kept(model):
        """Numbers that the forward pass keeps for the backward pass, weights among them."""
        leaves = jax.tree.leaves(jax.eval_shape(lambda v: jax.vjp(loss(model), v)[1], variables))
        return sum(leaf.size for leaf in leaves)

    wanted = quick_jit(jax.grad(loss(model)))(variables)["params"]
    again = [quick_jit(jax.grad(loss(model.clone(remat=r))))(variables)["params"] for r in POLICIES]
    looped, params = unrolled(model.clone(remat="layers"), variables)
    stacked = stack_layers(quick_jit(jax.grad(loss(looped)))(params)["params"])
    for found in (*again, stacked):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
    none, products, layers = (kept(model.clone(remat=remat)) for remat in ("none", "products", "layers"))
    assert layers < products < none


def test_the_settings_offer_what_there_is_to_recompute():
    assert tuple(POLICIES) == CHOICES["policy.remat"]
    with pytest.raises(InputError, match="remat='some' is unknown; use one of none, products, layers"):
        recomputed(Block, "some", scanned=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_gradient_from_later_tokens(config):
    """Causality: hidden states at t have a gradient of exactly 0 in the embeddings of tokens after t."""
    model, variables = made(config)
    tokens = jnp.arange(8)[None]  # each token once, so its row of the table is its input

    def hidden_at(table, t):
        params = {**variables["params"], "embed": {"embedding": table}}
        return model.apply({"params": params}, tokens, method="hidden")[0, t, 0]

    gradient = quick_jit(jax.grad(hidden_at))
    for t in (0, 4, 7):
        moved = np.abs(gradient(variables["params"]["embed"]["embedding"], t)).max(-1)
        assert (moved[t + 1 :] == 0).all()
        assert (moved[: t + 1] > 0).all()


@pytest.mark.parametrize("head", ["lm", "value", "score"])
def test_padding_side_width_and_content_change_nothing(head):
    model, variables = made(LLAMA, head)
    row = [5, 9, 2, 44, 31]
    bare = np.asarray(call(model, None, variables, jnp.array([row])))[0]
    for at, filler in ((0, 0), (3, 0), (3, 52), (2, 17)):
        tokens = np.full((1, 8), filler)
        mask = np.zeros((1, 8), bool)
        tokens[0, at : at + 5], mask[0, at : at + 5] = row, True
        out = np.asarray(call(model, None, variables, tokens, mask))[0]
        np.testing.assert_allclose(out if head == "score" else out[at : at + 5], bare, atol=ATOL)


def test_the_score_is_the_value_at_the_last_valid_token():
    critic, variables = made(LLAMA, "value")
    tokens, mask = batch()
    values = call(critic, None, variables, tokens, mask)
    scores = call(critic.clone(head="score"), None, variables, tokens, mask)
    np.testing.assert_allclose(scores, values[np.arange(3), np.array([7, 5, 7])], rtol=1e-5)
    assert values.dtype == scores.dtype == jnp.float32


def test_an_empty_row_is_finite_and_so_are_its_gradients():
    model, variables = made(GPT2, "score")
    tokens, mask = batch()
    mask = mask.at[1].set(False)
    of = quick_jit(jax.value_and_grad(lambda v: model.apply(v, tokens, mask).sum()))
    value, gradient = of(variables)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_a_float_mask_is_accepted():
    model, variables = made(LLAMA, "score")
    tokens, mask = batch()
    np.testing.assert_array_equal(
        call(model, None, variables, tokens, mask), call(model, None, variables, tokens, mask * 1.0)
    )


def test_what_a_model_has_not_got():
    model, variables = made(GPT2, "value")
    with pytest.raises(InputError, match="33 tokens are more than the model's 32 learned positions"):
        call(model, None, variables, jnp.zeros((1, 33), int))
    with pytest.raises(ValueError, match="has no logits"):
        call(model, "unembed", variables, jnp.zeros((1, 2, 16)))
    with pytest.raises(InputError, match="no head 'reward'; use one of lm, value, score"):
        init_model(GPT2, head="reward")
    with pytest.raises(AssertionError):
        call(Transformer(LLAMA), None, made(LLAMA)[1], jnp.zeros((2, 3), int), jnp.ones((2, 4)))

"""Eight devices give the numbers of one: logits, gradients, and generation over a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.models import Encoder, EncoderConfig, logical_axes, unstack_layers
from rlhf_jax.models.parameters import shapes
from rlhf_jax.sharding.mesh import training_view
from rlhf_jax.sharding.rules import batch_sharding, in_view, parameter_shardings

from .tiny import CONFIGS, LLAMA, QUICK, call, made, prefill, quick_jit, randomised

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def place(view, model, variables):
    shardings = parameter_shardings(view, logical_axes(model), shapes(model))
    return {"params": jax.device_put(variables["params"], shardings)}


def rows(count=4, T=6):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 53, (count, T)))
    return tokens, jnp.arange(T)[None] >= jnp.arange(count)[:, None]


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "encoder")]


@pytest.mark.parametrize("kind", ["llama", *SLOW])
def test_outputs_and_gradients(kind):
    if kind == "encoder":
        model = Encoder(EncoderConfig(vocab_size=53, layers=2, embed=16, heads=4, mlp=24, max_positions=16))
        variables = randomised(model)
    else:
        model, variables = made(CONFIGS[kind])
    tokens, mask = rows()

    def loss(variables, tokens, mask):
        out = model.apply(variables, tokens, mask)
        return jnp.square(out).mean(), out

    of = jax.value_and_grad(loss, has_aux=True)
    (_, wanted), slopes = quick_jit(of)(variables, tokens, mask)
    view = training_view({"data": 2, "fsdp": 2, "tensor": 2})
    spread = place(view, model, variables)
    batch = jax.device_put((tokens, mask), batch_sharding(view))
    (_, found), gradient = in_view(view, of, **QUICK)(spread, *batch)
    assert len(found.sharding.device_set) == 8
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), gradient, slopes)


def test_generation():
    model, variables = made(LLAMA)
    model, variables = model.clone(scan_layers=False), {"params": unstack_layers(variables["params"])}
    tokens, mask = rows()
    logits, cache = prefill(model, variables, tokens, mask, 8)
    wanted, _ = call(model, "decode", variables, jnp.argmax(logits, -1), cache)
    view = training_view({"data": 2, "fsdp": 1, "tensor": 4})

    def generate(variables, tokens, mask):
        logits, cache = model.apply(variables, tokens, mask, 8, method="prefill")
        return model.apply(variables, jnp.argmax(logits, -1), cache, method="decode")[0]

    batch = jax.device_put((tokens, mask), batch_sharding(view))
    found = in_view(view, generate, **QUICK)(place(view, model, variables), *batch)
    np.testing.assert_allclose(found, wanted, atol=2e-5)

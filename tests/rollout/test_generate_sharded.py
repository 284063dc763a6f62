"""Generation on eight devices gives what one device gives."""

import functools

import jax
import numpy as np
import pytest

from rlhf_jax.models import logical_axes, unstack_layers
from rlhf_jax.rollout.decoder import decoder_for
from rlhf_jax.rollout.generate import generate
from rlhf_jax.sharding.mesh import regroup, training_view
from rlhf_jax.sharding.reshard import make_reshard
from rlhf_jax.sharding.rules import batch_sharding, in_view, parameter_shardings

from . import tiny

KEY = jax.random.key(1)
TRAIN = {"data": 2, "fsdp": 2, "tensor": 2}
SHAPES = [(8, 1, 1), (2, 2, 2), (1, 2, 4)]


@pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_eight_devices_give_the_responses_of_one(sizes):
    """From the training layout, layers unstacked on the way, as a PPO iteration does it.

    Numbers that depended on the number of devices made runs on two machines two different runs.
    """
    train = training_view(TRAIN)
    view = regroup(train, dict(zip(TRAIN, sizes, strict=True)))
    unrolled = tiny.MODEL.clone(scan_layers=False)
    places = parameter_shardings(view, logical_axes(unrolled), jax.eval_shape(unstack_layers, tiny.PARAMS))
    source_places = parameter_shardings(train, logical_axes(tiny.MODEL), tiny.PARAMS)
    source = jax.device_put(tiny.PARAMS, source_places)
    reshard = make_reshard(tiny.PARAMS, source_places, places, unstack=True)
    sample = functools.partial(generate, decoder_for(unrolled), **tiny.SETTINGS)
    run = in_view(view, sample, out_shardings=batch_sharding(view))
    prompts = jax.device_put(tiny.prompts_of(), batch_sharding(view))
    got = run(reshard(source), prompts, KEY)
    assert got.tokens_BS.sharding.is_equivalent_to(batch_sharding(view), 2)

    expected = tiny.respond(tiny.prompts_of(), KEY)
    np.testing.assert_array_equal(got.tokens_BS, expected.tokens_BS)
    np.testing.assert_array_equal(got.mask_BS, expected.mask_BS)
    np.testing.assert_array_equal(got.truncated_B, expected.truncated_B)
    # Sums over the tensor axis have another order: float32 rounding of logits of about 10.
    np.testing.assert_allclose(got.logprobs_BT, expected.logprobs_BT, atol=1e-5)

"""The encoder by property; parity is in test_huggingface.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.errors import InputError
from rlhf_jax.models import Encoder, EncoderConfig, init_model

from .tiny import call, randomised

CONFIG = EncoderConfig(vocab_size=53, layers=2, embed=16, heads=4, mlp=24, max_positions=16)


def test_padding_side_and_content_change_nothing_and_the_last_token_counts():
    model = Encoder(CONFIG)
    variables = randomised(model)
    row = [1, 9, 2, 44, 31]
    bare = call(model, None, variables, jnp.array([row]))
    assert bare.shape == (1,)
    for at, filler in ((0, 0), (3, 0), (3, 52), (2, 17)):
        tokens = np.full((1, 8), filler)
        mask = np.zeros((1, 8), bool)
        tokens[0, at : at + 5], mask[0, at : at + 5] = row, True
        np.testing.assert_allclose(call(model, None, variables, tokens, mask), bare, atol=1e-5)
        again = call(model.clone(remat="layers"), None, variables, tokens, mask)
        np.testing.assert_allclose(again, bare, atol=1e-5)
    other = call(model, None, variables, jnp.array([[*row[:-1], 30]]))
    assert abs(float(other[0] - bare[0])) > 1e-3


def test_limits():
    model = Encoder(CONFIG)
    with pytest.raises(InputError, match="17 tokens are more than the encoder's 16 positions"):
        call(model, None, randomised(model), jnp.zeros((1, 17), int))
    with pytest.raises(InputError, match="sees the future"):
        init_model(CONFIG, head="value")

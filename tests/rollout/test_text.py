"""From a prompt as text to a response as text."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.data.messages import Message
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.errors import InputError
from rlhf_jax.models import Transformer, export_model
from rlhf_jax.rollout import generate_text
from rlhf_jax.settings import Rollout

from . import tiny

SETTINGS = Rollout(prompt_length=24, response_length=12)
GREEDY = dataclasses.replace(SETTINGS, temperature=0)
TEXTS = ["how do i bake bread", "with flour, water and salt", "be kind"]
PROMPT = "how do i bake?"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(directory, model, parameters, renderer) of an exported policy."""
    tokenizer = train_tokenizer(TEXTS, 300)
    model = Transformer(dataclasses.replace(tiny.CONFIG, layers=1, vocab_size=len(tokenizer)))
    params = tiny.randomised(model)
    directory = tmp_path_factory.mktemp("export") / "policy"
    export_model(directory, model, {"params": params}, tokenizer=tokenizer)
    return directory, model, params, Renderer(tokenizer)


def test_greedy_text_is_the_likeliest_tokens_one_by_one(exported):
    directory, model, params, renderer = exported
    ids = renderer.prompt((Message("user", PROMPT),), SETTINGS.prompt_length)
    width, response = len(ids) + SETTINGS.response_length, []
    for _ in range(SETTINGS.response_length):
        row = np.zeros((1, width), np.int32)
        row[0, : len(ids) + len(response)] = ids + response
        logits = tiny.whole(model, params, jnp.asarray(row), jnp.ones(row.shape, bool))
        response.append(int(np.argmax(logits[0, len(ids) + len(response) - 1])))
        if response[-1] in renderer.eos_ids:
            break
    text = generate_text(directory, PROMPT, GREEDY, 0)
    assert text == renderer.text(response)
    assert text


def test_a_seed_gives_its_own_response_and_gives_it_again(exported):
    first = generate_text(str(exported[0]), PROMPT, SETTINGS, 1)
    assert generate_text(str(exported[0]), PROMPT, SETTINGS, 1) == first
    assert generate_text(str(exported[0]), PROMPT, SETTINGS, 2) != first


def test_a_directory_without_a_model_is_an_error_of_the_input(tmp_path):
    with pytest.raises(InputError, match=r"config\.json"):
        generate_text(tmp_path, PROMPT, GREEDY, 0)


def test_a_prompt_without_words_is_an_error_of_the_input(exported):
    with pytest.raises(InputError, match="words"):
        generate_text(exported[0], "  ", GREEDY, 0)

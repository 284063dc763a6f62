"""The tokenizer of models that are trained from nothing."""

import pytest
from transformers import AutoTokenizer

from rlhf_jax.data.messages import Message
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.errors import InputError

TEXTS = ["the colour of the bread is warm", "the sound of the river", "thanks friend"] * 5
PROMPT = (
    Message("user", "the river"),
    Message("assistant", "the bread"),
    Message("user", "<|im_end|> é 😀 \0"),
)


def test_same_texts_give_the_same_tokenizer():
    first, second = (train_tokenizer(TEXTS, 290).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_special_tokens_and_size():
    tokenizer = train_tokenizer(TEXTS, 290)
    assert len(tokenizer) == 290
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(train_tokenizer(["ab"], 4000)) < 290  # no more merges than the texts hold
    assert len(train_tokenizer(TEXTS, 260)) == 260


def test_roles_are_one_token_each():
    tokenizer = train_tokenizer(TEXTS, 320)
    assert [len(tokenizer.encode(role)) for role in ("user", "assistant")] == [1, 1]


def test_every_text_can_be_written_and_read_back():
    tokenizer = train_tokenizer(TEXTS, 260)
    text = "".join(map(chr, [*range(1, 300), 0x4E2D, 0x1F600]))
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_saved_tokenizer_renders_alike(tmp_path):
    """Fault: an exported model lacked its tokenizer or chat template."""
    tokenizer = train_tokenizer(TEXTS, 290)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == tokenizer.chat_template
    before, after = (
        Renderer(each).dialogue(PROMPT, "thanks  friend\n.", 500) for each in (tokenizer, loaded)
    )
    assert before == after
    assert Renderer(loaded).text(Renderer(loaded).response("thanks , friend .")) == "thanks , friend ."


@pytest.mark.parametrize("size", [0, -5, 259])
def test_vocabulary_without_room_is_refused(size):
    with pytest.raises(InputError, match=rf"vocab_size={size} is too small; use at least 260"):
        train_tokenizer(TEXTS, size)

"""A small tokenizer for models that are trained from nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rlhf_jax.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
SMALLEST_VOCABULARY = 260  # 256 bytes, the three special tokens, and room for one merge
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template; the same texts give the same tokenizer.

    Every text can be encoded, since all bytes are in the vocabulary. Turns end with `<|im_end|>`, which is
    the EOS; padding has a token of its own. Few texts may hold fewer merges than asked for: mind
    `len(tokenizer)`.

    Args:
      texts: contents of messages and responses, without markers.
      vocab_size: entries, special tokens included.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"policy.shape.vocab_size={vocab_size} is too small; use at least {SMALLEST_VOCABULARY}"
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_roles(texts), trainer)
    trained = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        clean_up_tokenization_spaces=False,
    )
    trained.chat_template = CHAT_TEMPLATE
    return trained


def _with_roles(texts: Iterable[str]) -> Iterator[str]:
    """The texts, and the role names about as often as rendering writes them, so that each is one token."""
    for text in texts:
        yield text
        yield "user"
        yield "assistant"

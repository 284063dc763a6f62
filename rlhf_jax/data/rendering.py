"""From dialogues to token ids: one rendering for training, evaluation and rollout.

A tokenizer with a chat template gets its template. Without one, dialogues become HH text: `Human: ...` and
`Assistant: ...`, each after a blank line, a system message before them as plain text; an encoder's own
special tokens ([CLS] ... [SEP]) stand around it. The text of messages and responses is tokenized apart from
the markers and with special tokens disabled, so that `<|im_end|>` typed by a user is text, and prompt(x) +
response(y) == dialogue(x, y), token by token.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_jax.data.chat_template import template_pieces
from rlhf_jax.data.messages import ASSISTANT, HUMAN, Dialogue, Message, asks_nothing, lone_surrogate
from rlhf_jax.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKERS = {"system": "\n\n", "user": HUMAN, "assistant": ASSISTANT}
MOST_SHAPES = 1000  # sequences of roles whose markers are kept


class Renderer:
    """Renders dialogues for one tokenizer.

    Args:
      tokenizer: of `transformers`.
      eos_ids: all ids that end a response, by the model's generation configuration; none: the tokenizer's.
      encoder: True for BERT-like models; none: True where the tokenizer has both a CLS and a SEP token.

    Attributes:
      eos_id: the one that ends a rendered response: what the chat template closes the assistant's turn
        with, else the first of eos_ids. An encoder's is the last special token after the text.
      eos_ids: every id that ends a response, eos_id first.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Iterable[int] | None = None,
        encoder: bool | None = None,
    ):
        self.tokenizer: Any = tokenizer
        has_frame = tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None
        self.encoder = has_frame if encoder is None else encoder
        self._chat = bool(tokenizer.chat_template) and not self.encoder
        self._special = _special_ids(tokenizer)
        self._control = self._special - {self.tokenizer.unk_token_id}
        names = [str(self.tokenizer.convert_ids_to_tokens(id)) for id in self._control]
        self._control_text = (
            "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)) or "(?!)"
        )
        self._fixed_of_roles: dict[tuple[str, ...], list[list[int]] | str] = {}
        self._start, suffix = ([], []) if self._chat else self._frame()
        own = self.tokenizer.eos_token_id
        given = tuple(eos_ids) if eos_ids is not None else () if own is None else (own,)
        self._ending: list[int] = suffix if self.encoder else self._closing(given)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*self._ending[-1:], *given]))
        self.eos_id: int | None = self.eos_ids[0] if self.eos_ids else None

    def prompt(self, messages: Dialogue, max_length: int) -> list[int]:
        """Token ids of a prompt, up to the point where the response begins.

        Of a prompt that is too long the oldest turns go first; a system message stays where it fits. Of a
        last turn that is itself too long, the oldest tokens go.
        """
        ids = self._fit(*self._read(messages), max_length)
        if ids is None:
            markers = sum(map(len, self._fixed(("user",))))
            raise InputError(
                f"rollout.prompt_length={max_length} is too small: the markers around one turn take "
                f"{markers} tokens; use a larger one"
            )
        return ids

    def response(self, text: str) -> list[int]:
        """Token ids of a response and of what ends it: EOS, or an encoder's suffix."""
        return self._content(text, "assistant") + self._ending

    def dialogue(self, messages: Dialogue, response: str, max_length: int) -> list[int] | None:
        """prompt + response of at most max_length tokens.

        The response is never cut: None where it does not fit even after an empty turn. Each text is
        rendered by itself, so that its score does not depend on the pair that it stands in.
        """
        end = self.response(response)
        start = self._fit(*self._read(messages), max_length - len(end))
        return None if start is None else start + end

    def clipped_dialogue(self, messages: Dialogue, response: str, max_length: int) -> list[int]:
        """As `dialogue`, for what a policy wrote and must be scored.

        A response that does not fit loses its end, and the turn before it is then empty.
        """
        whole = self.dialogue(messages, response, max_length)
        if whole is not None:
            return whole
        read = self._read(messages)
        fitting = (self._fit(*read, room) for room in range(max_length - len(self._ending) + 1))
        start = next((ids for ids in fitting if ids is not None), None)
        if start is None:
            raise InputError(
                f"reward.max_length={max_length} has no room for the markers around a turn; use a larger one"
            )
        room = max_length - len(start) - len(self._ending)
        return start + self._content(response, "assistant")[:room] + self._ending

    def text(self, ids: Iterable[int]) -> str:
        """The text of response tokens, without special tokens and without white space around it."""
        kept = [id for id in map(int, ids) if id not in self._special and id not in self.eos_ids]
        return self.tokenizer.decode(kept, clean_up_tokenization_spaces=False).strip()

    def _read(self, messages: Dialogue) -> tuple[list[str], list[list[int]]]:
        """Roles that the template takes, and the tokens of each content."""
        if asks_nothing(messages):
            raise InputError(
                f"a prompt needs words of the user, found messages of {[m.role for m in messages]}"
            )
        messages = self._acceptable(messages)
        contents = [self._content(message.content, message.role) for message in messages]
        return [message.role for message in messages], contents

    def _fit(self, roles: Sequence[str], contents: Sequence[list[int]], room: int) -> list[int] | None:
        """The longest run of newest turns that fits.

        It is found by bisection: a dialogue of thousands of turns is rendered a dozen times, not thousands.
        """
        everything = range(len(roles))
        system = [0] if roles[0] == "system" else []
        questions = [index for index in everything if roles[index] == "user"]
        newest = list(everything[questions[-1] :])

        def fitting(choice: Sequence[int]) -> list[int] | None:
            if sum(len(contents[index]) for index in choice) > room:
                return None
            ids = self._joined(roles, contents, choice)
            return ids if len(ids) <= room else None

        def from_question(number: int) -> list[int]:
            return system + list(everything[questions[number] :])

        ids = fitting(everything)
        if ids is not None:
            return ids
        first = bisect.bisect_left(
            range(len(questions)), True, key=lambda number: fitting(from_question(number)) is not None
        )
        choices = [from_question(first)] if first < len(questions) else []
        for choice in [*choices, newest]:
            ids = fitting(choice)
            if ids is not None:
                return ids
        # a template may put a longer system message for one left out
        for choice in [newest, system + newest]:
            excess = max(0, len(self._joined(roles, contents, choice)) - room)
            cut = list(contents)
            for index in newest:
                cut[index] = contents[index][excess:]
                excess -= len(contents[index]) - len(cut[index])
            if excess == 0:
                return self._joined(roles, cut, choice)
        return None

    def _joined(
        self, roles: Sequence[str], contents: Sequence[list[int]], choice: Sequence[int]
    ) -> list[int]:
        fixed = self._fixed(tuple(roles[index] for index in choice))
        ids = list(fixed[0])
        for index, after in zip(choice, fixed[1:], strict=True):
            ids += contents[index] + after
        return ids

    def _content(self, text: str, role: str) -> list[int]:
        """Tokens of a message's own text: special tokens in it are text."""
        surrogate = lone_surrogate(text)
        if surrogate:
            raise InputError(f"expected Unicode text, found the lone surrogate {surrogate} in {text[:40]!a}")
        if not text:
            return []
        if not self._chat and role != "system":
            text = " " + text
        ids = self._encode(text, special=False)
        if self._control.isdisjoint(ids):
            return ids
        # A vocabulary that also holds its special tokens as ordinary pieces: spell them, letter by letter.
        spelled = []
        for part in re.split(f"({self._control_text})", text):
            for piece in part if re.fullmatch(self._control_text, part) else filter(None, [part]):
                spelled += self._encode(piece, special=False)
        return [id for id in spelled if id not in self._control]

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids without frame. With special=False, a special token's name is tokenized as any text."""
        return self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=not special, verbose=False
        )

    def _acceptable(self, messages: Dialogue) -> Dialogue:
        """The messages; neighbours of one role become one where the template wants roles to alternate."""
        if not isinstance(self._pieces(tuple(message.role for message in messages)), str):
            return messages
        merged: list[Message] = []
        for message in messages:
            if merged and merged[-1].role == message.role:
                merged[-1] = Message(message.role, f"{merged[-1].content}\n\n{message.content}".strip())
            else:
                merged.append(message)
        return tuple(merged)

    def _fixed(self, roles: tuple[str, ...]) -> list[list[int]]:
        """Tokens before, between and after the contents of messages with these roles."""
        fixed = self._pieces(roles)
        if isinstance(fixed, str):
            raise InputError(
                f"the chat template of {self._name()} cannot render the roles {list(roles)}: {fixed}"
            )
        return fixed

    def _pieces(self, roles: tuple[str, ...]) -> list[list[int]] | str:
        """As _fixed, or the reason why the template refuses these roles."""
        if roles not in self._fixed_of_roles:
            if len(self._fixed_of_roles) >= MOST_SHAPES:
                self._fixed_of_roles.clear()
            if self._chat:
                texts = template_pieces(self.tokenizer, roles, generation=True)
            else:
                texts = [*(_MARKERS[role] for role in roles), ASSISTANT]
                texts[0] = "" if roles[0] == "system" else texts[0]
            if isinstance(texts, str):
                self._fixed_of_roles[roles] = texts
            else:
                fixed = [self._encode(text, special=self._chat) if text else [] for text in texts]
                self._fixed_of_roles[roles] = [self._start + fixed[0], *fixed[1:]]
        return self._fixed_of_roles[roles]

    def _closing(self, eos_ids: tuple[int, ...]) -> list[int]:
        """What ends a causal model's response: what the template writes up to a special token, else EOS."""
        if self._chat:
            pieces = template_pieces(self.tokenizer, ("user", "assistant"), generation=False)
            if isinstance(pieces, str):
                raise InputError(
                    f"the chat template of {self._name()} cannot render a question and its answer: {pieces}"
                )
            tail = self._encode(pieces[-1], special=True) if pieces[-1] else []
            for index, id in enumerate(tail):
                if id in self._control or id in eos_ids:
                    return tail[: index + 1]
        if not eos_ids:
            raise InputError(
                f"{self._name()} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
            )
        return [eos_ids[0]]

    def _frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer itself puts before and after a text."""
        inner = self._encode("a", special=True)
        whole = self.tokenizer.encode("a", add_special_tokens=True)
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return whole[:start], whole[start + len(inner) :]
        raise InputError(
            f"{self._name()} writes a text differently with and without special tokens; it is not supported"
        )

    def _name(self) -> str:
        path = self.tokenizer.name_or_path
        return f"the tokenizer {path}" if path else "the tokenizer"


def _special_ids(tokenizer: Any) -> set[int]:
    """Ids of all special tokens, those without a role of their own included."""
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)

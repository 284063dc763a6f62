"""Dialogues as messages, and how text and rows become them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from rlhf_jax.data.sources import found
from rlhf_jax.errors import InputError

ROLES = ("system", "user", "assistant")
HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"
_MARKER = re.compile(r"\n\n(Human|Assistant):")
_SPEAKER = {"Human": "user", "Assistant": "assistant"}


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn; role is system, user or assistant. Contents that were read have no white space around."""

    role: str
    content: str


Dialogue = tuple[Message, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Preference:
    """Two responses to one prompt, the better one first."""

    prompt: Dialogue
    chosen: str
    rejected: str


def parse_turns(text: str) -> Dialogue:
    """Messages of HH text, `\\n\\nHuman: ...\\n\\nAssistant: ...`.

    Text before the first marker is a system message.
    """
    text = "\n\n" + text if text.startswith(("Human:", "Assistant:")) else text
    before, *rest = _MARKER.split(text)
    turns = [
        Message(_SPEAKER[who], content.strip()) for who, content in zip(rest[::2], rest[1::2], strict=True)
    ]
    return (*([Message("system", before.strip())] if before.strip() else []), *turns)


def prompt_of_text(text: str) -> Dialogue:
    """A prompt given as text: HH text where it holds a `Human:` marker, else one user turn."""
    stripped = text.strip()
    if stripped.startswith("Human:") or HUMAN in text:
        turns = parse_turns(stripped)
        asks = turns[-1] == Message("assistant", "")  # the closing `Assistant:` asks for the response
        return turns[:-1] if asks else turns
    return (Message("user", stripped),)


def messages_of(value: Any, where: str, key: str) -> Dialogue:
    """A list of {"role", "content"} as messages."""
    if not isinstance(value, list):
        raise InputError(f'{where}: expected "{key}" as a list of messages, found {found(value)}')
    messages = []
    for index, item in enumerate(value):
        place = f'{where}: expected "{key}"[{index}]'
        if not isinstance(item, dict) or not {"role", "content"} <= item.keys():
            raise InputError(f'{place} as an object with "role" and "content", found {found(item)}')
        if item["role"] not in ROLES:
            raise InputError(f"{place} with a role of {', '.join(ROLES)}, found {found(item['role'])}")
        messages.append(Message(item["role"], text_of(item["content"], where, f'{key}"[{index}]."content')))
    return tuple(messages)


def text_of(value: Any, where: str, key: str) -> str:
    """A text field without the white space around it."""
    return checked_text(value, where, key).strip()


def checked_text(value: Any, where: str, key: str) -> str:
    """A text field as it stands; text that is no Unicode (a lone surrogate) is refused."""
    if not isinstance(value, str):
        raise InputError(f'{where}: expected "{key}" as text, found {found(value)}')
    surrogate = lone_surrogate(value)
    if surrogate:
        raise InputError(f'{where}: expected "{key}" as Unicode text, found the lone surrogate {surrogate}')
    return value


def lone_surrogate(text: str) -> str | None:
    """The first half of a surrogate pair that stands alone, such as "U+D800"; none in proper Unicode text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X}"
    return None


def asks_nothing(prompt: Dialogue) -> bool:
    """True for a prompt without a word from the user."""
    return not any(message.role == "user" and message.content for message in prompt)


def opening_turn(prompt: Dialogue) -> Dialogue:
    """The prompt up to and including the first message of the user."""
    for index, message in enumerate(prompt):
        if message.role == "user":
            return prompt[: index + 1]
    return prompt

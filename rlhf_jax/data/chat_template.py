"""What a tokenizer's chat template writes around the messages, whoever wrote the template.

Templates come with models and are programs. They run in the sandbox of `transformers` (jinja2's
ImmutableSandboxedEnvironment), where they reach no Python internals; here they also get no more steps,
memory and output than any real template needs.
"""

from __future__ import annotations

import contextlib
import functools
import re
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_jax.data.messages import lone_surrogate
from rlhf_jax.errors import first_line

STEPS, STEPS_A_MESSAGE = 50_000, 5_000  # lines of Python, those of jinja2 included
CHARACTERS, CHARACTERS_A_MESSAGE = 1_000_000, 10_000
MEMORY_MIB = 512  # by which the process may grow meanwhile
DIGITS = 6  # of a number in an expression

_SENTINEL = "content7f3a9c{}z"


def template_pieces(tokenizer: Any, roles: Sequence[str], *, generation: bool) -> list[str] | str:
    """Texts before, between and after the contents of messages with these roles; or why there are none.

    Args:
      tokenizer: of `transformers`, with a chat template.
      generation: ends where the assistant's answer begins.
    """
    contents = [_SENTINEL.format(index) for index in range(len(roles))]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    try:
        template = tokenizer.get_chat_template()
        _check(template)
        with _within(STEPS + STEPS_A_MESSAGE * len(roles)):
            rendered = tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=generation
            )
    except Exception as error:  # a program of someone's may raise what it likes
        return first_line(error)
    if len(rendered) > CHARACTERS + CHARACTERS_A_MESSAGE * len(roles):
        return f"it writes {len(rendered)} characters around {len(roles)} messages"
    surrogate = lone_surrogate(rendered)
    if surrogate:
        return f"it writes the lone surrogate {surrogate}"
    pieces = re.split(_SENTINEL.format(r"(\d+)"), rendered)
    if pieces[1::2] != [str(index) for index in range(len(roles))]:
        return "it drops or changes a message"
    return pieces[::2]


class _Refused(Exception):
    """A template that does what no real one does."""


@functools.lru_cache(maxsize=64)
def _check(template: str) -> None:
    """Refuse expressions that take one step and yet hours or all memory; jinja2 would do some to compile."""
    import jinja2.ext
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012, jinja2 has it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    extensions = [Generation, jinja2.ext.loopcontrols]
    tree = ImmutableSandboxedEnvironment(extensions=extensions).parse(template)
    if tree.find(nodes.Pow):
        raise _Refused("it uses **")
    for product in tree.find_all(nodes.Mul):
        if not any(isinstance(side, nodes.Const) for side in (product.left, product.right)):
            raise _Refused("it multiplies two values that are not constant")
        if any(isinstance(side, nodes.Mul) for side in (product.left, product.right)):
            raise _Refused("it multiplies more than twice")
    for constant in tree.find_all(nodes.Const):
        numbers = re.findall(r"\d+", str(constant.value))  # a text may be a format, with a width
        if any(len(number) > DIGITS for number in numbers):
            raise _Refused(f"it holds a number of more than {DIGITS} digits")


@contextlib.contextmanager
def _within(steps: int) -> Iterator[None]:
    """Raise where the block takes more steps in this thread, or the process grows too much meanwhile.

    Steps are counted and not seconds, so that a slow machine refuses nothing.
    """
    left, most = steps, _peak_kib() + 1024 * MEMORY_MIB

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Refused(f"it takes more than {steps} steps")
        if left % 64 == 0 and _peak_kib() > most:
            raise _Refused(f"it takes more than {MEMORY_MIB} MiB")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _peak_kib() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if sys.platform == "darwin" else peak

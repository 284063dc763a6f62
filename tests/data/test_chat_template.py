"""Chat templates are programs of strangers: they reach nothing, and they end."""

import sys

import pytest
from transformers.utils import chat_template_utils

from rlhf_jax.data import chat_template
from rlhf_jax.data.chat_template import template_pieces
from rlhf_jax.data.tokenizer import CHAT_TEMPLATE, train_tokenizer

ROLES = ("system", "user", "assistant", "user")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["how do i bake bread"], 300)


@pytest.fixture
def refused(tokenizer):
    """Why a template that does this before it renders is refused."""

    def refused(attack):
        tokenizer.chat_template = attack + CHAT_TEMPLATE
        reason = template_pieces(tokenizer, ROLES, generation=True)
        assert isinstance(reason, str)
        return reason

    return refused


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum.__globals__['os'].popen('true').read() }}",
        "{% set namespace.x = 1 %}",
    ],
)
def test_a_template_reaches_nothing_outside_its_sandbox(attack, refused):
    assert "\n" not in refused(attack)


@pytest.mark.parametrize("attack", ["{{ ''|attr('__class__') }}", "{{ '{0.__class__}'.format(1) }}"])
def test_what_the_sandbox_hides_is_empty(attack, tokenizer):
    pieces = []
    for begin in ("", attack):
        tokenizer.chat_template = begin + CHAT_TEMPLATE
        pieces.append(template_pieces(tokenizer, ROLES, generation=True))
    assert pieces[0] == pieces[1]


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='a' * 1000) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
)
SQUARING = "{% set ns = namespace(x=999) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (LOOP, "it takes more than 70000 steps"),
        ("{% for i in range(9999) %}{{ range(9999) | list | length }}{% endfor %}", "steps"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (DOUBLING, "it takes more than 64 MiB"),
        (DOUBLING.replace("+", "~"), "it takes more than 64 MiB"),
        (SQUARING, "it multiplies two values that are not constant"),
        ("{{ 9 ** 9 ** 9 }}", r"it uses \*\*"),
        ("{{ 'a' * 9999999999 }}", "a number of more than 6 digits"),
        ("{{ 'a' * 999999 * 999999 }}", "it multiplies more than twice"),
        ("{{ '%9999999999d' | format(1) }}", "a number of more than 6 digits"),
        ("{% for i in range(9999999999) %}{% endfor %}", "a number of more than 6 digits"),
        ("{{ 'a' * 999999 }}{{ 'a' * 999999 }}", r"it writes \d+ characters around 4 messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ '\\ud800' }}", r"it writes the lone surrogate U\+D800"),
        ("{{ [][3].x }}", "has no element"),
        ("{{ raise_exception('line one\nline two') }}", "^line one$"),
    ],
)
def test_a_template_that_does_not_end_is_ended(attack, reason, refused, monkeypatch):
    """Fault: a template of one line held the program for ever, or took all memory."""
    import re

    monkeypatch.setattr(chat_template, "MEMORY_MIB", 64)
    assert re.search(reason, refused(attack))
    assert sys.gettrace() is None


def test_long_dialogues_have_steps_enough(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE
    roles = ("user", "assistant") * 2500
    pieces = template_pieces(tokenizer, roles, generation=True)
    assert len(pieces) == 5001
    assert pieces[2] == "<|im_end|>\n<|im_start|>user\n"


def test_templates_with_parts_for_training_are_read(tokenizer):
    """The tag of `transformers` that marks what the assistant says, and loops that break."""
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% generation %}{{ m.role + '  ' * 2 + m.content }}{% endgeneration %}\n{% endfor %}"
    )
    assert template_pieces(tokenizer, ROLES, generation=True)[0] == "system    "


def test_a_debugger_goes_on_tracing(tokenizer):
    traced = []

    def trace(frame, event, argument):
        traced.append(event)

    tokenizer.chat_template = CHAT_TEMPLATE
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        template_pieces(tokenizer, ROLES, generation=True)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert traced


def test_templates_run_in_the_immutable_sandbox():
    """It is transformers that compiles them."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    compiled = chat_template_utils._compile_jinja_template(CHAT_TEMPLATE)
    assert isinstance(compiled.environment, ImmutableSandboxedEnvironment)

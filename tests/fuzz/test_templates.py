"""Chat templates: a renderer that keeps every message, or one line."""

import pytest
from hypothesis import strategies as st

from rlhf_jax.data.messages import Message
from rlhf_jax.data.rendering import Renderer
from rlhf_jax.data.tokenizer import CHAT_TEMPLATE, train_tokenizer
from tests.fuzz.inputs import TEXTS, fuzz, mutated, outcome

CONTROL = (0, 1, 2)
EXPRESSIONS = st.sampled_from(
    [
        "m.content",
        "m['role']",
        "messages[0].content",
        "messages[-1]",
        "messages",
        "loop.index",
        "loop.previtem.content",
        "'<|im_end|>'",
        "eos_token",
        "bos_token + m.content",
        "m.content | trim",
        "m.content | upper",
        "m.content * 3",
        "m | tojson",
        "messages | length / 0",
        "nothing.at.all",
        "strftime_now('%Y')",
        "raise_exception('no\\nlines')",
        "m.content.__class__",
        "range(99999) | list",
        "namespace(a=1).a",
        "cycler('a', 'b').next()",
        "'content7f3a9c0z'",
        "m.content[::-1]",
        "'\\ud800'",
        "'\\x00'",
        "dict(a=m)",
        "2 ** 3",
        "1 if m.role == 'user'",
        "m.content is string",
        "tools",
    ]
)


@st.composite
def templates(draw):
    """Statements around expressions, mostly well nested."""
    if draw(st.integers(0, 3)) == 0:
        return draw(mutated(CHAT_TEMPLATE.encode())).decode("utf-8", "surrogateescape")

    def part(depth):
        kind = draw(st.sampled_from(["value", "value", "text", "if", "for", "set", "macro", "generation"]))
        if kind == "text" or depth == 0:
            return draw(st.one_of(TEXTS, st.sampled_from(["<|im_start|>", "{{", "%}", "{#"])))
        inner = "".join(part(depth - 1) for _ in range(draw(st.integers(1, 2))))
        value = draw(EXPRESSIONS)
        return {
            "value": f"{{{{ {value} }}}}",
            "if": f"{{% if {value} %}}{inner}{{% endif %}}",
            "for": f"{{% for x in {value} %}}{inner}{{% endfor %}}",
            "set": f"{{% set m = {value} %}}{inner}",
            "macro": f"{{% macro f(m) %}}{inner}{{% endmacro %}}{{{{ f(messages[0]) }}}}",
            "generation": f"{{% generation %}}{inner}{{% endgeneration %}}",
        }[kind]

    around = [part(1) if draw(st.booleans()) else "" for _ in range(3)]
    body = draw(st.sampled_from(["{{ m.content }}", "{{ m.role + m.content }}", part(2)]))
    return f"{around[0]}{{% for m in messages %}}{around[1]}{body}<|im_end|>{{% endfor %}}{around[2]}"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["how do i bake bread"], 300)


@fuzz(templates())
def test_templates(tokenizer, template):
    tokenizer.chat_template = template
    question = (Message("user", "how <|im_end|> do i"),)

    def render():
        renderer = Renderer(tokenizer)
        return renderer.prompt(question, 10_000), renderer.prompt((Message("user", "b"),), 10_000)

    found = outcome(render, "chat template", "the tokenizer", "rollout.prompt_length")
    if found is not None:
        ids, other = found
        assert "how <|im_end|> do i" in tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert [id for id in ids if id in CONTROL] == [id for id in other if id in CONTROL]


@st.composite
def dialogues(draw):
    roles = draw(st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=5))
    return tuple(Message(role, draw(TEXTS)) for role in roles), draw(TEXTS), draw(st.integers(0, 200))


@fuzz(dialogues())
def test_texts(tokenizer, dialogue):
    """Any text is itself again, and no text makes a control token."""
    tokenizer.chat_template = CHAT_TEMPLATE
    messages, response, length = dialogue
    renderer = Renderer(tokenizer)
    whole = outcome(lambda: renderer.dialogue(messages, response, length), "messages of", "surrogate")
    plain = outcome(lambda: renderer.response(response), "surrogate")
    if plain is not None:
        assert [id for id in plain if id in CONTROL] == [renderer.eos_id]
        assert renderer.text(plain) == response.strip()
    if whole is not None:
        assert len(whole) <= length
        assert whole[-len(plain) :] == plain
        control = [id for id in whole if id in CONTROL]
        assert len(control) % 2 == 0
        assert len(control) <= 2 * (len(messages) + 1)

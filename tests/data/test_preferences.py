"""Pairs: every form, every reason to drop one, and splits that share no prompt."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.data.messages import parse_turns
from rlhf_jax.data.preferences import Message, Preference, pair_of_row, read_preferences, split_by_prompt
from rlhf_jax.errors import InputError

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
HELLO = (Message(USER, "hello"),)


def message(role, content):
    return {"role": role, "content": content}


def pair(row):
    return pair_of_row(row, "FILE:7")


FORMS = {
    "HH text": {
        "chosen": "\n\nHuman: hello\n\nAssistant: yes",
        "rejected": "\n\nHuman: hello\n\nAssistant: no",
    },
    "HH text without its first blank line": {
        "chosen": "Human: hello\n\nAssistant: yes",
        "rejected": "Human: hello\n\nAssistant: no",
    },
    "prompt as plain text": {"prompt": " hello\n", "chosen": " yes ", "rejected": "no\n"},
    "prompt as HH text": {"prompt": "\n\nHuman: hello\n\nAssistant:", "chosen": " yes", "rejected": " no"},
    "prompt as HH text, left open": {"prompt": "Human: hello", "chosen": "yes", "rejected": "no"},
    "prompt as messages": {"prompt": [message(USER, "hello")], "chosen": "yes", "rejected": "no"},
    "responses as messages": {
        "prompt": [message(USER, "hello")],
        "chosen": [message(ASSISTANT, "yes")],
        "rejected": [message(ASSISTANT, "no")],
    },
    "sides repeat the prompt": {
        "prompt": "hello",
        "chosen": [message(USER, "hello"), message(ASSISTANT, "yes")],
        "rejected": [message(USER, "hello"), message(ASSISTANT, "no")],
    },
    "whole lists of messages": {
        "chosen": [message(USER, "hello"), message(ASSISTANT, "yes")],
        "rejected": [message(USER, "hello"), message(ASSISTANT, "no")],
        "another key": 5,
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pair(form):
    assert pair(FORMS[form]) == Preference(HELLO, "yes", "no")


def test_hh_dialogue_keeps_its_turns_and_the_last_assistant_marker_ends_the_prompt():
    start = "\n\nHuman: a\nb\n\nAssistant: c\n\nHuman: d Assistant: e\n\nAssistant:"
    result = pair({"chosen": start + " f\n\ng", "rejected": start + "h"})
    turns = (Message(USER, "a\nb"), Message(ASSISTANT, "c"), Message(USER, "d Assistant: e"))
    assert result == Preference(turns, "f\n\ng", "h")


def test_text_before_the_first_marker_is_a_system_message():
    assert parse_turns("be kind\n\nHuman: hi") == (Message(SYSTEM, "be kind"), Message(USER, "hi"))


HH = "\n\nHuman: hello\n\nAssistant:"
DROPPED = {
    "no marker": ({"chosen": "yes", "rejected": "no"}, "no prompt"),
    "no word of the user": ({"chosen": "\n\nHuman:\n\nAssistant: yes", "rejected": HH + " no"}, "no prompt"),
    "only an answer": (
        {"chosen": [message(ASSISTANT, "y")], "rejected": [message(ASSISTANT, "n")]},
        "no prompt",
    ),
    "empty prompt": ({"prompt": " ", "chosen": "yes", "rejected": "no"}, "no prompt"),
    "empty prompt list": ({"prompt": [], "chosen": "yes", "rejected": "no"}, "no prompt"),
    "other question": (
        {"chosen": HH + " yes", "rejected": HH.replace("he", "fe") + " no"},
        "different prompts",
    ),
    "other length": (
        {"chosen": HH + " yes", "rejected": HH + " yes\n\nHuman: more\n\nAssistant: no"},
        "different prompts",
    ),
    "sides repeat another prompt": (
        {
            "prompt": "hello",
            "chosen": [message(USER, "bye"), message(ASSISTANT, "yes")],
            "rejected": [message(USER, "bye"), message(ASSISTANT, "no")],
        },
        "different prompts",
    ),
    "empty chosen": ({"chosen": HH, "rejected": HH + " no"}, "empty response"),
    "blank rejected": ({"prompt": "hello", "chosen": "yes", "rejected": " \n"}, "empty response"),
    "equal sides": ({"chosen": HH + " yes", "rejected": HH + " yes "}, "equal sides"),
}


@pytest.mark.parametrize("case", DROPPED)
def test_unusable_pair_is_dropped_with_its_reason(case):
    row, reason = DROPPED[case]
    assert pair(row) == reason


WRONG = {
    "no rejected": (
        {"chosen": "a"},
        r'FILE:7: expected the keys "chosen" and "rejected", found \[\'chosen\'\]',
    ),
    "null": (
        {"prompt": "a", "chosen": None, "rejected": "b"},
        r'FILE:7: expected "chosen" as .*, found null',
    ),
    "number": (
        {"prompt": 5, "chosen": "a", "rejected": "b"},
        r'FILE:7: expected "prompt" as text or .* value 5',
    ),
    "mixed": (
        {"chosen": "a", "rejected": [message(ASSISTANT, "b")]},
        r"FILE:7: .* in one form, found the text 'a'",
    ),
    "role": (
        {"prompt": [message("human", "a")], "chosen": "a", "rejected": "b"},
        r'FILE:7: expected "prompt"\[0\] with a role of system, user, assistant, found the text \'human\'',
    ),
    "unhashable role": (
        {"prompt": [message(["user"], "a")], "chosen": "a", "rejected": "b"},
        r"FILE:7: .* with a role of .*, found a list of 1",
    ),
    "no content": (
        {"prompt": [{"role": USER}], "chosen": "a", "rejected": "b"},
        r'FILE:7: expected "prompt"\[0\] as an object with "role" and "content"',
    ),
    "content in parts": (
        {"prompt": [message(USER, [{"type": "text"}])], "chosen": "a", "rejected": "b"},
        r'FILE:7: expected "prompt"\[0\]\."content" as text, found a list of 1',
    ),
    "message is text": ({"prompt": ["a"], "chosen": "a", "rejected": "b"}, r"FILE:7: .* as an object with"),
    "ends with the user": (
        {"chosen": [message(USER, "a")], "rejected": [message(USER, "b")]},
        r'FILE:7: expected "chosen" to end with a message of assistant, found a last message of user',
    ),
    "empty list": (
        {"chosen": [], "rejected": []},
        r'FILE:7: expected "chosen" to end .* found an empty list',
    ),
    "lone surrogate": (
        {"prompt": "a", "chosen": "\ud800 b", "rejected": "b"},
        r'FILE:7: expected "chosen" as Unicode text, found the lone surrogate U\+D800',
    ),
    "lone surrogate in HH text": (
        {"chosen": HH + "\udfff", "rejected": HH + "b"},
        r"FILE:7: .*the lone surrogate U\+DFFF",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_row_of_another_form_stops_with_its_place(case):
    row, text = WRONG[case]
    with pytest.raises(InputError, match=text) as error:
        pair(row)
    assert "\n" not in str(error.value)


def test_source_without_a_usable_pair_counts_the_reasons(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [DROPPED[case][0] for case in ("equal sides", "equal sides", "empty chosen")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match="no usable pair is left; dropped 1 empty response, 2 equal sides"):
        read_preferences(str(path))


@pytest.mark.parametrize(
    ("file", "kept", "dropped"),
    [
        ("train.jsonl.gz", 1737, {"different prompts": 5, "empty response": 2}),
        ("validation.jsonl.gz", 311, {"empty response": 2}),
    ],
)
def test_hh_files(hh_pairs, file, kept, dropped):
    preferences, reasons = read_preferences(str(hh_pairs / file))
    assert (len(preferences), dict(reasons)) == (kept, dropped)
    assert all(pair.prompt[0].role == USER and pair.chosen == pair.chosen.strip() for pair in preferences)
    assert not any("\n\nAssistant:" in text for pair in preferences for text in (pair.chosen, pair.rejected))


def test_limit_reads_that_many_rows(hh_pairs):
    preferences, reasons = read_preferences(str(hh_pairs / "train.jsonl.gz"), limit=100)
    assert len(preferences) + reasons.total() == 100


def some_pairs(prompts, each=3):
    return [
        Preference((Message(USER, f"question {n}"),), f"good {k}", f"bad {k}")
        for n in range(prompts)
        for k in range(each)
    ]


def test_split_leaves_no_prompt_on_both_sides():
    """Fault: rows were split at random, so pairs of one prompt stood in train and validation."""
    pairs = some_pairs(20)
    train, held_out = split_by_prompt(pairs, fraction=0.2, seed=0)
    assert len(held_out) == 4 * 3
    assert sorted(map(str, train + held_out)) == sorted(map(str, pairs))
    assert not {pair.prompt for pair in train} & {pair.prompt for pair in held_out}


def test_split_depends_on_the_seed_and_not_on_the_order_of_rows():
    pairs = some_pairs(30)

    def held(rows, seed):
        return {pair.prompt for pair in split_by_prompt(rows, fraction=0.3, seed=seed)[1]}

    assert held(pairs, 1) == held(pairs[::-1], 1)
    assert held(pairs, 1) != held(pairs, 2)


@pytest.mark.parametrize(("fraction", "prompts"), [(0.1, 3), (0.0, 10), (1.0, 10), (0.5, 1)])
def test_split_with_an_empty_side_names_the_numbers(fraction, prompts):
    with pytest.raises(InputError, match=rf"data.validation_fraction={fraction} holds out \d+ of {prompts} "):
        split_by_prompt(some_pairs(prompts), fraction=fraction, seed=0)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=20)
    | st.sampled_from(["user", "assistant", HH]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["prompt", "chosen", "rejected", "reward_model"]), JSON))
def test_any_json_object_is_a_pair_a_reason_or_an_error_with_its_place(row):
    try:
        result = str(pair(row))
    except InputError as error:
        result = str(error)
        assert result.startswith("FILE:7: expected ")
    assert "\n" not in result

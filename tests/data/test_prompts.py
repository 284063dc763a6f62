"""Prompts: their forms, and keeping them apart from held-out ones."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_jax.data.messages import Message
from rlhf_jax.data.preferences import Preference, read_preferences
from rlhf_jax.data.prompts import hold_out, prompts_of, read_prompts
from rlhf_jax.errors import InputError

HELLO = (Message("user", "hello"),)


def ask(*texts, system=None):
    """A prompt in which user and assistant take turns."""
    turns = [Message("user" if n % 2 == 0 else "assistant", text) for n, text in enumerate(texts)]
    return (*([Message("system", system)] if system else []), *turns)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_text_messages_and_pairs_all_give_their_prompt(tmp_path):
    rows = [
        {"prompt": "hello"},
        {"prompt": "\n\nHuman: hello\n\nAssistant:"},
        {"prompt": [{"role": "user", "content": "hello"}]},
        {"chosen": "\n\nHuman: hello\n\nAssistant: a", "rejected": "\n\nHuman: hello\n\nAssistant: b"},
        {"prompt": "hello", "chosen": "not looked at", "rejected": None},
        {"prompt": " "},
        {"chosen": "\n\nHuman: a\n\nAssistant: a", "rejected": "\n\nHuman: b\n\nAssistant: b"},
    ]
    prompts, dropped = read_prompts(write(tmp_path / "prompts.jsonl", rows))
    assert prompts == [HELLO] * 5
    assert dropped == {"no prompt": 1, "different prompts": 1}


def parquet(path, style):
    rows = [
        {
            "prompt": [{"role": "user", "content": "hello"}],
            "reward_model": {"style": style, "ground_truth": ""},
        }
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_parquet_rows_that_a_model_grades(tmp_path):
    assert read_prompts(parquet(tmp_path / "prompts.parquet", "model"))[0] == [HELLO]


def test_parquet_rows_that_a_rule_grades_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"row 1: expected .* the style \"model\", found the text 'rule'"):
        read_prompts(parquet(tmp_path / "prompts.parquet", "rule"))


def test_row_without_prompt_stops_with_its_place(tmp_path):
    source = write(tmp_path / "prompts.jsonl", [{"prompt": "a"}, {"text": "b"}])
    with pytest.raises(InputError, match=r'prompts.jsonl:2: expected the key "prompt".*found \[\'text\'\]'):
        read_prompts(source)


def test_no_usable_prompt_counts_the_reasons(tmp_path):
    with pytest.raises(InputError, match="no usable prompt is left; dropped 2 no prompt"):
        read_prompts(write(tmp_path / "prompts.jsonl", [{"prompt": ""}, {"prompt": []}]))


def test_prompts_of_pairs_are_distinct_and_in_order():
    long, other = ask("a", "b", "c", system="s"), ask("z")
    pairs = [Preference(prompt, "x", "y") for prompt in (long, other, long, ask("a", "b", "d", system="s"))]
    assert prompts_of(pairs) == [long, other, pairs[3].prompt]
    assert prompts_of(pairs, first_turn=True) == [ask("a", system="s"), other]


def test_held_out_prompts_are_kept_apart_by_their_first_turn_too():
    """Fault: the same question with another continuation leaked from train into validation."""
    train = [ask("a", "b", "c"), ask("a"), ask("d"), ask("e", system="s"), ask("f", "a", "a")]
    validation = [ask("a", "x", "y"), ask("e")]
    assert hold_out(train, validation) == [ask("d"), ask("f", "a", "a")]
    assert hold_out(train, []) == train


def test_hh_prompts_held_out(hh_pairs):
    train, validation = (
        prompts_of(read_preferences(str(hh_pairs / f"{name}.jsonl.gz"))[0])
        for name in ("train", "validation")
    )
    kept = hold_out(train, validation)
    assert 0 < len(kept) <= len(train)
    assert not {prompt[0] for prompt in kept} & {prompt[0] for prompt in validation}


def test_synthetic_prompts():
    prompts, dropped = read_prompts("synthetic", limit=50)
    assert len(set(prompts)) == len(prompts) > 30
    assert not dropped

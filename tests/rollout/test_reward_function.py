"""Python functions as rewards: what they may give, and what is done where they do not."""

import logging
import time

import numpy as np
import pytest

from rlhf_jax.data.messages import Message
from rlhf_jax.errors import InputError
from rlhf_jax.rollout.reward_function import REASON_BYTES, RewardFunction, _packed, _unpacked
from rlhf_jax.rollout.scored import RewardFault, settled
from tests.two_processes import run_code

PROMPTS = [(Message("user", text),) for text in ("how do i bake", "be kind", "bread?", "salt", "do i?")]
RESPONSES = ["with flour", "good bread and water", "kind", "water, flour and salt with salt", "i do"]
IDS = [40, 41, 42, 43, 44]  # the prompts' numbers among all


def scores_of(function, fallback=None, **options):
    scored = RewardFunction(function, **options)(None, PROMPTS, RESPONSES)
    return settled(scored.scores_B, scored.reasons, IDS, fallback=fallback)


def lengths(prompts, responses):
    assert prompts[0][0]["role"] == "user"
    return [len(response) / 2 for response in responses]


LENGTHS = [len(response) / 2 for response in RESPONSES]


def two_for_each(prompts, responses):
    return [[1.0, 2.0] for _ in responses]


def one_is_not_a_number(prompts, responses):
    return [1.0, float("nan"), 0.0, 0.0, 0.0]


def one_is_too_large(prompts, responses):
    return [1.0, 0.0, 1e300, 0.0, 0.0]


def words(prompts, responses):
    return list(responses)


def complex_numbers(prompts, responses):
    return [1j] * len(responses)


def nothing(prompts, responses):
    return [None] * len(responses)


def nothing_at_all(prompts, responses):
    return None


def too_few(prompts, responses):
    return [0.0] * (len(responses) - 1)


def numbers_as_words(prompts, responses):
    return ["1.0"] * len(responses)


def ragged(prompts, responses):
    return [[1.0]] + [[1.0, 2.0] for _ in responses[1:]]


def fails(prompts, responses):
    return {}["score"]


def fails_for_salt(prompts, responses):
    if any("salt" in response for response in responses):
        raise ValueError("too salty\nand a second line")
    return lengths(prompts, responses)


def leaves(prompts, responses):
    raise SystemExit(0)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def fails_without_words(prompts, responses):
    raise Unprintable


NOT_A_FUNCTION = 3


def test_a_python_function_gives_fractional_scores():
    """Rewards that became integers lost their halves."""
    scores, failed = scores_of(f"{__name__}:lengths")
    assert scores.dtype == np.float32
    assert scores.tolist() == LENGTHS
    assert not failed.any()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            two_for_each,
            r"two_for_each gave shape \(5, 2\) for 5 responses, not one number each, for prompts 40",
        ),
        (too_few, r"too_few gave shape \(4,\) for 5 responses"),
        (nothing_at_all, r"gave shape \(\) for 5 responses"),
        (one_is_not_a_number, "gave nan, no finite number, for prompt 41;"),
        (one_is_too_large, "gave inf, no finite number, for prompt 42;"),
        (words, "gave no numbers"),
        (complex_numbers, "gave no numbers"),
        (numbers_as_words, r"gave no numbers \(text such as '1\.0'\)"),
        (ragged, "gave no numbers"),
        (
            fails,
            r"fails raised KeyError \('score'\) in .*test_reward_function\.py, line \d+, for prompts 40, 41",
        ),
        (fails_for_salt, r"raised ValueError \(too salty\) in .*, line \d+, for prompt 43;"),
        (leaves, r"raised SystemExit \(0\)"),
        (fails_without_words, "raised Unprintable"),
        (nothing, "gave nan, no finite number, for prompts 40, 41, 42, 43, 44;"),
    ],
)
def test_without_a_fallback_the_fault_names_function_prompt_and_remedy(function, message):
    with pytest.raises(RewardFault, match=f"{message}.*reward.retries or reward.fallback") as caught:
        scores_of(function)
    assert "\n" not in str(caught.value)


def test_a_fallback_is_for_the_failed_rows_alone_and_is_named(caplog):
    scores, failed = scores_of(fails_for_salt, fallback=-7.5)
    assert scores.tolist() == [*LENGTHS[:3], -7.5, LENGTHS[4]]
    assert failed.tolist() == [False, False, False, True, False]
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "too salty" in line
    assert "for prompt 43: scored -7.5 (reward.fallback)" in line


def failing(times, then=lengths):
    """A function that raises so many times, and the sizes of its calls."""
    calls = []

    def score(prompts, responses):
        calls.append(len(responses))
        if len(calls) <= times:
            raise ConnectionError("not now")
        return then(prompts, responses)

    return score, calls


@pytest.mark.parametrize(("retries", "calls"), [(2, [5, 5, 5]), (5, [5, 5, 5])])
def test_a_failed_call_is_made_again(retries, calls):
    score, made = failing(2)
    scores, _ = scores_of(score, retries=retries)
    assert scores.tolist() == LENGTHS
    assert made == calls


def test_a_failure_of_the_moment_is_a_failure():
    """Each response alone is scored, and still nothing is retried that was not asked for."""
    score, made = failing(1)
    with pytest.raises(RewardFault, match="for 5 responses together and for none of them alone"):
        scores_of(score)
    assert made == [5, 1, 1, 1, 1, 1]


def test_nonsense_is_tried_again_too():
    answers = iter([[0.0], [np.nan] * 5, LENGTHS])
    assert scores_of(lambda prompts, responses: next(answers), retries=2)[0].tolist() == LENGTHS


def test_a_function_that_hangs_is_left_behind():
    def hangs(prompts, responses):
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(RewardFault, match=r"hangs gave no answer within 0\.1 s, for prompts 40, 41"):
        scores_of(hangs, timeout=0.1)
    _, failed = scores_of(hangs, timeout=0.1, fallback=0.0, retries=1)
    assert time.monotonic() - began < 10
    assert failed.all()
    assert scores_of(lengths, timeout=10.0)[0].tolist() == LENGTHS
    with pytest.raises(RewardFault, match=r"too salty.*for prompt 43"):
        scores_of(fails_for_salt, timeout=10.0)


def test_a_reward_model_that_gives_no_number_is_named():
    scores = np.array([0.5, np.inf, -1.0, 0.0, np.nan], np.float32)
    with pytest.raises(RewardFault, match=r"the reward model gave inf, for prompt 41 \(1 more such lines\)"):
        settled(scores, {}, IDS, fallback=None)
    kept, failed = settled(scores, {}, IDS, fallback=0.25)
    assert kept.tolist() == [0.5, 0.25, -1.0, 0.0, 0.25]
    assert failed.sum() == 2


def test_many_prompts_of_one_reason_are_one_line(caplog):
    settled(np.full(100, np.nan, np.float32), dict.fromkeys(range(100), "broken"), range(100), fallback=0.0)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line == "broken, for prompts 0, 1, 2, 3, 4, 5, 6, 7 and 92 more: scored 0 (reward.fallback)"


def test_scores_and_reasons_travel_between_processes():
    reasons = {0: "raised KeyError ('ключ') in x.py", 2: "é" * REASON_BYTES}
    scored = _unpacked(_packed(np.array([np.nan, 1.5, np.inf], np.float32), reasons))
    np.testing.assert_array_equal(scored.scores_B, np.array([np.nan, 1.5, np.inf], np.float32))
    assert scored.reasons == {0: reasons[0], 2: "é" * (REASON_BYTES // 2)}
    assert _unpacked(_packed(np.zeros(0, np.float32), {})).scores_B.shape == (0,)


TWO = """
from tests.rollout.test_reward_function import *
print(scores_of(fails_for_salt, fallback=-1.0)[0].tolist())
try:
    scores_of(fails_for_salt)
except RewardFault as fault:
    print(fault)
"""


@pytest.mark.slow
def test_two_processes_agree_on_what_failed_and_why():
    """The row that fails is the second process's; the first one says the same."""
    first, second = run_code(TWO)
    assert first[0] == second[0] == 0, (first, second)
    said = [out.splitlines()[-2:] for _, out, _ in (first, second)]  # below what Gloo says
    assert said[0] == said[1]
    scores, fault = said[0]
    assert scores == str([*LENGTHS[:3], -1.0, LENGTHS[4]])
    assert "too salty" in fault
    assert "for prompt 43;" in fault


@pytest.mark.parametrize(
    "name",
    ["no_such_module_here:score", f"{__name__}:absent", f"{__name__}", "", ":score", ".relative:score"],
)
def test_a_function_that_cannot_be_imported(name):
    with pytest.raises(InputError, match=r"cannot be imported .*; give it as module:function"):
        RewardFunction(name)


def test_a_name_that_is_no_function():
    with pytest.raises(InputError, match="is not a function"):
        RewardFunction(f"{__name__}:NOT_A_FUNCTION")


def test_a_function_is_found_in_the_working_directory(tmp_path, monkeypatch):
    """An installed command does not have the folder where it is started on its path."""
    (tmp_path / "my_reward_of_tests.py").write_text(
        "def score(prompts, responses):\n    return [0.5] * len(responses)\n"
    )
    monkeypatch.setattr("sys.path", [p for p in __import__("sys").path if p])
    monkeypatch.chdir(tmp_path)
    assert scores_of("my_reward_of_tests:score")[0].tolist() == [0.5] * 5

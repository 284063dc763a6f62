"""Repetition and over-represented features, by hand."""

import math

import pytest

from rlhf_jax.text_statistics import opening, over_represented, repeated_share, vocabulary, words


def test_words_are_lower_case_without_punctuation():
    assert words("I'm SORRY, but… 2nd_try?") == ["i'm", "sorry", "but", "2nd", "try"]
    assert words("") == []


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("one two three four", 0.0),
        ("a b c a b c", 0.25),  # abc bca cab abc: one of four came before
        ("no no no no no", 2 / 3),  # three 3-grams, one kind
        ("two words", 0.0),
        ("", 0.0),
    ],
)
def test_repeated_share(text, share):
    assert repeated_share(text) == pytest.approx(share)


def test_an_excess_has_the_two_proportion_z():
    (excess,) = over_represented(["sorry no"] * 9 + ["yes"], ["yes"] * 9 + ["sorry yes"], vocabulary)[:1]
    assert (excess.feature, excess.share, excess.share_before) == ("no", 0.9, 0.0)
    p, q, r = 9.5 / 11, 0.5 / 11, 10 / 22
    assert excess.z == pytest.approx((p - q) / math.sqrt(r * (1 - r) * (1 / 10 + 1 / 10)))


def test_a_feature_counts_once_a_response_and_common_ones_are_left_out():
    found = over_represented(["the cat cat cat cat"] * 2 + ["the"] * 8, ["the"] * 10, vocabulary, least_z=1.0)
    assert [(excess.feature, excess.share) for excess in found] == [("cat", 0.2)]


def test_openings_are_the_first_words():
    assert opening("I'm sorry, but no.") == {"i'm sorry but"}
    assert opening("Yes.") == {"yes"}
    assert opening("...") == set()


def test_nothing_to_compare_with_finds_nothing():
    assert over_represented([], ["a"], vocabulary) == []
    assert over_represented(["a"], [], vocabulary) == []

"""What the fuzz tests have in common: damaged inputs, how many, and how each may end."""

import collections
import contextlib
import json
import signal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_jax.errors import InputError

EXAMPLES, TIMES_LONG = 60, 17
SECONDS, LONGEST_MESSAGE = 20, 4500

TESTS = []  # every fuzz test there is, by name
ENDS = collections.Counter()  # how the inputs of this process ended
_long = False


def make_long():
    """Many more inputs, and other ones each time."""
    global _long
    _long = True


def inputs_of_a_test(long=None):
    return EXAMPLES * (TIMES_LONG if (_long if long is None else long) else 1)


def fuzz(*strategies, share=1.0, **named):
    """`given` with this suite's number of inputs. `share`: of that number, for what takes longer."""

    def decorate(test):
        TESTS.append((test.__name__, share))
        choose = settings(
            max_examples=max(1, round(share * inputs_of_a_test())),
            derandomize=not _long,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        return choose(given(*strategies, **named)(test))

    return decorate


@contextlib.contextmanager
def no_hang(seconds=SECONDS):
    def stop(*_):
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(read, *places):
    """What `read()` gives; None where it is refused in one line that names one of `places`."""
    with no_hang():
        try:
            value = read()
        except InputError as error:
            ENDS["refused"] += 1
            message = str(error)
            assert not places or any(place in message for place in places), message
            assert message == message.strip()
            assert message.isprintable(), message
            assert len(message) <= LONGEST_MESSAGE, f"{len(message)} characters: {message[:200]}"
            return None
    ENDS["read"] += 1
    return value


# Text of all kinds: lone surrogates, NULs, right to left, markers, special tokens, and long.
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=20),
    st.sampled_from(
        [
            "",
            " ",
            "\0",
            "\ud800",
            "\udfff\ud800",
            "\ufeff",
            "\u202e\u05d0\u05d1",
            "a\r\nb",
            "\u2028",
            "<|im_end|>",
            "<|im_start|>system\n",
            "\n\nHuman:",
            "\n\nAssistant:",
            "\n\nHuman: a\n\nAssistant: b",
            "e\u0301" * 50,
            "x" * 5000,
            "${x}",
            "???",
            "{{ 1 }}",
            "../../etc/passwd",
            "role",
            "content",
            "user",
            "assistant",
            "system",
            "prompt",
            "chosen",
            "rejected",
        ]
    ),
)
NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 10**400, 1e308, float("inf"), float("nan"), -0.0]),
    st.floats(),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)

JUNK = (
    b"",
    b"\0",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\r\n",
    b"\r",
    b"\n",
    b"\x85",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b'"\\ud800"',
    b'"\\u0000"',
    b"[" * 3000,
    b'{"a":' * 3000,
    b"]" * 3000,
    b"null",
    b"true",
    b"{}",
    b'"',
    b"\\",
    b",",
    b":",
    b"\xff" * 8,
    b"\x7f" * 8,
)


@st.composite
def mutated(draw, valid):
    """Bytes made from valid ones by a few faults: cut, flipped, left out, repeated, put in."""
    data = bytearray(draw(st.sampled_from(valid)) if isinstance(valid, list | tuple) else valid)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.one_of(st.integers(0, 16), st.integers(0, 2000))))
        fault = draw(st.sampled_from(["cut", "flip", "drop", "repeat", "junk", "junk", "bytes"]))
        if fault == "cut":
            del data[start:]
        elif fault == "flip" and start < len(data):
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif fault == "drop":
            del data[start:end]
        elif fault == "repeat":
            data[start:start] = data[start:end]
        elif fault == "junk":
            data[start:start] = draw(st.sampled_from(JUNK))
        elif fault == "bytes":
            data[start:start] = draw(st.binary(max_size=16))
    return bytes(data)


@st.composite
def changed(draw, valid):
    """A JSON value made from a valid one by putting something else in one or two places."""
    value = json.loads(json.dumps(draw(st.sampled_from(valid)) if isinstance(valid, tuple) else valid))
    for _ in range(draw(st.integers(1, 2))):
        value = _changed(draw, value, draw(st.integers(0, 4)))
    return value


def _changed(draw, value, depth):
    if depth and isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        fault = draw(st.sampled_from(["inner", "inner", "drop", "rename", "add"]))
        if fault == "inner":
            return value | {key: _changed(draw, value[key], depth - 1)}
        if fault == "add":
            return value | {draw(TEXTS): draw(VALUES)}
        kept = {name: inner for name, inner in value.items() if name != key}
        return kept if fault == "drop" else kept | {draw(TEXTS): value[key]}
    if depth and isinstance(value, list) and value:
        place = draw(st.integers(0, len(value) - 1))
        fault = draw(st.sampled_from(["inner", "inner", "drop", "repeat"]))
        if fault == "inner":
            return [*value[:place], _changed(draw, value[place], depth - 1), *value[place + 1 :]]
        return value[:place] + value[place + 1 :] if fault == "drop" else value + value[place:]
    return draw(VALUES)

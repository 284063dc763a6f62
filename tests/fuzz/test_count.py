"""How many inputs these tests try."""

import importlib
import pathlib

from tests.fuzz import inputs


def test_there_are_as_many_inputs_as_promised():
    """At least 500 by default and 10,000 with --long, by the numbers that the tests ask Hypothesis for."""
    for path in pathlib.Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"tests.fuzz.{path.stem}")
    shares = sum(share for _, share in inputs.TESTS)
    assert shares * inputs.inputs_of_a_test(long=False) >= 500
    assert shares * inputs.inputs_of_a_test(long=True) >= 10_000

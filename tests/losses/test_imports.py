"""The losses can be used alone, and the page about them is complete."""

import pathlib
import re
import subprocess
import sys

import rlhf_jax.losses


def test_losses_need_jax_and_chex_only():
    heavy = (
        "flax",
        "optax",
        "orbax",
        "transformers",
        "datasets",
        "torch",
        "matplotlib",
        "omegaconf",
        "rlhf_jax.types",
    )
    code = f"import sys, rlhf_jax.losses; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there_and_explained():
    for name in rlhf_jax.losses.__all__:
        thing = getattr(rlhf_jax.losses, name)
        assert not callable(thing) or thing.__doc__


def test_the_page_names_every_function_and_only_tests_that_exist():
    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs" / "losses.md").read_text()
    functions = [name for name in rlhf_jax.losses.__all__ if callable(getattr(rlhf_jax.losses, name))]
    assert [name for name in functions if f"`{name}" not in page] == []
    for file, test in re.findall(r"`(test_\w+\.py)::(\w+)`", page):
        assert f"def {test}(" in (root / "tests" / "losses" / file).read_text(), (file, test)
    for file in re.findall(r"`((?:tests|rlhf_jax)/[\w/]+\.py)`", page):
        assert (root / file).exists(), file

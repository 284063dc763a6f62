"""The losses can be used alone."""

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

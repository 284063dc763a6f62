"""`python -m rlhf_jax` is `rlhf-jax`."""

from rlhf_jax.cli import main

main()

"""What a backward pass keeps of the forward pass, and what it computes again."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from rlhf_jax.errors import InputError

# What is kept beside each block's input. "products" keeps what is dear to compute, about a third of a layer's
# activations; the rest costs a CPU less to compute again than to store.
POLICIES = {
    "none": None,
    "products": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "layers": jax.checkpoint_policies.nothing_saveable,
}


def recomputed(block: Any, remat: str, *, scanned: bool) -> Any:
    """The class of a block whose `__call__` is recomputed in the backward pass as `remat` says.

    Args:
      scanned: the block is the body of a scan, where recomputation cannot be merged with what is kept.
    """
    if remat not in POLICIES:
        raise InputError(f"remat={remat!r} is unknown; use one of {', '.join(POLICIES)}")
    if remat == "none":
        return block
    return nn.remat(block, policy=POLICIES[remat], prevent_cse=not scanned, methods=["__call__"])

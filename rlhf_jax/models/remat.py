"""What a backward pass keeps of the forward pass, and what it computes again."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax

from rlhf_jax.errors import InputError


def narrow_products(primitive: Any, *operands: Any, **params: Any) -> bool:
    """A checkpoint policy: a product with weights is kept where its result is no wider than its input.

    The hidden vectors of feed-forward layers are wider: two thirds of what a layer of Llama's shape would
    keep, and half of its products' work.
    """
    if not jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims(primitive, *operands, **params):
        return False
    (contracted, _), _ = params["dimension_numbers"]
    left, weights = operands
    inner = math.prod(left.shape[axis] for axis in contracted)
    return weights.size <= inner * inner


# What is kept beside each block's input. "products" keeps what is dear to compute for its size; the rest
# costs a CPU little more to compute again than to store.
POLICIES = {
    "none": None,
    "products": narrow_products,
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

"""Records that pass between the floors, and the letters of their shapes.

Letters: B batch, T response tokens (or any sequence), P prompt width, S = P + T or cache length,
V vocabulary, D model width, H heads, K key/value heads, E head width, F feed-forward width, L layers.
Scalars have no suffix.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Prompts:
    """Tokenised prompts, padded on the left to one width P."""

    tokens_BP: jax.Array  # int32
    mask_BP: jax.Array  # bool, True on prompt tokens
    row_B: jax.Array  # int32, names each row's sampling stream: the same row and key give the same response

    def repeat(self, samples: int) -> Prompts:
        """Every prompt `samples` times in a row; row r becomes streams r * samples, r * samples + 1, ..."""
        if samples == 1:
            return self
        stream_BN = self.row_B[:, None] * samples + jnp.arange(samples, dtype=jnp.int32)[None]
        return Prompts(
            tokens_BP=jnp.repeat(self.tokens_BP, samples, axis=0),
            mask_BP=jnp.repeat(self.mask_BP, samples, axis=0),
            row_B=stream_BN.reshape(-1),
        )


class Room(NamedTuple):
    """Tokens that a pass without padding has room for, on each shard of the batch."""

    tokens: int  # of prompts and responses
    responses: int


@struct.dataclass
class Rollout:
    """Prompts and the responses sampled for them. Response position t lies at sequence position P + t."""

    tokens_BS: jax.Array  # int32, prompt padded on the left, response on the right; S = P + T
    mask_BS: jax.Array  # bool, True on prompt tokens and valid response tokens
    mask_BT: jax.Array  # bool, True on response tokens up to and including the first EOS
    logprobs_BT: jax.Array  # float32, of the sampled tokens when they were sampled; 0 where masked
    truncated_B: jax.Array  # bool, the response reached its limit without an EOS
    room: Room | None = struct.field(pytree_node=False, default=None)  # None: padding is computed too

    @classmethod
    def of(
        cls,
        prompts: Prompts,
        response_BT: jax.Array,
        logprobs_BT: jax.Array,
        length_B: jax.Array,
        ended_B: jax.Array,
    ) -> Rollout:
        """Prompts with their responses, of which length_B tokens are valid; ended_B: the last is an EOS."""
        mask_BT = jnp.arange(response_BT.shape[1])[None] < length_B[:, None]
        return cls(
            tokens_BS=jnp.concatenate([prompts.tokens_BP, response_BT], axis=1),
            mask_BS=jnp.concatenate([prompts.mask_BP, mask_BT], axis=1),
            mask_BT=mask_BT,
            logprobs_BT=logprobs_BT,
            truncated_B=~ended_B,
        )

    @property
    def response_BT(self) -> jax.Array:
        return self.tokens_BS[:, -self.mask_BT.shape[1] :]

    @property
    def length_B(self) -> jax.Array:
        """Valid response tokens of each row."""
        return self.mask_BT.sum(-1)

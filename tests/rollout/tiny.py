"""A tiny decoder whose responses vary, generation under one jit for all tests, and a plain loop."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.data.batches import pad_rows
from rlhf_jax.models import Rope, Transformer, TransformerConfig, unstack_layers
from rlhf_jax.models.parameters import shapes
from rlhf_jax.rollout.decoder import decoder_for
from rlhf_jax.rollout.generate import generate
from rlhf_jax.rollout.sampling import row_uniforms
from rlhf_jax.types import Prompts

CONFIG = TransformerConfig(
    vocab_size=24,
    layers=2,
    embed=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp=32,
    max_positions=64,
    rope=Rope(theta=100.0),
)
MODEL = Transformer(CONFIG)
EOS = (18, 4)
SETTINGS = {"response_length": 8, "eos_ids": EOS, "temperature": 0.7}
# Ids that a mask made from ids would take for padding (0) or for the end (18, 4) stand inside the prompts.
ROWS = ([5, 0, 9, 18], [1], [4, 4, 2, 0, 0], [11, 12], [0, 18, 3], [20, 21, 22, 23, 0], [18], [8, 2, 6])


def randomised(model, seed=0, scale=0.4):
    """Parameters with noise everywhere, norms around 1; compiles nothing."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        noise = scale * rng.normal(size=shape.shape).astype(np.float32)
        return jnp.asarray(1 + noise if path[-1].key == "scale" else noise)

    return jax.tree_util.tree_map_with_path(leaf, shapes(model))


PARAMS = randomised(MODEL)


class Plain(nn.Module):
    """A user's own module: tokens and mask in, logits out, and no other method."""

    inner: nn.Module

    def __call__(self, tokens_BT, mask_BT=None):
        return self.inner(tokens_BT, mask_BT)


def prompts_of(rows=ROWS, width=5, pad_id=0, row_ids=None):
    tokens_BP, mask_BP = pad_rows(rows, width, "left", pad_id)
    row_ids = np.arange(len(rows)) if row_ids is None else np.asarray(row_ids)
    return Prompts(jnp.asarray(tokens_BP), jnp.asarray(mask_BP), jnp.asarray(row_ids, jnp.int32))


@functools.cache
def generator(model=None, **settings):
    """A jitted `generate`; the same settings share one compilation. None: the tiny decoder."""
    decoder = decoder_for(MODEL.clone(scan_layers=False) if model is None else model)
    return jax.jit(functools.partial(generate, decoder, **settings))


def respond(prompts, key, **changes):
    """The tiny decoder's rollout, fetched."""
    sample = generator(**{**SETTINGS, **changes})
    return jax.device_get(sample(unstack_layers(PARAMS), prompts, key))


@functools.partial(jax.jit, static_argnums=0)
def whole(model, params, tokens_BT, mask_BT):
    return model.apply({"params": params}, tokens_BT, mask_BT)


def plain_loop(
    rows, key, *, temperature, response_length, eos_ids, allowed=lambda logits: logits, row_ids=None
):
    """Responses and log-probabilities by recomputing whole sequences, padded on the right, in NumPy float64.

    `allowed` sets logits to -inf that top-k or top-p exclude.
    """
    width = max(map(len, rows)) + response_length
    row_ids = np.arange(len(rows)) if row_ids is None else row_ids
    sequences, logprobs = [list(row) for row in rows], [[] for _ in rows]
    ended = [False] * len(rows)
    for t in range(response_length):
        logits_BTV = np.asarray(
            whole(MODEL, PARAMS, *map(jnp.asarray, pad_rows(sequences, width, "right", 1)))
        )
        uniform_B = row_uniforms(key, jnp.asarray(row_ids, jnp.int32), jnp.int32(t))
        for b, sequence in enumerate(sequences):
            if ended[b]:
                continue
            logits = logits_BTV[b, len(sequence) - 1].astype(np.float64) / (temperature or 1.0)
            weight = np.exp(allowed(logits) - logits.max())
            cdf = np.cumsum(weight) / weight.sum()
            token = int(np.searchsorted(cdf, float(uniform_B[b]), side="right"))
            token = int(logits.argmax()) if temperature == 0 else token
            logprobs[b].append(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
            sequence.append(token)
            ended[b] = token in eos_ids
    responses = [sequence[len(row) :] for sequence, row in zip(sequences, rows, strict=True)]
    return responses, logprobs, [not end for end in ended]


def responses_of(rollout):
    """The valid tokens of each response, as lists."""
    return [tokens[mask].tolist() for tokens, mask in zip(rollout.response_BT, rollout.mask_BT, strict=True)]

"""The time that a phase's matrix products take alone on one device, each at its own shape.

A floor that counts FLOPs takes all of them at the rate of one large product. Those of a model are smaller and
slower: what lies between the two floors is the shapes', and what lies above this one is the program's.
"""

from __future__ import annotations

import collections
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import machine

from rlhf_jax.models.configs import TransformerConfig
from rlhf_jax.rollout.score import CHUNK
from rlhf_jax.trainers.ppo_loop import PpoTask

ROUNDS = 4  # how often a product is done in one program


class Product(NamedTuple):
    """[batch, rows, inner] @ [batch, inner, columns]."""

    batch: int
    rows: int
    inner: int
    columns: int


Products: TypeAlias = collections.Counter[Product]


def of_layers(config: TransformerConfig, batch: int, length: int) -> Products:
    """The products with weights, in a forward pass over [batch, length] tokens."""
    D, E, F, N = config.embed, config.head_dim, config.mlp, batch * length
    H, K = config.heads * E, config.kv_heads * E
    products = Products({Product(1, N, H, D): 1})
    for columns in (H, K, K, *((F, F) if config.gated_mlp else (F,))):
        products[Product(1, N, D, columns)] += 1
    products[Product(1, N, F, D)] += 1
    return times(products, config.layers)


def of_attention(config: TransformerConfig, batch: int, length: int) -> Products:
    """Queries with keys and weights with values, those of the heads of a key together."""
    B, N = batch * config.kv_heads, config.heads // config.kv_heads * length
    pair = Products({Product(B, N, config.head_dim, length): 1})
    pair[Product(B, N, length, config.head_dim)] += 1
    return times(pair, config.layers)


def of_unembedding(config: TransformerConfig, positions: int) -> Products:
    """In chunks, as `response_logprobs` makes logits."""
    chunk = min(CHUNK, positions)
    return Products({Product(1, chunk, config.embed, config.vocab_size): -(-positions // chunk)})


def backward(products: Products) -> Products:
    """Two for each: the gradients of both of its factors."""
    found = Products()
    for (batch, rows, inner, columns), count in products.items():
        found[Product(batch, rows, columns, inner)] += count
        found[Product(batch, inner, rows, columns)] += count
    return found


def times(products: Products, count: int) -> Products:
    return Products({product: n * count for product, n in products.items()})


def forward_pass(config: TransformerConfig, batch: int, length: int, positions: int = 0) -> Products:
    """Over [batch, length] tokens, with logits at so many positions."""
    found = of_layers(config, batch, length) + of_attention(config, batch, length)
    return found + of_unembedding(config, positions) if positions else found


def update(config: TransformerConfig, batch: int, length: int, positions: int, remat: str) -> Products:
    """Forward, what the backward pass computes again, and backward; logits are always computed again."""
    layers, attention = of_layers(config, batch, length), of_attention(config, batch, length)
    again = {
        "none": Products(),
        "products": attention + Products({p: n for p, n in layers.items() if p.columns > p.inner}),
        "layers": attention + layers,
    }[remat]
    if positions:
        logits = of_unembedding(config, positions)
        layers, again = layers + logits, again + logits
    return layers + attention + again + backward(layers + attention)


def generation(config: TransformerConfig, batch: int, prompt: int, response: int) -> Products:
    """A prefill and the steps after it, each with the whole cache."""
    B, G, E, S = batch * config.kv_heads, config.heads // config.kv_heads, config.head_dim, prompt + response
    step = of_layers(config, batch, 1) + Products({Product(1, batch, config.embed, config.vocab_size): 1})
    step += times(Products({Product(B, G, E, S): 1, Product(B, G, S, E): 1}), config.layers)
    return forward_pass(config, batch, prompt, batch) + times(step, response - 1)


def of_iteration(task: PpoTask, prompt: int, response: int) -> dict[str, Products]:
    """Of each phase that has products, for one model in all four roles and rows of this width."""
    config, model = task.config, task.steps.policy.model
    shape, rows, whole = model.config, config.ppo.batch_size, prompt + response
    learnt = rows // config.ppo.minibatches
    learnt = min(config.ppo.micro_batch_size or learnt, learnt)
    rounds = config.ppo.epochs * rows // learnt
    logprobs = forward_pass(shape, rows, whole - 1, rows * response)
    values = forward_pass(shape, rows, whole)
    return {
        "gen": generation(shape, rows, prompt, response),
        "ref": logprobs,
        "values": values,
        "reward": values,
        "update_critic": times(update(shape, learnt, whole, 0, model.remat), rounds),
        "update_actor": times(update(shape, learnt, whole - 1, learnt * response, model.remat), rounds),
    }


def seconds(products: Products, dtype: str) -> float:
    """Of all of them, one after the other."""
    return sum(count * seconds_of(product, dtype) for product, count in products.items())


@functools.cache
def seconds_of(product: Product, dtype: str) -> float:
    """Of one, the best of five programs that do it ROUNDS times."""
    batch, rows, inner, columns = product
    lead = () if batch == 1 else (batch,)
    x, y = jnp.ones((*lead, rows, inner), dtype), jnp.ones((*lead, inner, columns), dtype)

    @jax.jit
    def run(x: Any, y: Any):
        def once(_, small):  # added, so that the compiler cannot do the product once for all rounds
            return small + 1e-20 * jnp.matmul(x + small, y).ravel()[0]

        return jax.lax.fori_loop(0, ROUNDS, once, jnp.zeros((), dtype))

    return machine.timed(run, x, y, repeats=5).best / ROUNDS

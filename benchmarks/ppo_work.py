"""The work of a PPO iteration, phase by phase, counted from shapes and lengths: the floor of its time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models.flops import forward_flops
from rlhf_jax.trainers.ppo_loop import PpoTask
from rlhf_jax.trainers.ppo_steps import recomputes_old_logprobs

ADAM_PASSES = 7  # parameters, gradients and two moments are read, all but the gradients are written


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs of matrix products, and the bytes that memory must move for them."""

    flops: float
    bytes: float

    def seconds(self, limits: Mapping[str, float]) -> float:
        """The time that a machine of these limits (flops_s, bytes_s) needs: the longer of the two."""
        return max(self.flops / limits["flops_s"], self.bytes / limits["bytes_s"])


def iteration_work(task: PpoTask, prompts_B: np.ndarray, responses_B: np.ndarray) -> dict[str, Work]:
    """The work of each phase of `ppo_loop.iterate`, by the name that the phase is timed under.

    FLOPs are those of `forward_flops`, of valid tokens; a backward pass is two forward passes. Bytes are
    those of weights, optimizer and cache, each read or written once where the phase needs it; activations are
    taken to stay in caches, so that the floor is one that no program can pass.

    Args:
      prompts_B, responses_B: valid tokens of each row. Critic and reward model share a shape.
    """
    config, steps = task.config, task.steps
    actor: Any = steps.policy.model
    whole_B, tokens = prompts_B + responses_B, int(responses_B.sum())
    width = jnp.dtype(config.policy.dtype).itemsize
    actor_size, critic_size = _parameters(steps.policy.params), _parameters(steps.critic_state.params)
    actor_flops = forward_flops(actor.config, whole_B - 1, unembed_positions=tokens)
    critic_flops = forward_flops(actor.config, whole_B)
    critic_forward = Work(critic_flops, width * critic_size)
    actor_forward = Work(actor_flops, width * actor_size)
    return {
        "reshard": Work(0, 2 * width * actor_size),
        "gen": generation_work(
            actor.config, actor_size, width, prompts_B, responses_B, steps=int(responses_B.max())
        ),
        "old": actor_forward if recomputes_old_logprobs(config, actor) else Work(0, 0),
        "ref": actor_forward,
        "values": critic_forward,
        "reward": critic_forward,
        "adv": Work(0, 0),
        "update_critic": _update(critic_flops, critic_size, width, config.ppo),
        "update_actor": _update(actor_flops, actor_size, width, config.ppo),
    }


def generation_work(
    config: Any, size: int, width: int, prompts_B: np.ndarray, responses_B: np.ndarray, *, steps: int
) -> Work:
    """Of responses of these lengths: weights are read once a decode step, a row's cache once a token.

    Args:
      size: parameters.   width: bytes of one.   steps: decode steps of all rows together.
    """
    cached = sum(
        int(n) * int(p) + int(n) * (int(n) - 1) // 2 for p, n in zip(prompts_B, responses_B, strict=True)
    )
    flops = forward_flops(config, prompts_B + responses_B - 1, unembed_positions=int(responses_B.sum()))
    return Work(flops, width * (steps * size + cached * _cache_entry(config)))


def _update(flops: float, size: int, width: int, ppo: Any) -> Work:
    """All passes over one rollout: forward, backward, and an optimizer step a minibatch."""
    steps = ppo.epochs * ppo.minibatches
    return Work(3 * ppo.epochs * flops, steps * size * (3 * width + 4 * ADAM_PASSES))


def _parameters(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _cache_entry(config: Any) -> int:
    """Numbers that one cached token has: a key and a value a layer."""
    return 2 * config.layers * config.kv_heads * config.head_dim

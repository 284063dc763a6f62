"""Time and error of the losses, beside the limits of this machine: a copy, memory traffic, exponentials.

    python benchmarks/losses.py [--peer-python PYTHON_WITH_TORCH]

Each loss runs in turn with what it is measured against. The last line is one JSON object: each figure with
its goal.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import machine
import numpy as np

from rlhf_jax.losses import entropy_from_logits, gae, ppo_policy_loss, ppo_value_loss, ranking_loss

GAMMA, LAM = 0.99, 0.95

# As in PPO trainers of PyTorch: whole columns, one position after the other, from the last to the first.
TORCH_LOOP = """
import json, sys, time, torch
rows, length, repeats, threads = map(int, sys.argv[1:])
torch.set_num_threads(threads)
rewards, values = torch.randn(rows, length), torch.randn(rows, length)
mask = (torch.arange(length)[None] < torch.randint(1, length + 1, (rows, 1))).float()

def gae(rewards, values, mask, gamma=0.99, lam=0.95):
    values, rewards, last, reversed_advantages = values * mask, rewards * mask, 0, []
    for t in reversed(range(length)):
        next_values = values[:, t + 1] if t < length - 1 else 0.0
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        last = delta + gamma * lam * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages * mask, (advantages + values) * mask

seconds = []
with torch.no_grad():
    for _ in range(1 + repeats):
        start = time.perf_counter()
        gae(rewards, values, mask)
        seconds.append(time.perf_counter() - start)
print(json.dumps(sorted(seconds[1:])[repeats // 2]))
"""


def rollout_arrays(rows: int, length: int, dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    """(rewards, values, mask) with ragged lengths."""
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, rows, length)).astype(dtype)
    mask = np.arange(length)[None] < rng.integers(1, length + 1, (rows, 1))
    return jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(mask)


def batched_gae(rewards_BT, values_BT, mask_BT, lam=LAM):
    return jax.vmap(functools.partial(gae, gamma=GAMMA, lam=lam))(rewards_BT, values_BT, mask_BT)


def gae_loop(rewards_BT, values_BT, mask_BT, lam=LAM) -> np.ndarray:
    """Advantages by a float64 loop over valid steps."""
    rewards, values, mask = (np.asarray(x, np.float64) for x in (rewards_BT, values_BT, mask_BT))
    advantages, after, next_value = np.zeros_like(rewards), np.zeros(len(rewards)), np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        valid = mask[:, t] != 0
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        after = np.where(valid, delta + GAMMA * lam * after, after)
        next_value = np.where(valid, values[:, t], next_value)
        advantages[:, t] = np.where(valid, after, 0.0)
    return advantages


def gae_error(dtype: str) -> float:
    """Largest error at [64, 1024], relative to the largest advantage, over lambda up to 0.95."""
    errors = []
    with jax.enable_x64(dtype == "float64"):
        arrays = rollout_arrays(64, 1024, np.dtype(dtype))
        for lam in (0.0, 0.5, 0.9, 0.95):
            ours, exact = jax.jit(batched_gae)(*arrays, lam)[0], gae_loop(*arrays, lam)
            errors.append(float(np.abs(np.asarray(ours, np.float64) - exact).max() / np.abs(exact).max()))
    return max(errors)


def against(ours: Any, floor: Any, arrays: Any, repeats: int) -> dict[str, float]:
    """Milliseconds of two jitted functions of the same arrays, in turn, and the ratio of their medians."""
    ours, floor = jax.jit(ours), jax.jit(floor)
    timings = machine.timed_together(
        {"ours": lambda: ours(*arrays), "floor": lambda: floor(*arrays)}, repeats
    )
    return {
        "ms": 1e3 * timings["ours"].median,
        "floor_ms": 1e3 * timings["floor"].median,
        "ratio": timings["ours"].median / timings["floor"].median,
    }


def copies(*arrays):
    return tuple(jnp.copy(x) for x in arrays)


def read_all(*arrays):
    """Every element is read once: the least memory traffic of a loss."""
    return sum(x.sum(dtype=jnp.float32) for x in arrays)


def torch_seconds(python: str, rows: int, length: int, repeats: int, threads: int) -> float:
    command = [python, "-c", TORCH_LOOP, *map(str, (rows, length, repeats, threads))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    rng, repeats = np.random.default_rng(1), args.repeats
    rows, length, big = (64, 1024, (1024, 4096)) if not args.small else (8, 32, (16, 64))
    arrays = rollout_arrays(rows, length)
    step = jax.jit(batched_gae)
    gae_s = machine.timed(step, *arrays, repeats=10 * repeats).median
    result: dict[str, Any] = {"gae": {"ms": 1e3 * gae_s}}
    if args.peer_python:
        peer_s = torch_seconds(args.peer_python, rows, length, repeats, args.threads)
        result["gae"] |= {"torch_ms": 1e3 * peer_s, "ratio": peer_s / gae_s, "goal_at_least": 20}
    large = rollout_arrays(*big)
    result["gae_large"] = against(batched_gae, copies, large, repeats) | {"goal_at_most": 8}
    result["gae_error"] = {
        "float64": gae_error("float64"),
        "float32": gae_error("float32"),
        "goal_at_most": {"float64": 1e-12, "float32": 1e-5},
    }
    logprobs, old, advantages = (jnp.asarray(rng.normal(size=big).astype(np.float32)) for _ in range(3))
    mask = large[2]
    policy = functools.partial(ppo_policy_loss, clip_low=0.2, clip_high=0.2)
    value = functools.partial(ppo_value_loss, clip=0.2)
    token_arrays, pair_arrays = (logprobs, old, advantages, mask), (logprobs.ravel(), old.ravel())
    losses = {
        "ppo_policy_loss": (policy, token_arrays),
        "ppo_value_loss": (value, token_arrays),
        "ranking_loss": (ranking_loss, pair_arrays),
    }
    for name, (loss, given) in losses.items():
        result[name] = against(loss, read_all, given, repeats) | {"goal_at_most": 2}
    logits = jnp.asarray(rng.normal(size=(16, 8, args.vocab)).astype(np.float32))
    exponentials = lambda z: jnp.exp(z).sum(-1)  # noqa: E731
    result["entropy"] = against(entropy_from_logits, exponentials, (logits,), repeats) | {"goal_at_most": 1.2}
    return {**machine.description(), "benchmark": "losses", **result}


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--peer-python", help="a Python that has PyTorch, for its loop over time")
    parser.add_argument("--threads", type=int, default=2, help="of PyTorch")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--small", action="store_true", help="small arrays: a trial of the script itself")
    args = parser.parse_args()
    machine.report(lambda: benchmark(args))


if __name__ == "__main__":
    main()

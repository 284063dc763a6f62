"""The formulas once more, as float64 loops that know nothing of the library, and what several files share."""

import jax
import numpy as np

B, T = 4, 6
# Full, ragged, with holes (also at both ends), empty.
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]], bool)


def x64():
    """A context in which arrays may be float64."""
    return jax.enable_x64(True)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def slope(f, x, h=1e-6):
    """Central finite differences of a scalar function, entry by entry."""
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = h
        out[i] = (float(f(x + step)) - float(f(x - step))) / (2 * h)
    return out


def aggregate(x_BT, mask_BT, aggregation):
    rows = [[x for x, m in zip(xs, ms, strict=True) if m] for xs, ms in zip(x_BT, mask_BT, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if aggregation == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if aggregation == "seq_mean_token_sum":
        return sum(map(sum, rows)) / len(rows)
    return sum(sum(row) / len(row) for row in rows) / len(rows)


def policy_tokens(new, old, advantages, clip_low, clip_high, dual_clip):
    """(loss, clipped, dual clip binds, minus log ratio) of every token."""
    out = np.zeros((4, *new.shape))
    for i in np.ndindex(new.shape):
        log_ratio = min(max(new[i] - old[i], -20.0), 20.0)
        ratio, a = np.exp(log_ratio), advantages[i]
        unclipped, clipped = -a * ratio, -a * min(max(ratio, 1 - clip_low), 1 + clip_high)
        loss, binds = max(unclipped, clipped), False
        if dual_clip is not None and a < 0 and loss > -a * dual_clip:
            loss, binds = -a * dual_clip, True
        out[(slice(None), *i)] = loss, clipped > unclipped, binds, -log_ratio
    return out


def value_tokens(values, old, returns, clip):
    """(loss, clipped) of every token."""
    out = np.zeros((2, *values.shape))
    for i in np.ndindex(values.shape):
        v, r = values[i], returns[i]
        unclipped = clipped = (v - r) ** 2
        if clip is not None:
            clipped = (min(max(v, old[i] - clip), old[i] + clip) - r) ** 2
        out[(slice(None), *i)] = 0.5 * max(unclipped, clipped), clipped > unclipped
    return out


def gae(rewards, values, mask, gamma, lam, bootstrap_value=0.0):
    """One response, by the definition: each advantage is its own sum over the valid steps that follow."""
    steps = [t for t in range(len(mask)) if mask[t]]
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    if not steps:
        return advantages, returns
    next_values = [values[t] for t in steps[1:]] + [bootstrap_value]
    deltas = [rewards[t] + gamma * v - values[t] for t, v in zip(steps, next_values, strict=True)]
    for i, t in enumerate(steps):
        advantages[t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(steps)))
        returns[t] = advantages[t] + values[t]
    return advantages, returns


def shaped_rewards(scores, kl, mask, kl_coef):
    out = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                out[b, t] = -kl_coef * kl[b, t] + (0.0 if mask[b, t + 1 :].any() else scores[b])
    return out

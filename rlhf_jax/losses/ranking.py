"""The reward model's loss on preference pairs."""

import chex
import jax
import jax.numpy as jnp

from rlhf_jax.errors import InputError
from rlhf_jax.losses.precision import at_least_float32

RANKING_KINDS = ("bradley_terry", "hinge")


def ranking_loss(
    chosen_B,
    rejected_B,
    *,
    margin=0.0,
    kind: str = "bradley_terry",
    centering_coef: float = 0.0,
    denominator=None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How badly the scores order the pairs, mean over pairs.

        d = s_chosen - s_rejected
        bradley_terry   -log sigmoid(d - margin)
        hinge           max(0, margin - d)
        plus            centering_coef * (s_chosen + s_rejected)^2

    Only differences are ranked, so scores may drift together; the last term keeps them around 0.
    Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, eq. 1 with K = 2. Margin: Touvron et al. 2023,
    https://arxiv.org/abs/2307.09288, eq. 2. Centring: Eisenstein et al. 2023,
    https://arxiv.org/abs/2312.09244, eq. 2.

    Args:
      chosen_B, rejected_B: raw scores of the preferred and of the other response.
      margin: by how much the chosen one should score higher; a number or [B].
      kind: bradley_terry or hinge.   centering_coef: weight of the centring term.
      denominator: pairs in the whole batch; None: in this one.
    Returns:
      (loss, metrics), metrics as means over pairs: accuracy, the share with d > 0, ties as one half;
      score_margin, d.
    """
    if kind not in RANKING_KINDS:
        raise InputError(f"ranking loss {kind!r} is unknown; use {', '.join(RANKING_KINDS)}")
    chosen_B, rejected_B = at_least_float32(chosen_B), at_least_float32(rejected_B)
    chex.assert_equal_shape([chosen_B, rejected_B])
    pairs = jnp.maximum(chosen_B.size if denominator is None else denominator, 1)
    difference_B = chosen_B - rejected_B
    if kind == "bradley_terry":
        loss_B = -jax.nn.log_sigmoid(difference_B - margin)
    else:
        loss_B = jnp.maximum(0, margin - difference_B)
    loss_B = loss_B + centering_coef * (chosen_B + rejected_B) ** 2
    return loss_B.sum() / pairs, {
        "accuracy": ((1 + jnp.sign(difference_B)) / 2).sum() / pairs,
        "score_margin": difference_B.sum() / pairs,
    }

"""The benchmark of the losses runs, and its oracle is right."""

import numpy as np
from losses import gae_loop

from tests.benchmarks.scripts import result_of

LOSSES = {"ppo_policy_loss": 2, "ppo_value_loss": 2, "ranking_loss": 2, "entropy": 1.2, "gae_large": 8}


def test_each_figure_stands_beside_its_goal():
    result = result_of("losses.py", "--small", "--repeats", 3, "--vocab", 512)
    for name, goal in LOSSES.items():
        assert result[name]["goal_at_most"] == goal
        assert result[name]["ratio"] > 0
    assert result["gae"]["ms"] > 0
    assert "ratio" not in result["gae"]  # no PyTorch was given
    for dtype, goal in {"float64": 1e-12, "float32": 1e-5}.items():
        assert result["gae_error"][dtype] <= goal == result["gae_error"]["goal_at_most"][dtype]


def test_the_loop_by_hand():
    advantages = gae_loop([[1.0, 5.0, 2.0]], [[0.5, 9.0, 1.0]], [[True, False, True]], lam=0.5)
    # the masked step is passed over: 2 - 1 = 1 at the end, then 1 + 0.99 * 1 - 0.5 + 0.99 * 0.5 * 1
    np.testing.assert_allclose(advantages, [[1.985, 0.0, 1.0]])

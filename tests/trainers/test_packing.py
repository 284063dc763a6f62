"""Padding that is left out changes nothing: iterations packed and padded, on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.errors import InputError
from rlhf_jax.rollout import rooms, score
from rlhf_jax.rollout.rooms import in_least_room
from rlhf_jax.sharding.placement import make_views
from rlhf_jax.trainers import pipeline
from rlhf_jax.trainers.packing import even_order
from rlhf_jax.trainers.ppo_steps import make_policy_steps, make_ppo_steps

from .test_lora import LORA
from .test_own_policy import constant
from .test_ppo import actor, assert_equal_runs, configure, on_one_device, one_iteration
from .test_shared_critic import SHARED, records

LAYOUTS = {
    "one device": (),
    "fsdp 2, critic fsdp 8": ("placement.train.fsdp=2", "placement.critic.fsdp=8", "placement.critic.data=1"),
    "micro-batches on 4 shards": ("placement.train.tensor=2", "ppo.micro_batch_size=4"),
}
FAST = ("one device",)


@pytest.fixture(autouse=True)
def few_rooms(monkeypatch):
    """Three, so that less is compiled."""
    monkeypatch.setattr(rooms, "ROOMS", ((5, 8), (6, 6), (7, 8)))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LAYOUTS[name], id=name, marks=() if name in FAST else pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_packed_iterations_are_padded_ones(layout, monkeypatch):
    sizes, pack = set(), score.pack_valid

    def noting(mask, groups, size):
        sizes.add(size)
        return pack(mask, groups, size)

    monkeypatch.setattr(score, "pack_valid", noting)
    devices = jax.devices() if any("placement" in item for item in layout) else jax.devices()[:1]
    result = jax.device_get(one_iteration(configure("ppo.packing=true", *layout), devices))
    assert len(sizes) > 3  # of all tokens and of responses
    assert_equal_runs(result, on_one_device())
    assert in_least_room(lambda rollout: jnp.asarray(rollout.room is not None), result["rollout"])


@pytest.mark.parametrize("kind", [SHARED, LORA], ids=["shared critic", "adapters"])
@pytest.mark.slow
def test_packed_runs_are_padded_ones(kind, tiny, tmp_path):
    """Three iterations of the command's own loop, by what they log."""
    for packing in ("true", "false"):
        pipeline.ppo(tiny(SHARED[0], *kind, f"ppo.packing={packing}", f"run.dir={tmp_path / packing}"))
    ours, theirs = records(tmp_path / "true"), records(tmp_path / "false")
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        assert set(mine) == set(other)
        for name in {"reward/score_mean", "reward/kl", "critic/vf_loss", "actor/pg_loss"} & set(other):
            assert mine[name] == pytest.approx(other[name], rel=2e-3, abs=2e-4), name


def test_a_module_that_cannot_leave_padding_out_is_refused_by_name():
    config = configure("ppo.packing=true")
    views, (other, params) = make_views(config, jax.devices()[:1]), constant(1)
    with pytest.raises(InputError, match=r"ppo.packing=true needs .* not Constant; use false"):
        make_policy_steps(config, views, other, params, eos_ids=(3,))
    policy = make_policy_steps(config, views, *actor(), eos_ids=(3,))
    with pytest.raises(InputError, match="not Constant"):
        make_ppo_steps(config, policy, other, params)


def test_micro_batches_have_about_as_many_tokens():
    """Rows 0, 2, 4 and 1, 3, 5 of the order are the two micro-batches."""
    lengths = np.array([1, 9, 2, 8, 3, 7])
    order = np.asarray(even_order(jnp.asarray(lengths), 2))
    assert sorted(order.tolist()) == list(range(6))
    assert sorted(lengths[order[m::2]].sum() for m in range(2)) == [14, 16]

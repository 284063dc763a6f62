"""From the settings to views: defaults, regrouping, and layouts that do not cover the devices."""

import dataclasses

import jax
import pytest

from rlhf_jax.errors import InputError
from rlhf_jax.settings import Config, Layout, Placement
from rlhf_jax.sharding.placement import make_views


def views(devices=None, **roles):
    layouts = {role: Layout(*sizes) for role, sizes in roles.items()}
    return make_views(dataclasses.replace(Config(), placement=Placement(**layouts)), devices)


def test_without_a_placement_every_role_spreads_its_batch_over_all_devices():
    found = views()
    assert found.train.shape == {"data": 8, "fsdp": 1, "tensor": 1}
    assert {found.generate, found.critic, found.reference, found.reward} == {found.train}


def test_roles_are_views_of_one_grid():
    found = views(train=(2, 2, 2), generate=(2, 1, 4), reward=(-1, 1, 1))
    assert found.generate.shape == {"data": 2, "fsdp": 1, "tensor": 4}
    assert found.reward.shape == {"data": 8, "fsdp": 1, "tensor": 1}
    assert found.critic == found.reference == found.train
    assert found.generate.mesh == found.reward.mesh == found.train.mesh
    # The generation tensor axis begins with the training one: what a device holds stays.
    assert found.generate.tensor[:1] == found.train.tensor


def test_each_slice_has_a_grid_of_its_own():
    found = views(
        train=(1, 2, 2, "0-3"),
        generate=(2, 1, 2, "4-7"),
        reference=(-1, 1, 1, "4-7"),
        reward=(2, 2, 1, "0-3"),
    )
    ids = {role: [device.id for device in view.mesh.devices.flat] for role, view in vars(found).items()}
    assert ids["train"] == ids["critic"] == ids["reward"] == [0, 1, 2, 3]
    assert ids["generate"] == ids["reference"] == [4, 5, 6, 7]
    # Roles of one slice are views of one grid, whichever roles they are.
    assert found.reference.mesh == found.generate.mesh
    assert found.reward.mesh == found.train.mesh
    assert found.reference.shape == {"data": 4, "fsdp": 1, "tensor": 1}
    assert found.reward.shape == {"data": 2, "fsdp": 2, "tensor": 1}


def test_a_slice_may_be_one_device():
    found = views(train=(-1, 1, 1, "0-5"), generate=(-1, 1, 1, "7"))
    assert found.generate.mesh.devices.flat[0] == jax.devices()[7]
    assert found.generate.shape == {"data": 1, "fsdp": 1, "tensor": 1}


def test_one_device():
    found = views(devices=jax.devices()[:1])
    assert found.train.mesh.size == 1
    assert found.generate == found.train


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"train": (4, 4, 1)}, "placement.train needs 16 devices .* there are 8"),
        ({"generate": (-1, 3, 1)}, "placement.generate: 3 .* does not divide 8 devices"),
        ({"train": (2, 2, 1)}, "placement.train covers 4 of 8 devices"),
        ({"reward": (1, 1, 1)}, "placement.reward covers 1 of 8 devices"),
    ],
    ids=["larger than the devices", "does not divide", "trains on half", "scores on one"],
)
def test_layouts_that_do_not_cover_the_devices(roles, message):
    with pytest.raises(InputError, match=message):
        views(**roles)

"""Host memory between uses: the same bits, and devices that hold less meanwhile."""

import collections
import types

import jax
import numpy as np
import pytest

from rlhf_jax.config import load_config
from rlhf_jax.errors import InputError
from rlhf_jax.sharding.offload import check_offload
from rlhf_jax.trainers import pipeline, ppo_loop

from .test_pipeline import RUN, records, timeless

OFFLOAD = [f"placement.offload.{name}=true" for name in ("reference", "reward", "optimizer")]
SIZES = ["policy.shape.embed=64", "policy.shape.mlp=256"]  # parameters that outweigh a rollout


def live_by_kind():
    """Bytes of live buffers by memory kind, each counted once."""
    buffers = {
        (shard.device.id, shard.data.unsafe_buffer_pointer()): (array.sharding.memory_kind, shard.data.nbytes)
        for array in jax.live_arrays()
        for shard in array.addressable_shards
    }
    held = collections.Counter()
    for kind, size in buffers.values():
        held[kind] += size
    return held


def run(directory, monkeypatch, *settings):
    """Metrics of a whole run, and what was live before the first phase of its last iteration."""
    seen, whole = [], ppo_loop.iterate_with_batch

    def watched(*args):
        seen.append(live_by_kind())
        return whole(*args)

    monkeypatch.setattr(ppo_loop, "iterate_with_batch", watched)
    before = live_by_kind()
    # A save holds a copy of the state on the host, which on a CPU is where device arrays lie as well.
    config = load_config(None, [*RUN, *SIZES, f"run.dir={directory}", "run.save_every=100", *settings])
    pipeline.run(config)
    monkeypatch.undo()
    return [timeless(record) for record in records(directory)], seen[-1] - before


def test_offloading_changes_no_bit_and_frees_the_devices(tmp_path, monkeypatch):
    plain, on_device = run(tmp_path / "plain", monkeypatch)
    offloaded, shared = run(tmp_path / "offloaded", monkeypatch, *OFFLOAD)
    assert offloaded == plain
    assert on_device["pinned_host"] == 0
    # Actor and critic stay; their four moments, the reference and the reward model go.
    assert shared["pinned_host"] > 4 / 7 * on_device["device"]
    assert shared["device"] < 0.5 * on_device["device"]


def test_devices_without_host_memory_are_refused():
    memory = types.SimpleNamespace(kind="device")
    device = types.SimpleNamespace(addressable_memories=lambda: [memory], device_kind="toy")
    mesh = types.SimpleNamespace(devices=np.array([device]))
    views = types.SimpleNamespace(train=types.SimpleNamespace(mesh=mesh))
    check_offload(load_config(None, []), views)
    with pytest.raises(
        InputError, match=r"offload\.reward=true needs pinned_host memory, and toy has only device"
    ):
        check_offload(load_config(None, ["placement.offload.reward=true"]), views)

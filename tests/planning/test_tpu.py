"""A job of Llama-3-8B's shape compiled for TPUs that are not there: it fits, and moves what was counted.

Needs libtpu, installed or named by TPU_LIBRARY_PATH; minutes on two cores.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from rlhf_jax.config import load_config
from rlhf_jax.planning.report import plan
from rlhf_jax.planning.topology import devices_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ,
        reason="needs libtpu: pip install 'rlhf-jax[tpu-aot]', or TPU_LIBRARY_PATH",
    ),
]

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SLICE = "v5e:4x8"


@pytest.fixture(scope="module")
def llama():
    return plan(load_config(str(CONFIGS / "ppo-llama3-8b.yaml"), []), SLICE, only=("reshard", "update_actor"))


def figures(found, name):
    (one,) = [program for program in found.programs if program.name == name]
    return one


def test_the_actor_step_fits_beside_all_that_is_resident(llama):
    """8.03e9 parameters in float32 with two moments, over 32 chips, are 2.8 GiB."""
    update = figures(llama, "update_actor")
    assert llama.devices == 32
    assert update.refusal == ""
    assert llama.resident["actor"] == pytest.approx(8.03e9 * 12 / 32, rel=0.01)
    assert update.memory.aliased == pytest.approx(llama.resident["actor"], rel=0.01)
    assert update.peak > llama.resident_together + update.memory.temporaries
    assert llama.fits


def test_the_actor_step_gathers_and_scatters_its_parameters(llama):
    """Loops over micro-batches and layers are counted through: each layer's weights arrive in every pass."""
    traffic = figures(llama, "update_actor").collectives
    passes = 2 * 2 * 4  # epochs, minibatches, micro-batches
    layer = (
        2 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) / 4 * 7 / 8
    )  # bfloat16, of a tensor shard
    received = sum(traffic[kind].bytes for kind in ("all-gather", "collective-permute"))
    assert received > 2 * passes * 32 * layer  # forward and, recomputed, backward
    assert all(one.open_count == 0 for one in traffic.values())


def test_the_reshard_moves_the_bytes_that_were_counted(llama):
    reshard = figures(llama, "reshard")
    assert reshard.refusal == ""
    assert sum(one.bytes for one in reshard.collectives.values()) == llama.reshard_bytes


def test_no_tensor_is_copied_whole_between_two_layouts(llama):
    assert [one.rematerializations for one in llama.programs] == [0, 0]


def test_libtpu_says_where_it_copies_whole_tensors():
    """Otherwise the test above could not fail."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from rlhf_jax.planning.compiler_log import compiler_log, rematerializations

    mesh = Mesh(
        np.array(devices_of("v5e:2x4")).reshape(2, 2, 2), tuple("abc"), axis_types=(AxisType.Auto,) * 3
    )
    source, target = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec("a"), PartitionSpec(None, ("b", "c")))
    )
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=source)
    with compiler_log() as lines:
        jax.jit(lambda x: x, out_shardings=target).lower(x).compile()
    assert rematerializations(lines) == 1


SMALL = ["placement.train.fsdp=2", "placement.train.tensor=2", "placement.generate.tensor=2"]


@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2"])
def test_the_command_compiles_a_whole_small_job(topology):
    command = ["plan", str(CONFIGS / "quickstart.yaml"), "--compile", topology, "--json", *SMALL]
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_jax", *command], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert (done.stderr, found["devices"], found["fits"]) == ("", 8, True)
    assert sum(len(program["collectives"]) > 0 for program in found["programs"]) >= 8
    assert {program["refusal"] for program in found["programs"]} == {None}


def test_what_is_too_large_is_refused_with_the_compilers_reason():
    """All of Llama-3-8B's state on four chips of 16 GB."""
    config = load_config(
        str(CONFIGS / "ppo-llama3-8b.yaml"), ["placement.train.tensor=4", "placement.generate.tensor=4"]
    )
    found = plan(config, "v5e:2x2", only=("update_actor",))
    assert found.fits is False
    assert "HBM" in found.worst.refusal or "hbm" in found.worst.refusal

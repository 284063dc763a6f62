"""The compiler's stderr: caught, counted, and given on where it is no chatter."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlhf_jax.planning.compiler_log import compiler_log, rematerializations


def test_chatter_is_caught_and_the_rest_goes_on(capfd):
    with compiler_log() as lines:
        os.write(2, b"W1129 20:24:21.8 5 spmd_partitioner.cc:656] [SPMD] noise\nan error\n")
    assert [line.split()[-1] for line in lines] == ["noise", "error"]
    assert capfd.readouterr().err == "an error\n"
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_stderr_comes_back_after_an_error(capfd):
    with pytest.raises(KeyError), compiler_log():
        raise KeyError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


@pytest.mark.parametrize(
    ("target", "count"),
    [(PartitionSpec(None, ("b", "c")), 1), (PartitionSpec(), 0)],
    ids=["rows to other columns", "to all"],
)
def test_a_move_for_which_the_compiler_knows_no_short_way(target, count):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("a")))
    move = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, target))
    with compiler_log() as lines:
        move.lower(x).compile()
    assert rematerializations(lines) == count

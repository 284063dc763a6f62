"""What processes agree on: by itself in one process, and between two real ones."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlhf_jax.errors import InputError
from rlhf_jax.sharding import processes
from tests.two_processes import run_code

PRELUDE = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rlhf_jax.errors import InputError
from rlhf_jax.sharding import processes
from tests.sharding.test_processes import held_rows
me = jax.process_index()
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("row", "column"), axis_types=(AxisType.Auto,) * 2)
rows = NamedSharding(mesh, PartitionSpec("row"))
"""


def rows_sharding():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("row", "column"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec("row"))


def held_rows(x):
    """The numbers of x that are in this process's memory."""
    return np.unique(np.concatenate([shard.data for shard in x.addressable_shards])).astype(int).tolist()


def test_one_process_does_everything_itself():
    x = processes.put(np.arange(8.0), rows_sharding())
    assert processes.is_primary()
    np.testing.assert_array_equal(processes.fetch({"x": x})["x"], np.arange(8.0))
    np.testing.assert_array_equal(held_rows(x), np.arange(8))
    np.testing.assert_array_equal(
        processes.share_rows(lambda rows: 2 * np.asarray(rows), 5), 2 * np.arange(5)
    )
    assert processes.agreed(True)
    assert not processes.any_process(False)
    with pytest.raises(InputError, match="no"):
        processes.on_primary(lambda: (_ for _ in ()).throw(InputError("no")))


def test_two_processes_put_share_and_fetch_the_same_whole():
    ended = run_code(
        PRELUDE
        + """
asked = []
def twice(rows):
    asked.extend(rows)
    return np.stack([rows, 2 * np.asarray(rows)], 1)
whole = processes.share_rows(twice, 5)
x = processes.put(np.arange(8.0), rows)
key = processes.put_key(jax.random.key(3), NamedSharding(mesh, PartitionSpec()))
print("\\n" + json.dumps({
    "asked": asked, "whole": whole.tolist(), "held": held_rows(x),
    "fetched": processes.fetch(x * 3).tolist(), "uniform": float(jax.jit(jax.random.uniform)(key)),
    "any": bool(processes.any_process(me == 1)), "none": bool(processes.any_process(False)),
    "agreed": processes.agreed(me == 0),
}))
"""
    )
    said = []
    for code, out, err in ended:
        assert code == 0, err[-2000:]
        said.append(json.loads(out.strip().splitlines()[-1]))
    assert [words["asked"] for words in said] == [[0, 1, 2], [3, 4]]
    assert [words["held"] for words in said] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for words in said:
        assert words["whole"] == [[i, 2 * i] for i in range(5)]
        assert words["fetched"] == [3.0 * i for i in range(8)]
        assert words["uniform"] == float(jax.random.uniform(jax.random.key(3)))
        assert (words["any"], words["none"], words["agreed"]) == (True, False, True)


def test_an_error_in_one_process_is_raised_in_all():
    ended = run_code(
        PRELUDE
        + """
def work(rows):
    if 4 in rows:
        raise InputError("row 4 is bad")
    return rows
caught = []
for action in (lambda: processes.share_rows(work, 5),
               lambda: processes.on_primary(lambda: (_ for _ in ()).throw(InputError("taken")))):
    try:
        action()
    except InputError as error:
        caught.append(str(error))
processes.barrier("end")
print("\\n" + json.dumps(caught))
"""
    )
    for code, out, err in ended:
        assert code == 0, err[-2000:]
        assert json.loads(out.splitlines()[-1]) == ["process 1: row 4 is bad", "taken"]

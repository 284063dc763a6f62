"""A saved state comes back bit for bit, on any mesh, and a broken save is passed over."""

import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax import checkpoint
from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.errors import InputError
from tests import bucket


@struct.dataclass
class State:
    params: dict
    optimizer: optax.OptState
    key: jax.Array
    keys: jax.Array
    kl_coef: jax.Array


def mesh(*shape):
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("x", "y"))


def make_state(grid):
    """A state on the mesh that has been through an optimizer step, so that no moment is zero."""
    put = lambda x, *spec: jax.device_put(x, NamedSharding(grid, PartitionSpec(*spec)))  # noqa: E731
    params = {
        "layers": {"kernel": put(jax.random.normal(jax.random.key(1), (8, 16)), "x", "y")},
        "bias": put(jnp.linspace(-1, 1, 16, dtype=jnp.bfloat16), "y"),
    }
    optimizer = optax.adamw(1e-3)
    updates, moments = optimizer.update(params, optimizer.init(params), params)
    return State(
        params=optax.apply_updates(params, updates),
        optimizer=moments,
        key=put(jax.random.key(3)),
        keys=put(jax.random.split(jax.random.key(4), 8), "x"),
        kl_coef=put(jnp.float32(0.1)),
    )


def bits(leaf):
    """The leaf's words; a key's words are its data."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(bits(x), bits(y))


def laid_out_on(grid, state):
    """Shapes with the same specs on another mesh."""

    def abstract(x):
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(grid, spec))

    return jax.tree.map(abstract, state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    state = make_state(mesh(4, 2))
    checkpoints = Checkpoints(run_dir, "ppo", keep=2)
    assert checkpoints.latest_step() is None
    for step in (1, 2, 3):
        checkpoints.save(step, state, {"step": step, "best": {"score": 0.1 + 0.2}, "note": "ä"})
    checkpoints.close()
    return run_dir, state


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (8, 1), (1, 1)], ids=str)
def test_a_state_comes_back_bit_for_bit_on_another_mesh(saved, shape):
    run_dir, state = saved
    like = laid_out_on(mesh(*shape), state)
    restored, host = Checkpoints(run_dir, "ppo", keep=2).restore(3, like)
    assert host == {"step": 3, "best": {"score": 0.1 + 0.2}, "note": "ä"}
    assert_equal(state, restored)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert leaf.sharding == wanted.sharding


def test_the_state_itself_serves_as_the_pattern(saved):
    run_dir, state = saved
    restored, _ = Checkpoints(run_dir, "ppo", keep=2).restore(3, state)
    assert_equal(state, restored)
    assert jax.random.uniform(restored.key) == jax.random.uniform(state.key)


def test_the_newest_are_kept(saved):
    run_dir, _ = saved
    assert Checkpoints(run_dir, "ppo", keep=2).steps() == [2, 3]
    assert Checkpoints(run_dir, "reward", keep=2).steps() == []


def test_half_written_directories_are_passed_over(saved):
    run_dir, state = saved
    place = run_dir / "checkpoints" / "ppo"
    (place / "9").mkdir()
    (place / "7" / "state").mkdir(parents=True)
    (place / "8.orbax-checkpoint-tmp-1").mkdir()
    checkpoints = Checkpoints(run_dir, "ppo", keep=2)
    assert checkpoints.latest_step() == 3
    restored, _ = checkpoints.restore(3, state)
    assert_equal(state, restored)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda params: {**params, "bias": jax.ShapeDtypeStruct((4,), jnp.bfloat16)},
            r"params.bias is bfloat16\[16\] and bfloat16\[4\] is expected",
        ),
        (
            lambda params: {**params, "bias": jax.ShapeDtypeStruct((16,), jnp.float32)},
            r"params.bias is bfloat16\[16\] and float32\[16\]",
        ),
        (
            lambda params: {**params, "more": jax.ShapeDtypeStruct((4,), jnp.float32)},
            "has no params.more",
        ),
        (lambda params: {"layers": params["layers"]}, "holds params.bias, which is not wanted"),
    ],
    ids=["another shape", "another type", "a leaf too many", "a leaf too few"],
)
def test_a_checkpoint_of_another_state_names_the_leaf(saved, change, words):
    run_dir, state = saved
    like = laid_out_on(mesh(1, 1), state)
    with pytest.raises(InputError, match=words):
        Checkpoints(run_dir, "ppo", keep=2).restore(3, like.replace(params=change(like.params)))


@pytest.mark.parametrize("part", ["arrays", "host"])
def test_a_damaged_checkpoint_is_named_with_the_way_on(part, tmp_path):
    state = {"table": np.arange(100_000, dtype=np.float32)}
    checkpoints = Checkpoints(tmp_path, "ppo", keep=3)
    checkpoints.save(1, state, {"best": 1})
    checkpoints.wait()
    step = tmp_path / "checkpoints" / "ppo" / "1"
    if part == "host":
        next(file for file in (step / "host").rglob("*") if file.is_file()).write_text("{")
    else:
        largest = max(
            (file for file in step.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size
        )
        largest.write_bytes(largest.read_bytes()[:1000])
    with pytest.raises(
        InputError, match=r"ppo/1 cannot be read .*; remove this folder, and the run"
    ) as caught:
        checkpoints.restore(1, state)
    assert "\n" not in str(caught.value)


def test_python_numbers_belong_into_host(tmp_path):
    with pytest.raises(TypeError, match="count is int"):
        Checkpoints(tmp_path, "ppo", keep=1).save(1, {"count": 3}, {})


def test_a_save_after_half_written_directories_works(tmp_path):
    (tmp_path / "checkpoints" / "ppo" / "5").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, "ppo", keep=1)
    checkpoints.save(5, {"x": jnp.ones(3)}, {})
    assert checkpoints.latest_step() == 5
    checkpoints.save(6, {"x": jnp.ones(3)}, {})
    checkpoints.wait()
    assert checkpoints.steps() == [6]


def test_a_save_into_a_bucket_is_whole_once_it_is_committed(monkeypatch, tmp_path):
    """Nothing is renamed there: a killed save leaves everything but the last file."""
    bucket.mount(monkeypatch, tmp_path)
    checkpoints = Checkpoints("gs://run", "ppo", keep=2)
    state = {"x": jax.device_put(jnp.arange(8.0), NamedSharding(mesh(4, 2), PartitionSpec("x")))}
    for step in (1, 2, 3):
        checkpoints.save(step, state, {"step": step})
    checkpoints.close()
    assert Checkpoints("gs://run", "ppo", keep=2).steps() == [2, 3]
    (tmp_path / "run" / "checkpoints" / "ppo" / "3" / "commit_success.txt").unlink()
    again = Checkpoints("gs://run", "ppo", keep=2)
    assert again.latest_step() == 2
    restored, host = again.restore(2, laid_out_on(mesh(2, 4), state))
    assert host == {"step": 2}
    assert_equal(state, restored)
    again.save(3, state, {"step": 3})
    assert again.latest_step() == 3


def test_a_bucket_without_its_client_is_refused_before_anything_is_saved(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    with pytest.raises(InputError, match=r"run\.dir=gs://b/run: .* need google-cloud-storage .*; install it"):
        Checkpoints("gs://b/run", "ppo", keep=1)


def test_saving_says_nothing(tmp_path, capfd):
    with Checkpoints(tmp_path, "ppo", keep=1) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, {})
    assert capfd.readouterr() == ("", "")


def files_of(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def three(run_dir):
    """A phase with checkpoints 1, 2, 3 that differ, and the shapes to read them onto."""
    with Checkpoints(run_dir, "ppo", keep=3) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"x": np.full(1000, step, np.float32)}, {"step": step})
    return {"x": np.zeros(1000, np.float32)}


@pytest.mark.parametrize("harm", [cut, flip, pathlib.Path.unlink], ids=["cut", "flipped bit", "missing"])
def test_harm_to_any_file_is_named_and_the_checkpoint_before_is_used(harm, tmp_path, caplog):
    like = three(tmp_path / "whole")
    names = [file.relative_to(tmp_path / "whole") for file in files_of(tmp_path / "whole/checkpoints/ppo/3")]
    assert any("state" in name.parts for name in names)
    for number, name in enumerate(names):
        run_dir = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", run_dir)
        harm(run_dir / name)
        caplog.clear()
        step, state, host = Checkpoints(run_dir, "ppo", keep=3).resume(like)
        if name.name in ("_CHECKPOINT_METADATA", "commit_success.txt") and step == 3:
            np.testing.assert_array_equal(state["x"], 3.0)  # nothing is read from it
            continue
        assert (step, host) == (2, {"step": 2})
        np.testing.assert_array_equal(state["x"], 2.0)
        (line,) = [record.message for record in caplog.records]
        assert "ppo/3 is damaged: " in line
        assert line.endswith("the run goes on from the checkpoint of step 2")
        assert name.name in line or name.name == "checksums.json"


def test_several_damaged_checkpoints_are_passed_over_and_later_replaced(tmp_path, caplog):
    like = three(tmp_path)
    for step in (2, 3):
        (tmp_path / "checkpoints" / "ppo" / str(step) / "host" / "metadata").unlink()
    with Checkpoints(tmp_path, "ppo", keep=1) as checkpoints:
        assert checkpoints.resume(like).step == 1
        assert [("ppo/3 is" in r.message, "ppo/2 is" in r.message) for r in caplog.records] == [
            (True, False), (False, True),
        ]  # fmt: skip
        checkpoints.save(2, {"x": np.full(1000, 7, np.float32)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [2]  # neither counts among those that are kept
        np.testing.assert_array_equal(checkpoints.resume(like).state["x"], 7.0)


def test_a_phase_without_a_whole_checkpoint_does_not_begin_anew_unsaid(tmp_path):
    like = three(tmp_path)
    for step in (1, 2, 3):
        flip(
            max(files_of(tmp_path / "checkpoints" / "ppo" / str(step)), key=lambda file: file.stat().st_size)
        )
    with pytest.raises(
        InputError, match=r"ppo/3 is damaged: .*remove \S+/checkpoints/ppo to begin"
    ) as caught:
        Checkpoints(tmp_path, "ppo", keep=3).resume(like)
    assert "\n" not in str(caught.value)


def test_what_a_killed_save_left_is_said(tmp_path, caplog):
    like = three(tmp_path)
    (tmp_path / "checkpoints" / "ppo" / "4.orbax-checkpoint-tmp").mkdir()
    assert Checkpoints(tmp_path, "ppo", keep=3).resume(like).step == 3
    assert [r.message.split("/")[-1] for r in caplog.records] == [
        "4.orbax-checkpoint-tmp is half-written and passed over"
    ]


def test_a_save_goes_on_while_its_state_is_donated(tmp_path):
    """Bits of a later step would otherwise be in the checkpoint of an earlier one."""
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = step({"x": jnp.zeros(1 << 20), "y": jnp.ones((64, 64))})
    with Checkpoints(tmp_path, "ppo", keep=3) as checkpoints:
        for number in range(1, 4):
            checkpoints.save(number, state, {})
            assert checkpoints._writing == number
            for _ in range(5):
                state = step(state)
        checkpoints.wait()
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        for number in range(1, 4):
            restored, _ = checkpoints.restore(number, like)
            np.testing.assert_array_equal(restored["x"], 5.0 * number - 4)
            np.testing.assert_array_equal(restored["y"], 5.0 * number - 3)


def test_a_save_from_host_memory_is_waited_for(tmp_path):
    """Offloaded moments are not copied, so that the next step must not have them before they are written."""
    place = NamedSharding(mesh(4, 2), PartitionSpec("x"), memory_kind="pinned_host")
    with Checkpoints(tmp_path, "ppo", keep=1) as checkpoints:
        checkpoints.save(1, {"x": jax.device_put(jnp.arange(8.0), place)}, {})
        assert Checkpoints(tmp_path, "ppo", keep=1).steps() == [1]


def test_a_checkpoint_counts_only_once_all_of_it_is_there(tmp_path, monkeypatch):
    """The old one is removed after that, and not before."""
    seen = []

    def finalize(self, directory):
        seen.append(Checkpoints(tmp_path, "ppo", keep=1).steps())
        whole(self, directory)
        seen.append(Checkpoints(tmp_path, "ppo", keep=1).steps())

    whole = checkpoint._Handler.finalize
    monkeypatch.setattr(checkpoint._Handler, "finalize", finalize)
    with Checkpoints(tmp_path, "ppo", keep=1) as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)}, {})
        checkpoints.save(2, {"x": jnp.ones(3)}, {})
    assert seen == [[], [], [1], [1]]
    assert checkpoints.steps() == [2]


LITTLE_ROOM = """
import resource, sys, time
import numpy as np
from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.errors import InputError

state = {"x": np.zeros(1000, np.float32)}
with Checkpoints(sys.argv[1], "ppo", keep=1) as first:
    first.save(0, state, {})
checkpoints = Checkpoints(sys.argv[1], "ppo", keep=1)
assert checkpoints.resume(state).step == 0
checkpoints.save(1, state, {"best": 1})
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    checkpoints.save(2, {"x": np.random.default_rng(0).random(1_000_000)}, {})
    END
except InputError as error:
    print(error)
"""
WAIT, LOOK = "checkpoints.wait()", "for _ in range(600): checkpoints.look(); time.sleep(0.1)"


@pytest.mark.parametrize("end", [WAIT, LOOK], ids=["waited for", "noticed in the background"])
def test_a_save_that_finds_no_room_leaves_the_one_before(tmp_path, end):
    script = LITTLE_ROOM.replace("END", end)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    place = tmp_path / "checkpoints" / "ppo"
    remedy = "free some space, and the same command goes on from step 1"
    assert done.stdout == f"{place / '2'} cannot be written: File too large; {remedy}\n", done.stderr
    assert done.stderr == ""
    assert [entry.name for entry in place.iterdir()] == ["1"]
    like = {"x": np.zeros(1000, np.float32)}
    assert Checkpoints(tmp_path, "ppo", keep=1).resume(like).host == {"best": 1}


def test_room_is_looked_for_before_anything_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, "ppo", keep=1)
    monkeypatch.setattr(checkpoint, "free_bytes", lambda place: 3999)
    words = (
        "ppo/1 cannot be written: 4,000 bytes are needed and 3,999 are free; .* from the beginning of this"
    )
    with pytest.raises(InputError, match=words):
        checkpoints.save(1, {"x": np.zeros(1000, np.float32)}, {})
    assert list((tmp_path / "checkpoints" / "ppo").iterdir()) == []
    monkeypatch.setattr(checkpoint, "free_bytes", lambda place: 4000)
    checkpoints.save(1, {"x": np.zeros(1000, np.float32)}, {})
    checkpoints.close()


def test_another_machine_is_said(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    like = three(tmp_path)
    Checkpoints(tmp_path, "ppo", keep=3).resume(like)
    assert caplog.messages == []
    here = checkpoint.machine()
    assert here["devices"] == "8 x cpu"
    assert here["cpu_cores"] == len(os.sched_getaffinity(0))
    monkeypatch.setattr(checkpoint, "machine", lambda: here | {"cpu_cores": 123})
    Checkpoints(tmp_path, "ppo", keep=3).resume(like)
    (line,) = caplog.messages
    assert f"ppo: saved on 8 x cpu with {here['cpu_cores']} CPU cores" in line
    assert "goes on with 8 x cpu with 123 CPU cores" in line
    assert "equal to rounding, not bit for bit" in line

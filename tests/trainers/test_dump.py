"""A run whose updates are not finite stops with its last good state, and its dump is replayed."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import cli
from rlhf_jax.checkpoint import Checkpoints
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import read_metrics
from rlhf_jax.trainers import pipeline, replay
from rlhf_jax.trainers.debug import debug
from rlhf_jax.trainers.dump import read_dump, write_dump
from rlhf_jax.trainers.findings import nearest_state
from rlhf_jax.trainers.optimizer import Diverged
from rlhf_jax.trainers.ppo_loop import iterate_with_batch
from rlhf_jax.trainers.timing import CompileClock, PhaseTimer

CALLS = []


def explodes_later(prompts, responses):
    """Scores of a sane size for two iterations; then such that their squares overflow."""
    CALLS.append(len(responses))
    size = 1.0 if len(CALLS) <= 2 else 3e38
    return [size * (-1) ** i for i in range(len(responses))]


# One device and one layer: programs that compile in a moment.
SMALL = [
    "policy.shape.layers=1",
    "placement.train.fsdp=1",
    "placement.train.tensor=1",
    "placement.train.devices=0-0",
    "placement.generate.devices=0-0",
]
FUNCTION = [
    *SMALL,
    f"reward.function={__name__}:explodes_later",
    "ppo.iterations=20",
    "run.save_every=100",
    "run.profile_every=0",
]


@pytest.fixture
def diverged(tiny, tmp_path):
    """The directory of a run that stopped because its updates were not finite."""
    CALLS.clear()
    with pytest.raises(Diverged, match="updates in a row were not finite"):
        pipeline.ppo(tiny(*FUNCTION, "ppo.kl_target=3.0"))
    return tmp_path / "run"


def test_a_run_that_diverges_keeps_its_last_good_state_and_what_it_learnt_from(diverged, tiny, capsys):
    records = [r for r in read_metrics(diverged) if r["phase"] == "ppo"]
    steps = {r["step"]: r for r in records}
    assert max(steps) < 8  # it stopped, and not at its end
    assert [steps[i]["critic/skipped"] for i in (1, 2, 3, 4)] == [0, 0, 4, 4]  # 2 epochs of 2 minibatches
    assert all(r["reward/kl_coef"] is not None for r in records)  # the KL coefficient stays a number
    (saved,) = Checkpoints(diverged, "ppo", keep=2).steps()
    assert saved == max(steps)
    # the first step of the row of bad ones, and those at its end
    dumped = sorted(int(entry.name) for entry in (diverged / "dumps" / "ppo").iterdir())
    assert dumped[0] == 3
    assert dumped[-1] in (saved, saved - 1)
    notes = json.loads((diverged / "dumps" / "ppo" / str(dumped[-1]) / "dump.json").read_text())
    assert notes["nonfinite_gradients"]
    assert set(notes["versions"]) >= {"rlhf_jax", "jax", "numpy"}
    assert notes["metrics"]["critic/bad_steps"] >= 5

    said = debug(diverged / "dumps" / "ppo" / "3", [])
    assert "its updates were made from this state" in said
    assert "nan" not in said
    assert "fault reproduced: 8 of 8 updates are not finite" in said
    assert "first that is not finite: input: " in said
    assert "skipped updates: 4 of the actor, 4 of the critic" in said
    assert cli_says(["debug", str(diverged / "dumps" / "ppo" / str(dumped[-1]))], capsys) == 0


def cli_says(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert "fault reproduced" in out, err
    return caught.value.code


@pytest.mark.slow
def test_a_bad_last_step_ends_the_run_too(tiny):
    """The last iterations' updates were looked at by none."""
    CALLS.clear()
    with pytest.raises(Diverged):
        pipeline.ppo(tiny(*FUNCTION, "ppo.iterations=3", "run.max_bad_steps=4"))
    assert len(CALLS) == 3


def task_and_learner(config):
    with pipeline._job(config, "ppo") as job:
        task, first_learner = pipeline._ppo_task(job)
    return task, first_learner()


def batch_of(task, learner):
    *_, batch = iterate_with_batch(task, copied(learner), 0, PhaseTimer(CompileClock(), enabled=False))
    return batch


def copied(learner):
    return jax.tree.map(jnp.copy, learner)


def spoiled(params, path, value):
    """The tree with one entry of one leaf changed."""
    name, *rest = path
    if rest:
        return {**params, name: spoiled(params[name], rest, value)}
    leaf = params[name]
    host = np.array(leaf)
    host.ravel()[-1] = value
    return {**params, name: jax.device_put(host, leaf.sharding)}


LENGTHS = f"reward.function={__name__}:lengths"


def lengths(prompts, responses):
    return [float(len(response)) for response in responses]


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    from rlhf_jax.config import load_config
    from tests.trainers.conftest import TINY

    folder = tmp_path_factory.mktemp("replay")
    task, learner = task_and_learner(load_config(None, [*TINY, LENGTHS, f"run.dir={folder / 'run'}"]))
    return task, learner, batch_of(task, learner)


def roles(task, learner, **changed):
    return {role.name: role for role in replay.roles_of(task, learner, warming_up=False)}


def test_a_finite_update_is_told_as_finite(separate):
    task, learner, batch = separate
    found = roles(task, learner)
    assert list(found) == ["critic", "actor"]
    for role in found.values():
        looked = list(replay.look(task, role, batch))
        assert len(looked) == 4
        assert all(one.finite for one in looked)
    assert looked[0].outputs["ratio"][1:] == pytest.approx((1.0, 1.0), abs=1e-3)
    assert replay.nonfinite_gradients(task, learner, batch) == {}
    assert replay.first_bad_module(found["actor"], batch, np.arange(4)) is None


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_a_bad_weight_is_found_by_its_module(separate, kind):
    """One entry of the second layer's feed-forward weights is infinite."""
    task, learner, batch = separate
    state = getattr(learner, kind)
    params = spoiled(state.params, ("layers", "mlp", "down", "kernel"), np.inf)
    learner = dataclasses.replace(learner, **{kind: dataclasses.replace(state, params=params)})
    role = roles(task, learner)[kind]
    assert list(replay.nonfinite_leaves(role.params)) == [f"{kind}/layers/mlp/down/kernel"]
    looked = next(iter(replay.look(task, role, batch)))
    assert not looked.finite
    rows = replay.order_of(task, batch)[0]
    assert replay.first_bad_module(role, batch, rows) == f"{kind}: layers_1/mlp/down (Linear.__call__)"
    assert any(
        name.startswith(f"{kind}/layers/") for name in replay.nonfinite_gradients(task, learner, batch)
    )


def test_a_shared_critic_is_replayed_too(tiny):
    task, learner = task_and_learner(tiny(*SMALL, LENGTHS, "critic.shared=true"))
    batch = batch_of(task, learner)
    (role,) = replay.roles_of(task, learner, warming_up=False)
    assert all(one.finite for one in replay.look(task, role, batch))
    broken = dataclasses.replace(batch.experience, returns_BT=batch.experience.returns_BT * jnp.nan)
    looked = next(iter(replay.look(task, role, dataclasses.replace(batch, experience=broken))))
    assert looked.terms["vf_loss"][0] == 1
    assert looked.terms["pg_loss"][0] == 0
    (head,) = replay.roles_of(task, learner, warming_up=True)
    looked = next(iter(replay.look(task, head, batch)))
    assert {name.split("/")[0] for name in looked.gradients} == {"critic"}


def test_dumps_are_read_as_they_were_written_and_the_newest_are_kept(separate, tmp_path):
    _, _, batch = separate
    for step in (1, 2, 9, 10):
        write_dump(tmp_path, "ppo", step, batch, {"critic/loss": np.float32(np.nan), "critic/skipped": 4.0})
    assert sorted(int(entry.name) for entry in (tmp_path / "dumps" / "ppo").iterdir()) == [2, 9, 10]
    dump = read_dump(tmp_path / "dumps" / "ppo" / "10")
    assert dump.metrics == {"critic/loss": None, "critic/skipped": 4.0}
    assert (dump.phase, dump.step, dump.batch.warming_up) == ("ppo", 10, False)
    jax.tree.map(np.testing.assert_array_equal, dump.batch.experience, jax.device_get(batch.experience))
    key = jax.random.key_data(dump.batch.shuffle_key)
    np.testing.assert_array_equal(key, jax.random.key_data(batch.shuffle_key))


@pytest.mark.parametrize("damage", ["no dump", "cut short", "an array is missing", "of no phase"])
def test_what_is_no_dump_is_refused_in_one_line(separate, tmp_path, damage):
    _, _, batch = separate
    place = tmp_path / "dumps" / "ppo" / "1"
    if damage != "no dump":
        write_dump(tmp_path, "ppo", 1, batch, {})
    if damage == "cut short":
        (place / "arrays.npz").write_bytes((place / "arrays.npz").read_bytes()[:200])
    if damage == "of no phase":
        notes = json.loads((place / "dump.json").read_text())
        (place / "dump.json").write_text(json.dumps(notes | {"phase": "eval"}))
    if damage == "an array is missing":
        np.savez(place / "arrays.npz", kl_coef=np.float32(1))
    with pytest.raises(InputError, match="is no dump" if damage == "no dump" else "damaged"):
        debug(place, [])


def test_a_dump_without_its_run_is_refused(separate, tmp_path):
    write_dump(tmp_path, "ppo", 1, separate[2], {})
    with pytest.raises(InputError, match=r"has no config\.yaml"):
        debug(tmp_path / "dumps" / "ppo" / "1", [])


def test_the_nearest_state_is_the_one_with_the_fewest_updates_between():
    records = [
        {"phase": "ppo", "step": step, "actor/optimizer_steps": n, "critic/optimizer_steps": n}
        for step, n in ((1, 2), (2, 2), (3, 0), (4, 0), (5, 2))
    ]
    assert nearest_state([1, 2], records, 3) == (2, 0)
    assert nearest_state([1, 4], records, 3) == (4, 0)  # nothing was learnt in between
    assert nearest_state([1, 5], records, 3)[1] == 4
    with pytest.raises(InputError, match="no checkpoint"):
        nearest_state([], records, 3)
    steps = [{"phase": "sft", "step": step, "sft/skipped": step in (2, 3)} for step in (1, 2, 3, 4)]
    assert nearest_state([1, 4], steps, 3) == (1, 0)
    assert nearest_state([4], steps, 3) == (4, 1)


@pytest.mark.parametrize(("phase", "layout"), [("sft", SMALL), ("reward", ["lora.rank=2"])])
def test_fine_tuning_and_the_reward_model_leave_dumps_too(tiny, tmp_path, phase, layout, capsys):
    """The first update throws the weights so far that the second forward pass overflows."""
    rate = [f"{phase}.learning_rate=1e30", f"{phase}.schedule=constant", f"{phase}.warmup_fraction=0"]
    config = tiny(*layout, *rate, "sft.epochs=" + "01"[phase == "sft"], "run.max_bad_steps=3")
    with pytest.raises(Diverged, match=f"3 updates in a row .*rlhf-jax debug .*/dumps/{phase}/4`"):
        {"sft": pipeline.sft, "reward": pipeline.reward}[phase](config)
    dumps = tmp_path / "run" / "dumps" / phase
    assert sorted(entry.name for entry in dumps.iterdir()) == ["2", "4"]
    assert cli_says(["debug", str(dumps / "4")], capsys) == 0
    said = debug(dumps / "2", [])
    assert "its updates were made from this state" in said
    assert "fault reproduced: 1 of 1 updates are not finite" in said
    assert re.search(r"first that is not finite: (output|gradient) of ", said), said
    assert {"sft": "log-probabilities", "reward": "scores"}[phase] in said
    np.savez(dumps / "2" / "arrays.npz", tokens_GRL=np.zeros(1))
    with pytest.raises(InputError, match=f"has other arrays than a batch of {phase}; it is damaged"):
        debug(dumps / "2", [])


def test_an_evaluation_that_is_not_finite_is_never_the_best(tiny, tmp_path):
    """The checkpoint's JSON refused it with a traceback."""
    rate = ["reward.learning_rate=1e30", "reward.schedule=constant", "reward.warmup_fraction=0"]
    with pytest.raises(Diverged, match=r"reward: no evaluation was finite; lower reward\.learning_rate"):
        pipeline.reward(tiny("lora.rank=2", *rate, "run.max_bad_steps=100"))
    assert not (tmp_path / "run" / "best_reward_model").exists()

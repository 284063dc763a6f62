"""A tiny job compiled for eight virtual devices: every byte of its state, its programs, tables and JSON."""

import dataclasses
import json
import re

import jax
import pytest

from rlhf_jax.config import load_config
from rlhf_jax.errors import InputError
from rlhf_jax.planning.collectives import Traffic
from rlhf_jax.planning.measure import Figures, Memory, measure, resident_bytes
from rlhf_jax.planning.programs import ppo_job
from rlhf_jax.planning.report import Plan, as_json, as_text, plan

SHAPE = ("vocab_size=512", "layers=2", "embed=32", "heads=4", "kv_heads=2", "mlp=64", "max_positions=64")
TINY = [
    *(f"policy.shape.{item}" for item in SHAPE),
    "policy.shape.tied=false",
    "reward.model=policy",
    "ppo.batch_size=16",
    "ppo.minibatches=2",
    "rollout.prompt_length=16",
    "rollout.response_length=8",
    "placement.train.fsdp=2",
    "placement.train.tensor=2",
    "placement.generate.tensor=2",
]
PROGRAMS = [
    "reshard",
    "generate",
    "values",
    "reference_logprobs",
    "score",
    "experience",
    "update_critic",
    "update_actor",
]
EMBED, UNEMBED = 512 * 32, 32 * 512
LAYER = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64  # q, k and v, o, gate and up and down
NORMS = 32 + 2 * 2 * 32


def configure(*overrides):
    return load_config(None, [*TINY, *overrides])


@pytest.fixture(scope="module")
def tiny():
    return plan(configure(), "host", only=("reshard", "update_actor"))


def test_what_is_resident_by_hand():
    """Matrices lie in four parts, scalar heads in two, norms whole; Adam's moments are as the parameters."""
    job = ppo_job(configure(), jax.devices())
    matrices = (EMBED + UNEMBED + 2 * LAYER) // 4
    trunk = (EMBED + 2 * LAYER) // 4 + NORMS + 32 // 2
    counters = 4 * 4  # Adam's, the schedule's, steps and bad steps
    found = {role: set(resident_bytes(tree).values()) for role, tree in job.resident.items()}
    assert found == {
        "actor": {3 * 4 * (matrices + NORMS) + counters},
        "critic": {3 * 4 * trunk + counters},
        "reference": {4 * (matrices + NORMS)},
        "reward": {4 * trunk},
    }


def test_an_iteration_is_these_programs():
    assert [program.name for program in ppo_job(configure(), jax.devices()).programs] == PROGRAMS
    by_function = ppo_job(configure("reward.function=a:b"), jax.devices())
    assert [program.name for program in by_function.programs] == [n for n in PROGRAMS if n != "score"]
    assert set(by_function.resident) == {"actor", "critic", "reference"}
    recomputing = ppo_job(configure("ppo.old_logprobs=recompute"), jax.devices())
    assert [program.name for program in recomputing.programs] == [
        *PROGRAMS[:2],
        "old_logprobs",
        *PROGRAMS[2:],
    ]


@pytest.mark.parametrize("old_logprobs", ["rollout", "recompute"])
def test_every_program_lowers(old_logprobs):
    for program in ppo_job(configure(f"ppo.old_logprobs={old_logprobs}"), jax.devices()).programs:
        assert all(lowered.as_text() and times > 0 for lowered, times in program.lower())


def test_the_reshard_moves_what_was_counted(tiny):
    reshard, _ = tiny.programs
    assert tiny.reshard_bytes > 0
    assert sum(t.bytes for t in reshard.collectives.values()) == tiny.reshard_bytes
    assert reshard.rematerializations == 0


def test_memory_adds_up(tiny):
    """The actor's state is donated, so that what the update needs beyond it is its batch and temporaries."""
    reshard, update = tiny.programs
    assert update.memory.aliased == pytest.approx(tiny.resident["actor"], rel=0.01)
    assert update.beyond == update.memory.sum - tiny.resident["actor"]
    assert update.memory.temporaries < update.beyond
    assert update.peak == tiny.resident_together + update.beyond
    assert tiny.resident_together == sum(tiny.resident.values())
    model = 4 * (EMBED + UNEMBED + 2 * LAYER) // 2 + 4 * NORMS  # in two parts
    assert reshard.memory.outputs == pytest.approx(model, rel=0.01)
    assert tiny.worst is update
    assert tiny.fits is None


def figures(name, beyond, peak, **more):
    return Figures(
        name, 1.25, Memory(5, 4, 3, 2, 1), {"all-gather": Traffic(3, 2.0**21)}, beyond, peak, **more
    )


def made(*programs, memory=2**31):
    return Plan("v5e:2x2", 4, "TPU v5 lite", memory, 4e12, 8e12, {"actor": 2**30}, 2**30, [*programs], 7)


def test_memory_of_computations_in_a_row():
    assert Memory(1, 2, 3, 4, 5).then(Memory(10, 20, 30, 3, 6), times=2) == Memory(21, 42, 63, 4, 6)


def test_the_verdict():
    small, large = figures("reshard", 5, 2**30), figures("generate", 6, 3 * 2**30)
    assert made(small).fits
    assert not made(small, large).fits
    assert made(small, memory=None).fits is None
    assert as_text(made(small)).endswith("fits: reshard needs 1.00 of 2.00 GiB")
    assert as_text(made(small, large)).endswith("does not fit: generate needs 3.00 of 2.00 GiB")
    refused = made(small, figures("update_actor", 0, 0, refusal="Ran out of memory on HBM"))
    assert refused.fits is False
    text = as_text(refused)
    assert "update_actor does not compile for these devices: Ran out of memory on HBM" in text
    assert text.endswith("does not fit")


def test_the_text_says_what_was_measured(tiny):
    text = as_text(made(figures("reshard", 5, 2**30, rematerializations=2)))
    assert "v5e:2x2: 4 x TPU v5 lite, 2.00 GiB for programs on each" in text
    assert "8e+12 model FLOPs, 2.0 s at the chips' bfloat16 peak" in text
    assert re.search(r"^reshard +all-gather +3 +2\.0$", text, re.M)
    assert "rematerialization): 2" in text
    assert "reshard: a device receives 0.0 MiB by the two layouts, 2.0 MiB by its collectives" in text
    own = as_text(tiny)
    assert own.startswith("host: 8 x cpu\n")
    assert re.search(r"^update_actor( +\d+\.\d+){8}$", own, re.M)


def test_json_holds_plain_values(tiny):
    found = json.loads(json.dumps(as_json(tiny)))
    assert (found["devices"], found["fits"], found["worst"]) == (8, None, "update_actor")
    assert found["peak_bytes"] == found["programs"][1]["peak_bytes"] == tiny.worst.peak
    assert found["programs"][0]["memory_bytes"] == dataclasses.asdict(tiny.programs[0].memory)
    assert found["programs"][0]["refusal"] is None


def test_a_critic_from_the_reward_model():
    job = ppo_job(configure("critic.init=reward"), jax.devices())
    assert set(job.resident["critic"].params) == set(job.resident["reward"])
    with pytest.raises(InputError, match=r"critic\.init=reward: the reward model is a function"):
        ppo_job(configure("critic.init=reward", "reward.function=a:b"), jax.devices())


def test_a_layout_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="does not divide 8 devices"):
        plan(configure("placement.train.fsdp=3"), "host")


SPLIT = [
    *("placement.train.devices=0-3", "placement.generate.devices=4-7"),
    *("placement.critic.fsdp=4", "placement.critic.devices=4-7"),
    *("placement.reference.tensor=2", "placement.reference.devices=4-7"),
]


def test_roles_on_slices_of_their_own():
    """Each device has what its roles keep there, and a program's peak is on its own devices."""
    job = ppo_job(configure(*SPLIT), jax.devices())
    held = resident_bytes(job.resident)
    parts = {role: resident_bytes(tree) for role, tree in job.resident.items()}
    first, last = jax.devices()[0], jax.devices()[7]
    assert held[first] == parts["actor"][first] + parts["reward"][first]
    assert held[last] == parts["critic"][last] + parts["reference"][last]
    for one in measure(job, ["reference_logprobs", "values", "update_critic"]):
        assert one.peak == held[last] + one.beyond
    (update,) = measure(job, ["update_actor"])
    assert update.peak == held[first] + update.beyond


def test_what_is_offloaded_is_resident_no_longer_and_comes_for_its_program():
    offload = [f"placement.offload.{what}=true" for what in ("reference", "reward", "optimizer")]
    device = jax.devices()[0]
    jobs = [ppo_job(configure(*more), jax.devices()) for more in ((), offload)]
    here, away = ({role: resident_bytes(tree)[device] for role, tree in job.resident.items()} for job in jobs)
    moments = 2 * here["reference"] + 8  # two per parameter of the actor, and two counters
    assert away == {
        "actor": here["actor"] - moments,
        "critic": here["critic"] - (2 * resident_bytes(jobs[0].resident["critic"].params)[device] + 8),
        "reference": 0,
        "reward": 0,
    }
    names = ["reference_logprobs", "update_actor"]
    (reference, update), (fetched, updated) = (measure(job, names) for job in jobs)
    assert fetched.beyond == pytest.approx(reference.beyond + here["reference"], rel=0.01)
    assert updated.beyond == pytest.approx(update.beyond + moments, rel=0.01)


def test_a_critic_on_the_policys_trunk():
    """It costs its head, in the two programs that do the work of all."""
    job = ppo_job(configure("critic.shared=true"), jax.devices())
    held = {role: max(resident_bytes(tree).values()) for role, tree in job.resident.items()}
    assert held["critic"] < 0.02 * held["actor"]
    both = measure(job, ["values", "update_both"])
    assert [one.name for one in both if not one.refusal] == ["values", "update_both"]


def test_adapters_lie_beside_the_references_own_parameters():
    job = ppo_job(configure("lora.rank=2"), jax.devices())
    held = {role: max(resident_bytes(tree).values(), default=0) for role, tree in job.resident.items()}
    assert held["bases"] == 0  # actor and critic add nothing to the reference
    assert held["actor"] < 0.5 * held["reference"]
    apart = ppo_job(configure("lora.rank=2", "placement.reference.tensor=4"), jax.devices())
    expected = ppo_job(configure(), jax.devices()).resident["reference"]
    assert resident_bytes(apart.resident["bases"]) == resident_bytes(expected)
    for program in job.programs:
        assert all(lowered.as_text() and times > 0 for lowered, times in program.lower())


def test_shapes_lie_where_arrays_would():
    job = ppo_job(configure("placement.reference.tensor=4"), jax.devices())
    leaf = job.resident["reference"]["layers"]["mlp"]["up"]["kernel"]
    assert (leaf.shape, leaf.sharding.shard_shape(leaf.shape)) == ((2, 32, 64), (2, 32, 16))

"""Collectives counted in text by hand, in the forms of libtpu, and in programs whose traffic is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rlhf_jax.planning.collectives import Traffic, add, collectives


def module(*instructions, devices=8, more=""):
    """A module whose entry holds these instructions."""
    lines = "\n".join(f"  %v{number} = {one}" for number, one in enumerate(instructions))
    return (
        f"HloModule m, num_partitions={devices}\n{more}\nENTRY %main (x: f32[4]) -> f32[4] {{\n{lines}\n}}\n"
    )


EIGHT = "replica_groups=[1,8]<=[8]"
FORMS = {
    "all-gather": (f"f32[64]{{0}} all-gather(%x), {EIGHT}", "all-gather", 64 * 4 * 7 / 8),
    "all-reduce": (f"f32[64] all-reduce(%x), {EIGHT}, to_apply=%add", "all-reduce", 2 * 256 * 7 / 8),
    "reduce-scatter": (f"bf16[8] reduce-scatter(%x), {EIGHT}, dimensions={{0}}", "reduce-scatter", 16 * 7),
    "all-to-all": (f"(f32[8], f32[8]) all-to-all(%x, %y), {EIGHT}", "all-to-all", 64 * 7 / 8),
    "permute": ("f32[16] collective-permute(%x), source_target_pairs={{0,1}}", "collective-permute", 64),
    "two groups of four": ("f32[64] all-gather(%x), replica_groups=[2,4]<=[8]", "all-gather", 192),
    "listed groups": ("f32[64] all-gather(%x), replica_groups={{0,1},{2,3}}, x={1}", "all-gather", 128),
    "all devices": ("f32[64] all-gather(%x), replica_groups={}, dimensions={0}", "all-gather", 224),
    "named axes": (
        "f32[64] all-gather(%x), replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}",
        "all-gather",
        192,
    ),
    "part of a named axis": (
        "f32[64] all-gather(%x), replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a','b':(2)2}",
        "all-gather",
        192,
    ),
    "started": (
        f"(f32[8]{{0}}, f32[64]{{0:T(8,128)}}, u32[]) all-gather-start(%x), {EIGHT}",
        "all-gather",
        224,
    ),
    "started together": (
        f"((f32[8], f32[1]), (f32[64], f32[8])) all-gather-start(%x, %y), {EIGHT}",
        "all-gather",
        252,
    ),
    "started reduction": (f"f32[64] all-reduce-start(%x), {EIGHT}, to_apply=%add", "all-reduce", 448),
}


@pytest.mark.parametrize(("instruction", "kind", "size"), FORMS.values(), ids=FORMS.keys())
def test_one_operation(instruction, kind, size):
    assert collectives(module(instruction)) == {kind: Traffic(1, size)}


def test_the_end_of_a_started_operation_and_other_work_count_nothing():
    assert collectives(module("f32[64] all-gather-done(%v0)", "f32[64] add(%x, %x)", "f32[4] copy(%x)")) == {}


BODIES = """
%body (p: f32[4]) -> f32[4] {
  %ag = f32[64] all-gather(%p), replica_groups=[1,8]<=[8]
}
%big (p: f32[4]) -> f32[4] {
  %ag = f32[128] all-gather(%p), replica_groups=[1,8]<=[8]
}
%nested (p: f32[4]) -> f32[4] {
  %w = f32[4] while(%p), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_loops_multiply_and_open_loops_stand_apart():
    known = 'f32[4] while(%x), condition=%cond, body=%nested, backend_config={"known_trip_count":{"n":"5"}}'
    unknown = "f32[4] while(%x), condition=%cond, body=%nested"
    assert collectives(module(known, more=BODIES)) == {"all-gather": Traffic(15, 15 * 224)}
    assert collectives(module(unknown, more=BODIES)) == {"all-gather": Traffic(0, 0.0, 3, 3 * 224)}
    assert collectives(module(known, unknown, more=BODIES)) == {
        "all-gather": Traffic(15, 15 * 224, 3, 3 * 224)
    }


def test_of_a_conditional_the_branch_that_moves_most_counts():
    either = "f32[4] conditional(%i, %x, %x), branch_computations={%body, %big, %empty}"
    assert collectives(module(either, more=BODIES)) == {"all-gather": Traffic(1, 448)}


def test_a_chain_of_fusions_counts_once_and_a_fused_scatter_is_one():
    """libtpu repeats an operation in every fusion that it runs beside."""
    chain = """
%fused (p: f32[8]) -> f32[64] {
  %ag = f32[64] all-gather(%p), replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
}
%all-reduce-scatter.1 (p: f32[64]) -> f32[8] {
  %ar = f32[64] all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
}
"""
    lines = [
        "f32[64] fusion(%x), kind=kCustom, calls=%fused",
        "f32[8] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1",
    ]
    text = module(*lines, more=chain)
    text = text.replace("  %v0", "  %async-collective-start.3 = f32[64] fusion(%x), calls=%fused\n  %v0")
    assert collectives(text) == {"all-gather": Traffic(1, 224), "reduce-scatter": Traffic(1, 224)}


def test_totals_add_up_by_kind():
    one = {"all-gather": Traffic(1, 2.0)}
    other = {"all-gather": Traffic(0, 0.0, 3, 4.0), "all-reduce": Traffic(5, 6.0)}
    assert add([one, other]) == {"all-gather": Traffic(1, 2.0, 3, 4.0), "all-reduce": Traffic(5, 6.0)}


MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def place(*spec):
    return NamedSharding(MESH, PartitionSpec(*spec))


def text_of(function, source, target, shape=(64, 32)):
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=source)
    return jax.jit(function, out_shardings=target).lower(x).compile().as_text()


@pytest.mark.parametrize(
    ("source", "target", "kind", "share"),
    [
        (("b",), (), "all-gather", 3 / 4),
        ((("a", "b"),), (), "all-gather", 7 / 8),
        ((("a", "b"),), ("a",), "all-gather", 3 / 8),
        (("b",), (None, "b"), "all-to-all", 3 / 16),
    ],
    ids=["four to all", "eight to all", "eight to two", "rows to columns"],
)
def test_a_known_array_between_layouts(source, target, kind, share):
    """The bytes that a device lacks of its new shard of a [64, 32] array of 8,192 bytes."""
    found = collectives(text_of(lambda x: x, place(*source), place(*target)))
    assert set(found) == {kind}
    assert found[kind].bytes == pytest.approx(8192 * share)


def test_a_sum_over_devices_inside_a_scan():
    """Each of five passes sums rows over the four devices of `b`: 32 floats, 2 * 3/4 of them received."""

    def passes(x):
        keep = functools.partial(jax.lax.with_sharding_constraint, shardings=place("b"))

        def step(total, _):
            row = jax.lax.with_sharding_constraint(keep(jnp.sin(x + total[None])).sum(0), place())
            return row, None

        return jax.lax.scan(step, jnp.zeros(32), None, length=5)[0]

    found = collectives(text_of(passes, place("b"), place()))
    assert found == {"all-reduce": Traffic(5, 5 * 32 * 4 * 2 * 3 / 4)}

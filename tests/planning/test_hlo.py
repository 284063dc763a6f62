"""HLO text by hand: sizes, results, operands, computations."""

import pytest

from rlhf_jax.planning.hlo import parse, parts, size_of

TEXT = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%body.1 (p.1: (s32[], f32[2])) -> (s32[], f32[2]) {
  %p.1 = (s32[]{:T(128)}, /*index=1*/f32[2]{0:T(8,128)S(1)}) parameter(0)
  ROOT %t.2 = (s32[], f32[2]) tuple(%a, %b)
}

ENTRY %main.3 (x: f32[2]) -> f32[] {
  %x = f32[2]{0} parameter(0), metadata={op_name="x"}
  %pair = (s32[], f32[2]) while(%start), condition=%cond.2, body=%body.1, metadata={op_name="f(x)/while"}
  %either = f32[2] conditional(%i, %x, %x), branch_computations={%left.4, %right.5}
  %other = f32[2] conditional(%flag, %x, %x), true_computation=%yes.6, false_computation=%no.7
  ROOT %sum = f32[] reduce(f32[2] %x, f32[] %zero), dimensions={0}, to_apply=%add.8
}
"""


@pytest.mark.parametrize(
    ("result", "size"),
    [
        ("f32[]", 4),
        ("bf16[3,5]{1,0:T(8,128)(2,1)S(1)}", 30),
        ("pred[7]", 7),
        ("s4[3]", 1),
        ("f8e4m3fn[3]{0}", 3),
        ("(f32[2]{0}, /*index=1*/(u8[3], token[]))", 11),
        ("f32[0,8]", 0),
    ],
)
def test_sizes_in_bytes(result, size):
    assert size_of(result) == size


def test_parts_of_a_tuple():
    assert parts("(f32[2,3]{1,0:T(8,128)}, (u8[3], s8[4])) rest") == [
        "(f32[2,3]{1,0:T(8,128)}, (u8[3], s8[4]))",
        "f32[2,3]{1,0:T(8,128)}",
        " (u8[3], s8[4])",
    ]


def test_a_module_is_its_computations():
    module = parse(TEXT)
    assert (module.devices, module.entry, list(module.computations)) == (4, "main.3", ["body.1", "main.3"])
    parameter, root = module.computations["body.1"]
    assert (parameter.opcode, size_of(parameter.result), parameter.root) == ("parameter", 12, False)
    assert (root.name, root.opcode, root.operands, root.root) == ("t.2", "tuple", ["a", "b"], True)


def test_called_computations_branches_and_operands():
    _, loop, either, other, total = parse(TEXT).computations["main.3"]
    assert loop.called == ["cond.2", "body.1"]
    assert (either.branches, either.called) == (["left.4", "right.5"], [])
    assert other.branches == ["yes.6", "no.7"]
    assert (total.operands, total.called) == (["x", "zero"], ["add.8"])


def test_text_that_is_no_module_is_empty():
    assert parse("").computations == {}

"""How often a loop runs: said by the compiler, read off its counter, or unknown."""

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.planning.hlo import parse
from rlhf_jax.planning.loops import trips

COUNTING = """\
HloModule counting

%cond (p: (f32[], u32[])) -> pred[] {
  %p = (f32[], u32[]) parameter(0)
  %limit = u32[] constant(LIMIT)
  %i = u32[] get-tuple-element(%p), index=1
  ROOT %test = pred[] compare(%i, %limit), direction=DIRECTION
}

%body (q: (f32[], u32[])) -> (f32[], u32[]) {
  %q = (f32[], u32[]) parameter(0)
  %x = f32[] get-tuple-element(%q), index=0
  %j = u32[] get-tuple-element(%q), index=1
  %c = u32[] copy(%j)
  %one = u32[] constant(1)
  %first = u32[] add(%c, %one)
  %second = u32[] add(%first, STEP)
  ROOT %out = (f32[], u32[]) tuple(%x, %second)
}

ENTRY %main () -> (f32[], u32[]) {
  %zero = f32[] constant(0)
  %from = u32[] constant(START)
  %start = (f32[], u32[]) tuple(%zero, %from)
  ROOT %loop = (f32[], u32[]) while(%start), condition=%cond, body=%body
}
"""


def runs(text):
    module = parse(text)
    found = [
        trips(module, computation, one)
        for computation in module.computations.values()
        for one in computation
        if one.opcode == "while"
    ]
    return found


def counting(limit="7", direction="LT", step="%one", start="1"):
    text = COUNTING.replace("LIMIT", limit).replace("DIRECTION", direction)
    return text.replace("STEP", step).replace("START", start)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 3),  # 1, 3, 5
        ({"limit": "8"}, 4),
        ({"start": "9"}, 0),
        ({"direction": "NE"}, None),
        ({"step": "%x"}, None),
        ({"step": "%c"}, None),
    ],
    ids=["two steps of one", "a limit between", "never", "another test", "by data", "doubling"],
)
def test_a_counter_from_its_start_by_its_step_to_its_limit(changes, expected):
    assert runs(counting(**changes)) == [expected]


def test_what_the_compiler_says_counts():
    said = counting().replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"n":"1"}}'
    )
    assert runs(said) == [5]


def compiled(function):
    return jax.jit(function).lower(jax.ShapeDtypeStruct((), jnp.float32)).compile().as_text()


def test_a_scan_and_a_loop_that_ends_by_data():
    def scan(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, None, length=11)[0]

    assert runs(compiled(scan)) == [11]
    assert runs(compiled(lambda x: jax.lax.while_loop(lambda y: y < 9.0, lambda y: 2 * y + 1, x))) == [None]

"""How often the loops of a compiled program run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rlhf_jax.planning.hlo import Instruction, Module

TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"\}')
SAME = ("copy", "bitcast", "convert")  # the result is the operand, as a number


def trips(module: Module, within: Sequence[Instruction], loop: Instruction) -> int | None:
    """How often a `while` runs; None where that depends on data.

    The compiler says so, or the loop counts: its condition is `counter < limit`, its body adds constants to
    the counter, and limit and start are constants.

    Args:
      within: the computation that the loop stands in.
    """
    known = TRIPS.search(loop.text)
    if known:
        return int(known[1])
    names = dict(re.findall(r"\b(condition|body)=%?([^,\s]+)", loop.text))
    bodies = [module.computations.get(names.get(part, ""), ()) for part in ("condition", "body")]
    condition, body = map(_by_name, bodies)
    test = next((one for one in condition.values() if one.root), None)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.text:
        return None
    counter, limit = (_linear(condition, name) for name in test.operands)
    last = next((one for one in body.values() if one.root), None)
    if counter is None or limit is None or last is None or last.opcode != "tuple":
        return None
    index = counter[0]
    step = _linear(body, last.operands[index]) if index is not None else None
    start = _start(_by_name(within), loop.operands[0], index)
    if limit[0] is not None or step is None or step[0] != index or step[1] < 1 or start is None:
        return None
    return max(0, math.ceil((limit[1] - counter[1] - start) / step[1]))


def _by_name(computation: Sequence[Instruction]) -> dict[str, Instruction]:
    return {one.name: one for one in computation}


def _linear(computation: dict[str, Instruction], name: str) -> tuple[int | None, int] | None:
    """(index, k) where a number is k plus the parameter's element `index`, or just k where that is None."""
    one = computation.get(name)
    if one is None:
        return None
    if one.opcode == "constant":
        digits = re.match(r"-?\d+", one.text)
        return (None, int(digits[0])) if digits else None
    if one.opcode == "get-tuple-element":
        index, whole = re.search(r"\bindex=(\d+)", one.text), computation.get(one.operands[0])
        return (int(index[1]), 0) if index and whole and whole.opcode == "parameter" else None
    if one.opcode in SAME:
        return _linear(computation, one.operands[0])
    if one.opcode == "add":
        terms = [_linear(computation, operand) for operand in one.operands]
        if all(terms) and sum(term[0] is not None for term in terms if term) <= 1:
            indices = [term[0] for term in terms if term and term[0] is not None]
            return (indices[0] if indices else None, sum(term[1] for term in terms if term))
    return None


def _start(within: dict[str, Instruction], operand: str, index: int | None) -> int | None:
    """The constant that a loop's counter begins with."""
    made = within.get(operand)
    if made is None or made.opcode != "tuple" or index is None:
        return None
    found = _linear(within, made.operands[index])
    return found[1] if found and found[0] is None else None

"""Collective operations of a compiled program, counted from its HLO text with the bytes that they move.

Bytes are those that a device receives at the least, n devices taking part and each holding its part before:

    all-gather, all-to-all   (n - 1) / n of the result
    reduce-scatter           n - 1 times the result
    all-reduce               2 (n - 1) / n of the result: a reduce-scatter and an all-gather
    collective-permute       the result

as in Thakur et al. 2005, https://doi.org/10.1177/1094342005051521, section 4. An operation in a loop counts
as often as the loop runs. Decoding ends with the longest response, so that what it does is counted for one
pass and kept apart.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable

from rlhf_jax.planning.hlo import Instruction, Module, parse, parts, size_of
from rlhf_jax.planning.loops import trips

RECEIVED: dict[str, Callable[[int], float]] = {  # in results, of n devices
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}
# libtpu spreads an operation over a chain of fusions, all of which repeat it; the first has this name.
CHAIN_START, IN_CHAIN = "async-collective-start", "chain_id="
FUSED_SCATTER = "all-reduce-scatter"  # libtpu's name of a fusion of an all-reduce with the slice that follows


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of operation, for one device."""

    count: int = 0
    bytes: float = 0.0
    open_count: int = 0  # in loops whose length depends on data, for one pass
    open_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Traffic(*(a + b for a, b in pairs))

    def times(self, passes: int | None) -> Traffic:
        """What so many passes of a loop do; None: nobody knows how many."""
        if passes is None:
            return Traffic(0, 0.0, self.count + self.open_count, self.bytes + self.open_bytes)
        return Traffic(*(passes * number for number in dataclasses.astuple(self)))


Totals = dict[str, Traffic]  # by kind of operation


def collectives(hlo: str) -> Totals:
    """The collectives of the text that `compiled.as_text()` gives, by kind."""
    module = parse(hlo)
    return _Counter(module).total(module.entry)


def add(totals: Iterable[Totals]) -> Totals:
    """The sum, kind by kind."""
    found: Totals = collections.defaultdict(Traffic)
    for one in totals:
        for kind, traffic in one.items():
            found[kind] += traffic
    return dict(sorted(found.items()))


class _Counter:
    """Adds up the computations of a module, each once."""

    def __init__(self, module: Module):
        self._module = module
        self._done: dict[tuple[str, bool], Totals] = {}

    def total(self, name: str, starts_chain: bool = False) -> Totals:
        if (name, starts_chain) not in self._done:
            found = add(self._of(name, one, starts_chain) for one in self._module.computations.get(name, ()))
            self._done[name, starts_chain] = found
        return self._done[name, starts_chain]

    def _of(self, within: str, one: Instruction, starts_chain: bool) -> Totals:
        kind = one.opcode.removesuffix("-start")
        if kind in RECEIVED:
            if IN_CHAIN in one.text and not starts_chain:
                return {}
            scattered = within.startswith(FUSED_SCATTER) and kind == "all-reduce"
            n, size = _group_size(one.text, self._module.devices), size_of(_moved(one))
            received = (n - 1) / n if scattered else RECEIVED[kind](n)
            return {"reduce-scatter" if scattered else kind: Traffic(1, size * received)}
        if one.opcode.endswith(("-done", "-update")):
            return {}
        if one.opcode == "conditional":
            branches = [self.total(name) for name in one.branches]
            return max(branches, key=lambda totals: sum(t.bytes + t.open_bytes for t in totals.values()))
        inside = add(self.total(name, one.name.startswith(CHAIN_START)) for name in one.called)
        if one.opcode != "while" or not inside:
            return inside
        passes = trips(self._module, self._module.computations[within], one)
        return {kind: traffic.times(passes) for kind, traffic in inside.items()}


def _moved(one: Instruction) -> str:
    """The type of what is moved: of a `-start`, the second part of operand, result and state."""
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        return parts(one.result)[2]
    return one.result


def _group_size(text: str, devices: int) -> int:
    """How many devices take part together, from any of the forms of `replica_groups`."""
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", text)
    if counted:
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return len(listed[1].split(","))
    named = re.search(r"replica_groups=@?\w+\[(.*?)\][^{]*\{(.*?)\}", text)
    if not named:
        return devices
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)

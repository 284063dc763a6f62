"""The text of a compiled program, `compiled.as_text()`, as computations of instructions."""

from __future__ import annotations

import dataclasses
import math
import re

HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?(\S+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*)[a-z0-9]*\[([\d,]*)\]")
CALLED = re.compile(r"\b(?:body|condition|to_apply|calls|called_computations)=\{?%?([^,})\s]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}|\b(?:true|false)_computation=%?([^,\s]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = result opcode(operands), attributes`; `text` is the rest of the line after the opcode."""

    name: str
    result: str
    opcode: str
    text: str
    root: bool

    @property
    def operands(self) -> list[str]:
        inside = re.sub(r"/\*.*?\*/", "", self.text.partition(")")[0])
        return [word.split()[-1].lstrip("%") for word in inside.split(",") if word.strip()]

    @property
    def called(self) -> list[str]:
        """Computations that run each time the instruction does."""
        return CALLED.findall(self.text)

    @property
    def branches(self) -> list[str]:
        """Computations of a conditional, one of which runs."""
        names = ",".join(several or one for several, one in BRANCHES.findall(self.text))
        return [name.strip().lstrip("%") for name in names.split(",") if name.strip()]


@dataclasses.dataclass(frozen=True)
class Module:
    """A program for `devices` devices. The computation that it begins with is `entry`."""

    computations: dict[str, list[Instruction]]
    entry: str
    devices: int


def parse(text: str) -> Module:
    """The computations of a module, by name."""
    partitions = re.search(r"\bnum_partitions=(\d+)", text[: text.find("\n")])
    computations: dict[str, list[Instruction]] = {}
    entry, body = "", []
    for line in text.splitlines():
        header = HEADER.match(line)
        found = INSTRUCTION.match(line)
        if header:
            body = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif found:
            body.append(_instruction(found[2], found[3], root=bool(found[1])))
    return Module(computations, entry, int(partitions[1]) if partitions else 1)


def _instruction(name: str, definition: str, *, root: bool) -> Instruction:
    """The type of the result is one word, or a tuple in parentheses, which may hold further ones."""
    end = len(parts(definition)[0]) if definition.startswith("(") else 0
    result, _, rest = definition[end:].partition(" ")
    opcode, _, text = rest.partition("(")
    return Instruction(name, definition[:end] + result, opcode, text, root)


def parts(text: str) -> list[str]:
    """The whole leading `(...)` of a text, then what stands between its outermost commas."""
    depth, start, found = 0, 1, []
    for position, letter in enumerate(text):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(letter, 0)
        if depth == 0 or (depth == 1 and letter == ","):
            found.append(text[start:position])
            start = position + 1
        if depth == 0:
            return [text[: position + 1], *found]
    return [text]


def size_of(result: str) -> int:
    """Bytes of an array, or of all arrays of a tuple; padding by tiles is not counted."""
    bits = 0
    for name, sizes in ARRAY.findall(re.sub(r"\{[^{}]*\}", "", result)):
        bits += _bits(name) * math.prod(int(size) for size in sizes.split(",") if size)
    return bits // 8


def _bits(name: str) -> int:
    return 8 if name == "pred" else int(re.sub(r"\D", "", name) or 0)

"""Figures of a job's programs, once compiled: seconds, bytes on each device, collectives."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import jax

from rlhf_jax.planning.collectives import Totals, add, collectives
from rlhf_jax.planning.compiler_log import compiler_log, rematerializations
from rlhf_jax.planning.programs import Job, Program

log = logging.getLogger("rlhf_jax")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler lays them out, padding included (`memory_analysis`).

    Of computations in a row, arguments and results add up, and of the rest the largest counts.
    """

    arguments: int = 0
    outputs: int = 0
    aliased: int = 0  # of the results, those that take the place of donated arguments
    temporaries: int = 0
    code: int = 0

    def then(self, other: Memory, times: int) -> Memory:
        return Memory(
            self.arguments + times * other.arguments,
            self.outputs + times * other.outputs,
            self.aliased + times * other.aliased,
            max(self.temporaries, other.temporaries),
            max(self.code, other.code),
        )

    @property
    def sum(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Figures:
    """A compiled program. `refusal` is the compiler's reason where there is none: it is too large."""

    name: str
    compile_s: float  # tracing, lowering and compiling
    memory: Memory
    collectives: Totals
    beyond: int  # bytes on a device that it needs beside what is resident
    peak: int  # bytes on the busiest device while it runs, all that is resident included
    rematerializations: int = 0  # tensors that are copied whole to every device between two layouts
    refusal: str = ""


def measure(job: Job, only: Sequence[str] = ()) -> list[Figures]:
    """Compiles the programs (none named: all) and reads off what they need."""
    resident = resident_bytes(job.resident)
    return [_figures(program, resident) for program in job.programs if not only or program.name in only]


def resident_bytes(tree: Any) -> collections.Counter[Any]:
    """Bytes of placed shapes on each device that holds any."""
    held = collections.Counter()
    for leaf in jax.tree.leaves(tree):
        shard = jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for device in leaf.sharding.device_set:
            held[device] += shard.size * shard.dtype.itemsize
    return held


def _figures(program: Program, resident: collections.Counter[Any]) -> Figures:
    memory, found, devices = Memory(), [], set(resident_bytes(program.state))
    start = time.perf_counter()
    lowered = program.lower()
    refusal = ""
    with compiler_log() as lines:
        for one, times in lowered:
            try:
                compiled = one.compile()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                refusal = str(error).splitlines()[0].partition("RESOURCE_EXHAUSTED: ")[2]
                break
            memory = memory.then(_memory(compiled), times)
            found += [collectives(compiled.as_text() or "")] * times
            devices |= {device for s in jax.tree.leaves(compiled.input_shardings) for device in s.device_set}
    seconds = time.perf_counter() - start
    log.info("%s: %.1f s", program.name, seconds)
    held = max(resident_bytes(program.state).values(), default=0)
    beyond = max(0, memory.arguments - held) + memory.sum - memory.arguments
    return Figures(
        name=program.name,
        compile_s=seconds,
        memory=memory,
        collectives=add(found),
        beyond=0 if refusal else beyond,
        peak=0 if refusal else beyond + max(resident[device] for device in devices),
        rematerializations=rematerializations(lines),
        refusal=refusal,
    )


def _memory(compiled: jax.stages.Compiled) -> Memory:
    analysis: Any = compiled.memory_analysis()
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
    )

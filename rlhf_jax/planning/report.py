"""What a job needs on given devices, as a table to read and as one JSON object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rlhf_jax.planning.collectives import Traffic
from rlhf_jax.planning.measure import Figures, measure, resident_bytes
from rlhf_jax.planning.programs import ppo_job
from rlhf_jax.planning.topology import chip_of, devices_of, memory_of
from rlhf_jax.settings import Config

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job compiled for devices. Bytes are those of the busiest device, numbers of bytes moved of each."""

    topology: str
    devices: int
    device_kind: str
    memory_bytes: int | None  # that programs may use on a device; None: the host's memory, not measured
    peak_flops: float | None  # of all devices, bfloat16
    iteration_flops: float | None
    resident: dict[str, int]  # by role
    resident_together: int  # on the busiest device; roles need not share their devices
    programs: list[Figures]
    reshard_bytes: int

    @property
    def worst(self) -> Figures:
        """The program that needs the most; one that the compiler refused needs more than all others."""
        return max(self.programs, key=lambda figures: (bool(figures.refusal), figures.peak))

    @property
    def fits(self) -> bool | None:
        """None where the devices' memory is not known."""
        if self.worst.refusal:
            return False
        return None if self.memory_bytes is None else self.worst.peak <= self.memory_bytes


def plan(config: Config, topology: str, only: Sequence[str] = ()) -> Plan:
    """Compiles the PPO phase for a topology (`devices_of`): all of its programs, or those named.

    Raises:
      InputError: the topology is none, or a model, a batch or a layout does not fit it.
    """
    devices = devices_of(topology)
    job = ppo_job(config, devices)
    chip = chip_of(devices[0])
    return Plan(
        topology=topology,
        devices=len(devices),
        device_kind=devices[0].device_kind,
        memory_bytes=memory_of(devices[0]),
        peak_flops=chip and chip.peak_flops * len(devices),
        iteration_flops=job.flops,
        resident={role: max(resident_bytes(tree).values(), default=0) for role, tree in job.resident.items()},
        resident_together=max(resident_bytes(job.resident).values()),
        programs=measure(job, only),
        reshard_bytes=job.reshard_bytes,
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain values, with the verdict."""
    programs = [
        {
            "name": figures.name,
            "compile_s": round(figures.compile_s, 2),
            "memory_bytes": dataclasses.asdict(figures.memory),
            "beyond_resident_bytes": figures.beyond,
            "peak_bytes": figures.peak,
            "collectives": {kind: dataclasses.asdict(t) for kind, t in figures.collectives.items()},
            "rematerializations": figures.rematerializations,
            "refusal": figures.refusal or None,
        }
        for figures in plan.programs
    ]
    verdict = {"peak_bytes": plan.worst.peak, "worst": plan.worst.name, "fits": plan.fits}
    shown = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return {**shown, "programs": programs, **verdict}


def as_text(plan: Plan) -> str:
    """Tables of what lies on a device, what each program needs there and what moves, and the verdict."""
    unit = next((name for name, size in UNITS.items() if plan.worst.peak >= size), "KiB")

    def shown(count: float) -> str:
        return f"{count / UNITS[unit]:.2f}"

    resident = [[role, shown(held)] for role, held in plan.resident.items()]
    resident.append(["together", shown(plan.resident_together)])
    memory = [_memory_row(figures, shown) for figures in plan.programs]
    moved = [
        [figures.name if first else "", kind, *_traffic_cells(traffic)]
        for figures in plan.programs
        for first, (kind, traffic) in _with_first(figures.collectives.items())
    ]
    columns = ["arguments", "results", "in place", "temporaries", "code", "beyond", "peak"]
    parts = [
        "\n".join(_about(plan)),
        _table(["resident on a device", unit], resident),
        _table([f"program, {unit} on a device", "compile s", *columns], memory),
        _table(["collectives of a device", "", "count", "MiB", "count a pass", "MiB a pass"], moved),
        "\n".join([*_notes(plan), _verdict(plan, unit, shown)]),
    ]
    return "\n\n".join(parts)


def _about(plan: Plan) -> list[str]:
    room = "" if plan.memory_bytes is None else f", {plan.memory_bytes / 2**30:.2f} GiB for programs on each"
    lines = [f"{plan.topology}: {plan.devices} x {plan.device_kind}{room}"]
    if plan.iteration_flops and plan.peak_flops:
        lines.append(
            f"an iteration of full length: {plan.iteration_flops:.3g} model FLOPs, "
            f"{plan.iteration_flops / plan.peak_flops:.1f} s at the chips' bfloat16 peak"
        )
    return lines


def _notes(plan: Plan) -> list[str]:
    lines = []
    for figures in plan.programs:
        if figures.refusal:
            lines.append(f"{figures.name} does not compile for these devices: {figures.refusal}")
        if figures.rematerializations:
            lines.append(
                f"{figures.name}: tensors copied whole to every device between two layouts (involuntary full "
                f"rematerialization): {figures.rematerializations}"
            )
        if figures.name == "reshard" and not figures.refusal:
            in_programs = sum(traffic.bytes for traffic in figures.collectives.values())
            lines.append(
                f"reshard: a device receives {plan.reshard_bytes / 2**20:.1f} MiB by the two layouts, "
                f"{in_programs / 2**20:.1f} MiB by its collectives"
            )
    return lines


def _verdict(plan: Plan, unit: str, shown: Callable[[float], str]) -> str:
    worst = plan.worst
    if worst.refusal:
        return "does not fit"
    if plan.fits is None:
        return f"{worst.name} needs the most, {shown(worst.peak)} {unit} on a device"
    word = "fits" if plan.fits else "does not fit"
    return f"{word}: {worst.name} needs {shown(worst.peak)} of {shown(plan.memory_bytes or 0)} {unit}"


def _memory_row(figures: Figures, shown: Callable[[float], str]) -> list[str]:
    head = [figures.name, f"{figures.compile_s:.1f}"]
    if figures.refusal:
        return [*head, *["-"] * 7]
    return [*head, *map(shown, [*dataclasses.astuple(figures.memory), figures.beyond, figures.peak])]


def _traffic_cells(traffic: Traffic) -> list[str]:
    known = [str(traffic.count), f"{traffic.bytes / 2**20:.1f}"] if traffic.count else ["", ""]
    each = [str(traffic.open_count), f"{traffic.open_bytes / 2**20:.2f}"] if traffic.open_count else ["", ""]
    return known + each


def _with_first(items: Iterable[Any]) -> list[tuple[bool, Any]]:
    return [(position == 0, item) for position, item in enumerate(items)]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell: words to the left, numbers to the right."""
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    numeric = [all(row[c][:1].isdigit() or row[c] in ("", "-") for row in rows) for c in range(len(heads))]
    aligned = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join(aligned)

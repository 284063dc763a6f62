"""Devices to compile for: those at hand, or those of a TPU slice that need not exist."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from rlhf_jax.checks import nearest
from rlhf_jax.errors import InputError
from rlhf_jax.trainers.timing import PEAK_FLOPS

HOST = ("host", "cpu")  # names of the devices at hand
FORMS = "use host, or chip:AxB such as v5e:4x4, or chip:AxBxC such as v5p:2x2x4"
# Read by libtpu when it is loaded. Without them it asks a metadata server that is not there, complains that
# it finds no worker and no accelerator, refuses to be loaded by two processes, as if they shared a chip, and
# writes the compiler's warnings to files in /tmp.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",  # any that it knows
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_STDERR_LOG_LEVEL": "1",  # warnings
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU chip whose cores are one device to JAX.

    `memory` is what the compiler of libtpu 0.0.42 lets a program use, from the message with which it refuses
    a larger one. The data sheets say 16, 95 and 32 GB, and give the dense bfloat16 peak (`PEAK_FLOPS`) and
    the largest slice: https://cloud.google.com/tpu/docs/v5e, .../v5p, .../v6e.
    """

    kind: str  # `device_kind`
    memory: int  # bytes of HBM
    dimensions: int  # of the torus
    largest: int  # chips of a slice

    @property
    def peak_flops(self) -> float:
        return PEAK_FLOPS[self.kind]


CHIPS = {
    "v5e": Chip("TPU v5 lite", int(15.75 * 2**30), 2, 256),
    "v5p": Chip("TPU v5", int(95.74 * 2**30), 3, 6144),
    "v6e": Chip("TPU v6 lite", int(31.25 * 2**30), 2, 256),
}


def devices_of(name: str) -> list[Any]:
    """The devices of a topology, in the order of `jax.devices()`.

    Those of a named topology can be compiled for and hold no arrays. No chip and no network is needed, only
    the library `libtpu`.

    Raises:
      InputError: there is no such topology, or no libtpu.
    """
    if name in HOST:
        return jax.devices()
    _check_name(name)
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        return list(topologies.get_topology_desc(name, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        reason = str(error).removeprefix("INVALID_ARGUMENT: ").splitlines()[0]
        raise InputError(f"--compile {name} is no topology ({reason}); {FORMS}") from error
    except RuntimeError as error:  # no library found
        raise InputError(
            f"--compile {name} needs libtpu; `pip install 'rlhf-jax[tpu-aot]'`, or set TPU_LIBRARY_PATH to "
            "its libtpu.so"
        ) from error


def chip_of(device: Any) -> Chip | None:
    return next((chip for chip in CHIPS.values() if chip.kind == device.device_kind), None)


def memory_of(device: Any) -> int | None:
    """Bytes that programs may use on a device; None where the memory is the host's own."""
    chip = chip_of(device)
    return chip.memory if chip else (device.memory_stats() or {}).get("bytes_limit")


def _check_name(name: str) -> None:
    kind, _, layout = name.partition(":")
    if kind not in CHIPS:
        near = nearest(kind, [*CHIPS, *HOST])
        raise InputError(f"--compile {name}: {kind!r} is none of {', '.join(CHIPS)}{near}; {FORMS}")
    chip = CHIPS[kind]
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})" + f"{{{chip.dimensions - 1}}}", layout):
        raise InputError(f"--compile {name}: {kind} slices have {chip.dimensions} dimensions; {FORMS}")
    chips = math.prod(map(int, layout.split("x")))
    if chips > chip.largest:
        raise InputError(f"--compile {name} has {chips} chips, and {kind} slices at most {chip.largest}")

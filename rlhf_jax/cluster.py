"""Joining the processes of a job that runs on several hosts: who they are, and that all came.

Each process is told, or finds in its environment, where process 0 is, how many there are and which it is.
They meet on a plain socket first: a process that stays away is named there, and only then does JAX's own
start-up begin, which ends the program where one is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import sys
import time
from collections.abc import Mapping

from rlhf_jax.errors import InputError

PORT = 12321  # of process 0, where the environment names only its host
TIMEOUT_S = 300.0
RETRY_S = 0.2
GRACE_S = 2.0
ALL_HERE = "all here"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """One process's place among the processes of a job."""

    coordinator: str  # host:port of process 0
    processes: int
    process: int


def start(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    *,
    pod: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Joins the other processes of the job, where there are any; before anything else asks for devices.

    Args:
      pod: leave it to JAX, which asks the metadata of a Cloud TPU pod.
    """
    if pod:
        import jax

        jax.distributed.initialize()
    elif cluster := find_cluster(coordinator, processes, process):
        join(cluster, timeout_s)


def leave_together(code: int, last_words: str = "") -> None:
    """After a fault: ends this process of several at once, and by that the others.

    A usual exit would first wait for processes that wait for this one. With a single process it does nothing.
    """
    jax = sys.modules.get("jax")
    if jax is None or not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    print(last_words, end="", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if jax.process_index() == 0:
        time.sleep(GRACE_S)  # its end is the end of the others, which may have something to say first
    os._exit(code)


def find_cluster(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    environment: Mapping[str, str] = os.environ,
) -> Cluster | None:
    """The cluster that was asked for, or the one that the environment tells of; None for a single process.

    What is given goes over what SLURM (one task a process) and GKE's TPU pods set.

    Raises:
      InputError: only a part is known, or it does not fit together.
    """
    found = _slurm(environment) or _tpu_pod(environment)
    if found is None and (coordinator, processes, process) == (None, None, None):
        return None
    told = {"coordinator": coordinator, "processes": processes, "process": process}
    known = {
        **(dataclasses.asdict(found) if found else {}),
        **{k: v for k, v in told.items() if v is not None},
    }
    missing = [f"--{name}" for name in told if name not in known]
    if missing:
        raise InputError(
            f"several processes need --coordinator, --processes and --process: {' and '.join(missing)} "
            "is neither given nor in the environment"
        )
    cluster = Cluster(**known)
    host, _, port = cluster.coordinator.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--coordinator={cluster.coordinator} is not HOST:PORT, such as 10.0.0.1:{PORT}")
    if cluster.processes < 1 or not 0 <= cluster.process < cluster.processes:
        raise InputError(
            f"--process={cluster.process} of --processes={cluster.processes}: processes count from 0 to "
            f"{cluster.processes - 1}"
        )
    return cluster if cluster.processes > 1 else None


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    """SLURM: one process for each task of a step that `srun` started."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks < 2 or "SLURM_PROCID" not in environment:
        return None
    port = 20000 + int(environment.get("SLURM_JOB_ID", "0")) % 10000
    host = first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
    return Cluster(f"{host}:{port}", tasks, int(environment["SLURM_PROCID"]))


def first_host(nodes: str) -> str:
    """The first of a SLURM list of nodes: `node07` of `node[07-09,12],other1`."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?", nodes)
    if match is None:
        raise InputError(f"the SLURM list of nodes {nodes!r} names no host; give --coordinator=HOST:PORT")
    prefix, numbers = match.groups()
    return prefix + (re.split(r"[-,]", numbers)[0] if numbers else "")


def _tpu_pod(environment: Mapping[str, str]) -> Cluster | None:
    """A TPU pod slice on GKE: one process for each host of TPU_WORKER_HOSTNAMES."""
    hosts = [host for host in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if len(hosts) < 2 or "TPU_WORKER_ID" not in environment:
        return None
    return Cluster(f"{hosts[0]}:{PORT}", len(hosts), int(environment["TPU_WORKER_ID"]))


def join(cluster: Cluster, timeout_s: float = TIMEOUT_S) -> None:
    """Waits for every process, then starts JAX's distributed runtime.

    Raises:
      InputError: a process did not come in time; the message has its number.
    """
    meet(cluster, timeout_s)
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # would take SIGTERM from the command
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.processes,
        cluster.process,
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout_s),
    )


def meet(cluster: Cluster, timeout_s: float) -> None:
    """Returns on every process once all have called it."""
    deadline = time.monotonic() + timeout_s
    host, _, port = cluster.coordinator.rpartition(":")
    if cluster.process == 0:
        _gather(cluster, int(port), deadline, timeout_s)
    else:
        _report(cluster, host, int(port), deadline, timeout_s)


def _gather(cluster: Cluster, port: int, deadline: float, timeout_s: float) -> None:
    """Process 0: waits for a line with its number from each of the others, then answers all."""
    expected, came, guests = set(range(1, cluster.processes)), set[int](), list[socket.socket]()
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(("", port), backlog=cluster.processes))
        except OSError as error:
            raise InputError(
                f"process 0 cannot listen on port {port} ({error.strerror}); give another --coordinator"
            ) from error
        fault = ""
        while expected - came and not fault:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                guest = stack.enter_context(server.accept()[0])
            except TimeoutError:
                missing = sorted(expected - came)
                fault = f"{_named(missing)} of {cluster.processes} did not join within {timeout_s:.0f} s"
                break
            number = _number_of(guest)
            if number in came or number not in expected | {None}:
                fault = f"two processes say that they are process {number} of {cluster.processes}"
            if number is not None:
                came.add(number)
                guests.append(guest)
        for guest in guests:
            with contextlib.suppress(OSError):
                guest.sendall((fault or ALL_HERE).encode() + b"\n")
        for guest in guests:  # they close first, which leaves the port free for JAX
            with contextlib.suppress(OSError):
                guest.recv(1)
    if fault:
        raise InputError(fault)


def _number_of(guest: socket.socket) -> int | None:
    """What a process says it is; None for one that speaks otherwise, such as a scan of ports."""
    guest.settimeout(5)
    with contextlib.suppress(OSError, ValueError):
        return int(guest.makefile().readline())
    return None


def _named(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:8])) + (" and more" if len(processes) > 8 else "")
    return f"process{'es' if len(processes) > 1 else ''} {shown}"


def _report(cluster: Cluster, host: str, port: int, deadline: float, timeout_s: float) -> None:
    """Any other process: says its number to process 0 and waits for the answer."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as door:
                door.sendall(f"{cluster.process}\n".encode())
                door.settimeout(max(deadline - time.monotonic(), 0.01) + 5)
                answer = door.makefile().readline().strip()
        except OSError:
            answer = ""
        if answer == ALL_HERE:
            return
        if answer:
            raise InputError(answer)
        if time.monotonic() > deadline:
            raise InputError(
                f"process {cluster.process} found no process 0 at {cluster.coordinator} within "
                f"{timeout_s:.0f} s; is it started, and is the address right?"
            )
        time.sleep(RETRY_S)

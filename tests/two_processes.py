"""Starts the same program as two processes that find each other on this machine."""

import os
import socket
import subprocess
import sys

FLAGS = "--xla_force_host_platform_device_count={} --xla_backend_optimization_level=0"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(devices, **more):
    """Variables of a process with so many virtual devices."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": FLAGS.format(devices),
        "RLHF_JAX_CACHE": "off",
        **more,
    }


def run_code(code, *, seconds=120):
    """[(exit code, stdout, stderr)] of two processes of four devices each that join and run `code`."""
    start = (
        "import sys\nfrom rlhf_jax.cluster import Cluster, join\n"
        f"join(Cluster('127.0.0.1:{free_port()}', 2, int(sys.argv[1])), 60)\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", start + code, str(process)],
            env=environment(4),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        ended = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *said) for process, said in zip(started, ended, strict=True)]

"""How the tests run a benchmark: as a user does, on a tiny model."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
SHAPE = ("vocab_size=300", "layers=1", "embed=16", "heads=4", "kv_heads=2", "mlp=32")
TINY_SHAPE = [f"policy.shape.{size}" for size in SHAPE]


def run(script, *arguments, devices=1):
    """The finished process of `python benchmarks/SCRIPT ARGUMENTS`."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
        check=False,
    )


def result_of(script, *arguments, devices=1):
    """The JSON of its last line."""
    done = run(script, *arguments, devices=devices)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

"""Two real processes, started as SLURM would: the tiny job gives the numbers of one process."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from rlhf_jax.config import load_config, to_yaml
from rlhf_jax.metrics import read_metrics, read_samples
from tests.trainers.conftest import TINY
from tests.two_processes import environment

ROOT = pathlib.Path(__file__).parents[1]
# A float32 sum over shards may be added in another order; a ratio near 1 shows it most.
RTOL, ATOL = 2e-3, 2e-5

# Stands for srun: the same command twice, each told who it is; ends with the first code that is not 0.
SRUN = """#!/usr/bin/env bash
[[ "$1" == --* ]] && shift
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST='127.0.0.1' SLURM_JOB_ID={job}
SLURM_PROCID=1 "$@" & other=$!
echo $other >{pids}
code=0
SLURM_PROCID=0 "$@" || code=$?
wait $other || code=$?
exit $code
"""


def scripts_folder(folder, job):
    """A folder for PATH with stand-ins for SLURM's commands."""
    folder.mkdir()
    for name, text in {
        "srun": SRUN.format(job=job, pids=folder / "pids"),
        "scontrol": f'#!/usr/bin/env bash\necho "$@" >>{folder / "scontrol.log"}\n',
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def command(folder, config):
    """scripts/slurm.sbatch as SLURM would run it, in a copy of a checkout whose environment is this one."""
    checkout = folder / "checkout"
    (checkout / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    entry = checkout / ".venv" / "bin" / "rlhf-jax"
    entry.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} -m rlhf_jax "$@"\n')
    entry.chmod(0o755)
    variables = environment(
        4,
        PATH=f"{folder / 'bin'}:{os.environ['PATH']}",
        SLURM_SUBMIT_DIR=str(checkout),
        SLURM_JOB_ID="7",
        PYTHONPATH=str(ROOT),
    )
    return subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "slurm.sbatch"), str(config)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(run_dir, step, seconds=200):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if any(r["phase"] == "ppo" and r["step"] >= step for r in read_metrics(run_dir)):
            return
        time.sleep(0.2)
    raise AssertionError(f"no step {step} within {seconds} s")


def numbers(run_dir):
    """Every record without what depends on clock and machine."""
    return [
        {name: value for name, value in record.items() if not name.startswith(("timing_", "perf/"))}
        for record in read_metrics(run_dir)
    ]


@pytest.mark.slow
def test_a_job_of_two_processes_stopped_and_queued_again_gives_the_numbers_of_one(tmp_path):
    settings = [*TINY, "ppo.iterations=6", "run.save_every=2", "eval.every=3"]
    files = {}
    for name in ("one", "two"):
        config = load_config(None, [*settings, f"run.dir={tmp_path / name}"])
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(to_yaml(config))
    bin_folder = scripts_folder(tmp_path / "bin", job=os.getpid())

    first = command(tmp_path, files["two"])
    wait_for_step(tmp_path / "two", 1)
    os.kill(int((bin_folder / "pids").read_text()), signal.SIGTERM)  # to one of the two
    said, _ = first.communicate(timeout=300)
    assert first.returncode == 143, said[-2000:]
    assert "stopped; the state is saved" in said
    assert (bin_folder / "scontrol.log").read_text() == "requeue 7\n"
    stopped_at = read_metrics(tmp_path / "two")[-1]["step"]
    assert stopped_at < 6

    again = command(tmp_path, files["two"])
    said, _ = again.communicate(timeout=400)
    assert again.returncode == 0, said[-2000:]
    one = subprocess.run(
        [sys.executable, "-m", "rlhf_jax", "run", str(files["one"])],
        env=environment(8),
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
    )
    assert one.returncode == 0, one.stderr[-2000:]

    expected, found = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert [(r["phase"], r["step"]) for r in found] == [(r["phase"], r["step"]) for r in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not isinstance(value, str):
                np.testing.assert_allclose(
                    ours[name], value, rtol=RTOL, atol=ATOL, err_msg=f"{name} {theirs}"
                )
    texts = [[r["response"] for r in read_samples(tmp_path / name)] for name in ("one", "two")]
    assert texts[0] == texts[1]
    judged = [json.loads((tmp_path / name / "eval.json").read_text()) for name in ("one", "two")]
    assert judged[0]["policy"]["win_rate"] == judged[1]["policy"]["win_rate"]
    assert (tmp_path / "two" / "report.html").exists()

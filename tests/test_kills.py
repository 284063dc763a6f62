"""A real process killed at random moments, again and again, leaves to the bit what one in peace leaves.

The moments are seeded: at the start, after some steps, and while a checkpoint is being written.
"""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from safetensors.numpy import load_file

from rlhf_jax.config import load_config, to_yaml
from rlhf_jax.metrics import read_metrics
from tests.fork_server import ForkServer

ROOT = pathlib.Path(__file__).parents[1]
SHAPE = ["vocab_size=300", "layers=1", "embed=16", "heads=2", "kv_heads=1", "mlp=32", "max_positions=128"]
SETTINGS = [
    *(f"policy.shape.{item}" for item in SHAPE),
    *(f"reward.shape.{item}" for item in SHAPE),
    "data.limit=64",
    "data.validation_fraction=0.2",
    "sft.epochs=2",
    "sft.batch_size=8",
    "sft.max_length=120",
    "sft.learning_rate=1e-2",
    "sft.eval_every=2",
    "reward.epochs=2",
    "reward.batch_size=8",
    "reward.max_length=120",
    "reward.learning_rate=1e-2",
    "reward.eval_every=2",
    "ppo.iterations=16",  # 48 prompts: an epoch ends within
    "ppo.batch_size=8",
    "ppo.minibatches=2",
    "ppo.learning_rate=1e-2",
    "ppo.kl_target=3.0",
    "ppo.kl_horizon=100",
    "ppo.schedule=linear",
    "critic.learning_rate=1e-2",
    "critic.warmup_iterations=2",
    "rollout.prompt_length=40",
    "rollout.response_length=8",
    "eval.prompts=6",
    "eval.batch_size=8",
    "eval.every=3",
    "run.save_every=2",
    "run.profile_every=0",
]
SECONDS = 300  # for one start
ROUND = 10  # kills of one run


def records(directory):
    """What metrics.jsonl says, without what depends on clock or machine."""
    return [
        {name: value for name, value in record.items() if not name.startswith(("timing_", "perf/"))}
        for record in read_metrics(directory)
    ]


def lines(directory):
    path = directory / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def half_written(directory):
    """Checkpoints that are being written, or were when their process was killed."""
    found = set()
    for entry in directory.glob("checkpoints/*/*tmp*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((entry, entry.stat().st_ino))
    return found


def assert_same(found, expected):
    assert records(found) == records(expected)
    for name in ("samples.jsonl", "eval.json"):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    for name in ("sft_policy", "best_reward_model", "best_policy"):
        ours, theirs = (load_file(run / name / "model.safetensors") for run in (found, expected))
        assert ours.keys() == theirs.keys()
        assert all((ours[key] == theirs[key]).all() for key in theirs), name
        assert (found / name / "config.json").read_text() == (expected / name / "config.json").read_text()
    names = [sorted(entry.name for entry in run.iterdir()) for run in (found, expected)]
    assert names[0] == names[1]  # nothing half-written is left
    steps = [sorted(e.name for e in run.glob("checkpoints/*/*")) for run in (found, expected)]
    assert steps[0] == steps[1]


class Killer:
    """Starts the same command until it ends by itself, and kills it before."""

    def __init__(self, server, config, directory, seed):
        self.server, self.config, self.directory = server, config, directory
        self.random, self.log = random.Random(seed), directory.with_suffix(".log")
        self.kills = self.while_saving = 0

    def run(self, most):
        """Kills at most so many times; returns once the command has ended by itself."""
        while True:
            child = self.server.start(["run", str(self.config)], self.log)
            killed = self.kills < most and self.kill(child)
            code = self.server.wait()
            if not killed:
                assert code == 0, self.log.read_text()[-3000:]
                return
            assert code == -signal.SIGKILL, self.log.read_text()[-3000:]

    def kill(self, child):
        """True if the child was killed, False if it had ended."""
        kind = self.random.choices(["start", "steps", "save"], [1, 4, 4])[0]
        before, deadline = lines(self.directory), time.monotonic() + SECONDS
        left = half_written(self.directory)
        wait = self.random.uniform(0, 6) if kind == "start" else self.random.expovariate(1 / 0.02)
        steps = 0 if kind == "start" else self.random.randint(1, 4)

        def saving():
            return bool(half_written(self.directory) - left)

        def due():
            return lines(self.directory) >= before + steps and (kind != "save" or saving())

        while not (kind == "start" or due()):
            if ended(child):
                return False
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.002)
        end = time.monotonic() + wait
        while time.monotonic() < end:
            if ended(child):
                return False
            time.sleep(0.001)
        self.while_saving += saving()
        os.kill(child, signal.SIGKILL)
        self.kills += 1
        return True


def ended(process):
    """True for a process that is gone, or waits to be taken note of."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """One device, and compiled programs that are kept between starts."""
    return {
        **os.environ,
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "RLHF_JAX_CACHE": str(tmp_path_factory.mktemp("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "USE_TORCH": "0",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture(scope="module")
def in_peace(environment, tmp_path_factory):
    """A run that nobody interrupts."""
    directory = tmp_path_factory.mktemp("kills") / "in_peace"
    config = write_config(directory)
    command = [sys.executable, "-m", "rlhf_jax", "run", str(config)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return directory


def write_config(directory, *overrides):
    config = directory.with_suffix(".yaml")
    config.write_text(to_yaml(load_config(None, [*SETTINGS, *overrides, f"run.dir={directory}"])))
    return config


CALLS = []


def shortest_but_once(prompts, responses):
    """A reward function whose eighth call in a process fails if there is such a file, which it takes away."""
    CALLS.append(len(prompts))
    if len(CALLS) == 8 and (mark := pathlib.Path(os.environ["FAILS_ONCE"])).exists():
        mark.unlink()
        raise ConnectionError("the judge is away")
    return [-float(len(response.split())) for response in responses]


def survive(in_peace, environment, folder, kills):
    """Round after round, each with another seed, until there were so many kills."""
    survived = while_saving = rounds = 0
    with ForkServer(environment) as server:
        while survived < kills:
            directory = folder / str(rounds)
            killer = Killer(server, write_config(directory), directory, seed=rounds)
            killer.run(min(ROUND, kills - survived))
            assert_same(directory, in_peace)
            survived, while_saving = survived + killer.kills, while_saving + killer.while_saving
            rounds += 1
            assert killer.kills, "a round without a kill says nothing"
    print(
        f"\n{survived} kills survived in {rounds} runs, {while_saving} of them while a checkpoint was written"
    )
    return survived, while_saving


@pytest.mark.slow
def test_signals_in_each_phase_end_a_run_that_goes_on(in_peace, environment, tmp_path):
    """A second SIGTERM comes while the step ends or its state is saved."""
    directory, log, codes = tmp_path / "run", tmp_path / "log", []
    config = write_config(directory)
    with ForkServer(environment) as server:
        for phase in ("sft", "reward", "ppo"):
            for numbers in ([signal.SIGTERM], [signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]):
                count, child = lines(directory), server.start(["run", str(config)], log)
                while lines(directory) <= count or records(directory)[-1]["phase"] != phase:
                    assert not ended(child), log.read_text()
                    time.sleep(0.002)
                for number in numbers:
                    os.kill(child, number)
                    time.sleep(0.003)
                codes.append(server.wait())
        assert codes[0::3] == [143] * 3
        assert codes[1::3] == [130] * 3
        assert set(codes[2::3]) <= {-signal.SIGTERM, 143}
        server.start(["run", str(config)], log)
        assert server.wait() == 0, log.read_text()
    assert_same(directory, in_peace)
    assert log.read_text().count("the same command goes on from there") >= 6


@pytest.mark.slow
def test_an_exception_in_a_reward_function_changes_nothing(environment, tmp_path):
    mark, function = tmp_path / "mark", "reward.function=tests.test_kills:shortest_but_once"
    runs = [tmp_path / name for name in ("peace", "failed")]
    configs = [write_config(run, "sft.epochs=0", function, "ppo.iterations=8") for run in runs]
    with ForkServer({**environment, "FAILS_ONCE": str(mark)}) as server:
        server.start(["ppo", str(configs[0])], tmp_path / "log")
        assert server.wait() == 0, (tmp_path / "log").read_text()
        mark.touch()
        server.start(["ppo", str(configs[1])], tmp_path / "log")
        assert server.wait() > 0
        assert not mark.exists()
        assert 2 < records(runs[1])[-1]["step"] < 8
        server.start(["ppo", str(configs[1])], tmp_path / "log")
        assert server.wait() == 0, (tmp_path / "log").read_text()
    assert "the judge is away" in (tmp_path / "log").read_text()
    assert records(runs[1]) == records(runs[0])
    ours, theirs = (load_file(run / "best_policy" / "model.safetensors") for run in runs)
    assert all((ours[key] == theirs[key]).all() for key in theirs)


@pytest.mark.slow
def test_a_disk_that_is_full_again_and_again_ends_each_start_with_one_line(in_peace, environment, tmp_path):
    """The longest file that may be written: an export, checkpoints, and at the end a picture are longer.

    How many files hold a checkpoint, and so how long they are, depends on when its threads flush.
    """
    directory = tmp_path / "run"
    config, said = write_config(directory), []
    with ForkServer(environment) as server:
        for longest in (20_000, 32_000, 50_000, 200_000):
            log = tmp_path / f"{longest}.log"
            server.start(["run", str(config)], log, longest=longest)
            code, text = server.wait(), log.read_text()
            assert code == 2, text
            (line,) = (line for line in text.splitlines() if line.startswith("error: "))
            assert text.endswith(line + "\n"), text
            assert "cannot be written: File too large; free some space, and the same command goes on" in line
            assert str(directory) in line
            assert "Traceback" not in text, text
            said.append(line)
        server.start(["run", str(config)], tmp_path / "log")
        assert server.wait() == 0, (tmp_path / "log").read_text()
    assert ["checkpoints/" in line for line in said] == [False, True, True, False], said
    assert_same(directory, in_peace)


@pytest.mark.slow
def test_twenty_kills_change_nothing(in_peace, environment, tmp_path):
    survived, while_saving = survive(in_peace, environment, tmp_path, 20)
    assert survived >= 20
    assert while_saving >= 2


@pytest.mark.long
def test_two_hundred_kills_change_nothing(in_peace, environment, tmp_path):
    survived, while_saving = survive(in_peace, environment, tmp_path, 200)
    assert survived >= 200
    assert while_saving >= 20

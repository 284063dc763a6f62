"""The command line: help, exit codes, one line for wrong input."""

import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import pytest

from rlhf_jax import cli
from rlhf_jax.config import from_dict, load_config, to_yaml
from rlhf_jax.errors import Halted, InputError
from rlhf_jax.settings import Config

JOBS = {"run": "run", "sft": "sft", "reward": "reward", "ppo": "ppo", "eval": "evaluate", "export": "export"}
COMMANDS = (*JOBS, "report", "config", "plan", "generate", "debug", "env")


@pytest.fixture
def called(monkeypatch):
    """Stand-ins for the jobs, and what they were called with."""
    calls = []
    stand_in = types.ModuleType("rlhf_jax.trainers.pipeline")
    for name in JOBS.values():
        setattr(stand_in, name, lambda config, name=name: calls.append((name, config)))
    monkeypatch.setitem(sys.modules, "rlhf_jax.trainers.pipeline", stand_in)
    monkeypatch.setenv("RLHF_JAX_CACHE", "off")
    return types.SimpleNamespace(calls=calls, module=stand_in)


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("ppo:\n  lam: 0.9\n")
    return str(file)


def run(*arguments):
    """The exit code of a command in this process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            cli.main(list(arguments))
    finally:
        signal.signal(signal.SIGTERM, handler)
    return caught.value.code


@pytest.mark.parametrize("arguments", [(), ("--help",), *[(command, "--help") for command in COMMANDS]])
def test_help_at_every_level(arguments, capsys):
    assert run(*arguments) == 0
    assert "Usage:" in capsys.readouterr().out


def test_help_names_every_command(capsys):
    run("--help")
    out = capsys.readouterr().out
    assert all(re.search(rf"\b{command}\b", out) for command in COMMANDS)


def test_config_help_explains_every_setting(capsys):
    from rlhf_jax.config import flat

    assert run("config", "--help") == 0
    out = capsys.readouterr().out
    assert [name for name in flat(Config()) if f"{name}=" not in out] == []


def test_help_answers_within_a_second_and_without_jax():
    code = (
        "import sys; from rlhf_jax.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'transformers', 'omegaconf', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    seconds = []
    for _ in range(3):  # the best of three: other processes may hold the machine
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 1.0


@pytest.mark.parametrize("command", JOBS)
def test_a_command_hands_the_resolved_configuration_to_its_job(command, called, config_file):
    assert run(command, config_file, "ppo.gamma=0.5", "run.seed=3") == 0
    ((name, config),) = called.calls
    assert name == JOBS[command]
    assert (config.ppo.lam, config.ppo.gamma, config.run.seed) == (0.9, 0.5, 3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "missing.yaml"),
        ("run", "CONFIG", "ppo.lamb=1"),
        ("run", "CONFIG", "ppo.lam=2"),
        ("run", "CONFIG", "ppo.lam"),
        ("ppo", "CONFIG", "rollout.temperature=0"),
        ("report", "CONFIG", "run.dir=nowhere"),
        ("generate", "model", "prompt", "rollout.top_p=2"),
        ("run",),
        ("rnu", "CONFIG"),
        ("run", "CONFIG", "--fast"),
        ("debug", "nowhere"),
        ("plan", "CONFIG"),
        ("plan", "CONFIG", "--compile", "v5e:4x4x4"),
    ],
    ids=" ".join,
)
def test_wrong_input_is_one_line_and_code_2(arguments, called, config_file, capsys):
    assert run(*[config_file if argument == "CONFIG" else argument for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: .+\n", err)
    assert called.calls == []


def test_an_input_error_inside_a_job_is_one_line(called, config_file, monkeypatch, capsys):
    def refuse(config):
        raise InputError("data.train=x\ndoes not exist")

    monkeypatch.setattr(called.module, "sft", refuse)
    assert run("sft", config_file) == 2
    assert capsys.readouterr().err == "error: data.train=x does not exist\n"


def test_a_fault_of_the_program_keeps_its_traceback(called, config_file, monkeypatch):
    def fail(config):
        raise KeyError("a bug")

    monkeypatch.setattr(called.module, "sft", fail)
    with pytest.raises(KeyError, match="a bug"):
        cli.main(["sft", config_file])


def test_a_run_that_stops_itself_is_one_line_and_its_own_code(called, config_file, monkeypatch, capsys):
    class Ended(Halted):
        code = 9

    def halt(config):
        raise Ended("updates were not finite;\nlower the rates")

    monkeypatch.setattr(called.module, "ppo", halt)
    assert run("ppo", config_file) == 9
    assert capsys.readouterr().err == "error: updates were not finite; lower the rates\n"


def test_ctrl_c_is_130_and_an_exit_code_passes_through(called, config_file, monkeypatch):
    def stop(error):
        def job(config):
            raise error

        return job

    monkeypatch.setattr(called.module, "sft", stop(KeyboardInterrupt()))
    assert run("sft", config_file) == 130
    monkeypatch.setattr(called.module, "sft", stop(SystemExit(143)))
    assert run("sft", config_file) == 143


def test_sigterm_is_143():
    code = (
        "import sys, types, time; from rlhf_jax import cli\n"
        "cli._pipeline = lambda context, job, config: (print('started', flush=True), time.sleep(60))\n"
        "cli._read = lambda *a, **k: None\n"
        "cli.main(['run', 'x.yaml'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143


def test_config_prints_what_runs_again(config_file, tmp_path, capsys):
    assert run("config", config_file, "data.limit=5", "placement.critic.tensor=2") == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    expected = load_config(config_file, ["data.limit=5", "placement.critic.tensor=2"])
    assert load_config(str(again), []) == expected


def test_report_prints_the_paths(tmp_path, capsys):
    settings = from_dict({"run": {"dir": str(tmp_path)}})
    (tmp_path / "config.yaml").write_text(to_yaml(settings))
    assert run("report", str(tmp_path / "config.yaml")) == 0
    for line in capsys.readouterr().out.split():
        assert os.path.getsize(line) > 0


def test_generate_passes_model_prompt_and_sampling(called, monkeypatch, capsys):
    import rlhf_jax.rollout

    def answer(model, prompt, rollout, seed):
        return f"{model} {prompt} {rollout.temperature} {seed}"

    monkeypatch.setattr(rlhf_jax.rollout, "generate_text", answer, raising=False)
    assert run("generate", "m", "hello there", "rollout.temperature=0", "run.seed=7") == 0
    assert capsys.readouterr().out == "m hello there 0.0 7\n"


QUICKSTART = str(pathlib.Path(__file__).parents[1] / "configs" / "quickstart.yaml")


def test_plan_compiles_the_quickstart_for_the_devices_at_hand():
    smaller = ["policy.shape.layers=1", "ppo.epochs=1", "ppo.minibatches=1"]
    command = [sys.executable, "-m", "rlhf_jax", "plan", QUICKSTART, "--compile", "host", "--json", *smaller]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert done.stderr == ""
    assert [found["topology"], found["devices"], found["fits"]] == ["host", 8, None]
    assert found["resident"].keys() == {"actor", "critic", "reference", "reward"}
    assert [program["name"] for program in found["programs"]][-1] == "update_actor"


def test_plan_prints_tables(called, config_file, monkeypatch, capsys):
    from rlhf_jax.planning import report

    monkeypatch.setattr(report, "plan", lambda config, topology: (config.ppo.lam, topology))
    monkeypatch.setattr(report, "as_text", str)
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert run("plan", config_file, "--compile", "v5e:2x2") == 0
    assert capsys.readouterr().out == "(0.9, 'v5e:2x2')\n"


def test_env_lists_versions_and_devices(capsys):
    assert run("env") == 0
    out = capsys.readouterr().out
    for word in ("rlhf_jax ", "python ", "jaxlib ", "flax ", "transformers ", "devices 8 x cpu", "cpus "):
        assert word in out


def test_compiled_programs_are_kept_where_asked(monkeypatch, tmp_path):
    import jax

    kept = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: kept.append((name, value)))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for place in ("off", str(tmp_path), None):
        if place is None:
            monkeypatch.delenv("RLHF_JAX_CACHE", raising=False)
        else:
            monkeypatch.setenv("RLHF_JAX_CACHE", place)
        cli._with_jax()
    default = os.path.expanduser("~/.cache/rlhf_jax/xla")
    assert kept == [("jax_compilation_cache_dir", str(tmp_path)), ("jax_compilation_cache_dir", default)]


def test_the_package_is_lazy_and_gives_what_it_names():
    code = "import sys, rlhf_jax; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    package = importlib.import_module("rlhf_jax")
    assert package.losses.__name__ == "rlhf_jax.losses"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018

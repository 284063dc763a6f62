"""Who may write into a run directory, and what a resumed run may change."""

import subprocess
import sys

import pytest

from rlhf_jax.config import load_config
from rlhf_jax.errors import InputError
from rlhf_jax.run_directory import open_run


def config(run_dir, *overrides):
    return load_config(None, [f"run.dir={run_dir}", *overrides])


def refused(settings):
    with pytest.raises(InputError) as caught, open_run(settings):
        pass
    return str(caught.value)


def test_a_new_run_gets_its_directory_and_configuration(tmp_path):
    settings = config(tmp_path / "a" / "b", "ppo.lam=0.9")
    with open_run(settings) as run:
        assert not run.resumed
        assert load_config(str(run.path / "config.yaml"), []) == settings
    with open_run(settings) as run:
        assert run.resumed


def test_a_second_run_is_refused_at_once_and_changes_nothing(tmp_path):
    settings = config(tmp_path / "run")
    code = (
        "from rlhf_jax.config import load_config\nfrom rlhf_jax.run_directory import open_run\n"
        f"with open_run(load_config(None, ['run.dir={tmp_path / 'run'}', 'ppo.iterations=7'])): pass"
    )
    with open_run(settings) as run:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "is in use by process" in done.stderr
        assert "InputError" in done.stderr
        assert load_config(str(run.path / "config.yaml"), []) == settings
    with open_run(settings):
        pass


def test_a_killed_run_leaves_no_lock(tmp_path):
    code = (
        "import os, signal\nfrom rlhf_jax.config import load_config\n"
        "from rlhf_jax.run_directory import open_run\n"
        f"with open_run(load_config(None, ['run.dir={tmp_path / 'run'}'])):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == -9
    with open_run(config(tmp_path / "run")) as run:
        assert run.resumed


def test_what_a_killed_run_was_writing_is_cleared_away(tmp_path):
    for folder, text in [(".best_policy.0123abcd", "new"), (".best_policy.89ef0123.old", "old")]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(text)
    (tmp_path / "sft_policy").mkdir()
    (tmp_path / ".sft_policy.0123abcd.old").mkdir()
    for file in (".metrics.jsonl.77.tmp", ".config.yaml.8.tmp", ".mine.12345678", ".mine.12.tmp"):
        (tmp_path / file).touch()
    with open_run(config(tmp_path)):
        left = {entry.name for entry in tmp_path.iterdir()}
        assert left == {
            ".lock", "config.yaml", "best_policy", "sft_policy", ".mine.12345678", ".mine.12.tmp",
        }  # fmt: skip
        assert (tmp_path / "best_policy" / "config.json").read_text() == "old"


def test_another_configuration_is_refused_and_its_settings_are_named(tmp_path):
    with open_run(config(tmp_path / "run")):
        pass
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    message = refused(config(tmp_path / "run", "ppo.lam=0.5", "run.seed=3"))
    assert "ppo.lam: 0.95 -> 0.5, run.seed: 0 -> 3" in message
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_resumed_run_may_go_further_and_lie_otherwise(tmp_path):
    with open_run(config(tmp_path / "run")):
        pass
    changed = config(
        tmp_path / "run",
        "ppo.iterations=500",
        "run.keep=5",
        "placement.critic.tensor=2",
        "ppo.micro_batch_size=2",
    )
    with open_run(changed) as run:
        assert load_config(str(run.path / "config.yaml"), []) == changed


def test_a_moved_directory_goes_on(tmp_path):
    with open_run(config(tmp_path / "old")):
        pass
    (tmp_path / "old").rename(tmp_path / "new")
    with open_run(config(tmp_path / "new")) as run:
        assert run.resumed


def test_never_resume_refuses_a_run_and_takes_an_empty_directory(tmp_path):
    (tmp_path / "run").mkdir()
    settings = config(tmp_path / "run", "run.resume=never")
    with open_run(settings):
        pass
    assert "run.resume=never" in refused(settings)


def test_a_file_and_a_foreign_directory_are_refused_untouched(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused(config(tmp_path / "file"))
    assert "cannot be made" in refused(config(tmp_path / "file" / "below"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "eval.json").write_text("{}")
    assert "holds eval.json but no config.yaml" in refused(config(tmp_path / "other"))
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["eval.json"]


def test_a_log_file_beside_the_run_is_no_hindrance(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stdout.txt").write_text("started by a job script")
    with open_run(config(tmp_path / "run")) as run:
        assert not run.resumed


def test_a_damaged_config_is_refused_by_name(tmp_path):
    with open_run(config(tmp_path / "run")):
        pass
    (tmp_path / "run" / "config.yaml").write_text("ppo: [")
    assert "config.yaml" in refused(config(tmp_path / "run"))

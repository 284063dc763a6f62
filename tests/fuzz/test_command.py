"""`rlhf-jax run` on damaged input: one line, exit code 2 and no run directory, or a run that may begin."""

import json
import signal

import pytest
from hypothesis import strategies as st

from rlhf_jax import cli
from rlhf_jax.trainers import pipeline
from tests.bad_input import ROWS, llama
from tests.fuzz.inputs import ENDS, changed, fuzz, mutated, no_hang
from tests.trainers.conftest import TINY

PAIRS = "\n".join(ROWS[:40]).encode()
FILES = (
    "pairs.jsonl",
    "settings.yaml",
    "llama/config.json",
    "llama/tokenizer.json",
    "llama/tokenizer_config.json",
    "llama/chat_template.jinja",
    "llama/model.safetensors",
)
SETTINGS = b"ppo:\n  kl_coef: 0.1\n  epochs: 2\nrun:\n  seed: 3\n"


class Begins(Exception):
    """All input was accepted: the run directory would be made now."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    llama(folder / "llama")
    (folder / "pairs.jsonl").write_bytes(PAIRS)
    (folder / "settings.yaml").write_bytes(SETTINGS)
    return folder


@st.composite
def damages(draw, world):
    """(file, what it holds instead)"""
    name = draw(st.sampled_from(FILES))
    data = (world / name).read_bytes()
    if name == "pairs.jsonl" and draw(st.booleans()):
        rows = draw(st.lists(changed(tuple(map(json.loads, ROWS[:3]))), min_size=1, max_size=3))
        return name, data + b"\n" + "\n".join(map(json.dumps, rows)).encode()
    return name, draw(mutated(data))


@pytest.fixture
def lines_of_run(world, monkeypatch, capsys):
    """Runs the command with one file damaged; its lines on stderr, or none where the run would begin."""
    monkeypatch.setenv("RLHF_JAX_CACHE", "off")
    monkeypatch.chdir(world)

    def begins(config):
        raise Begins

    monkeypatch.setattr(pipeline, "open_run", begins)

    def lines_of_run(name, damaged):
        before, handler = (world / name).read_bytes(), signal.getsignal(signal.SIGTERM)
        (world / name).write_bytes(damaged)
        capsys.readouterr()
        settings = [*TINY, "policy.model=llama", "data.train=pairs.jsonl", "run.dir=new/run"]
        try:
            with no_hang(60), pytest.raises(SystemExit) as left:
                cli.main(["run", "settings.yaml", *settings])
        except Begins:
            return []
        finally:
            signal.signal(signal.SIGTERM, handler)
            (world / name).write_bytes(before)
            assert not (world / "new").exists()
        lines = capsys.readouterr().err.splitlines()
        assert left.value.code == 2, lines
        return lines

    return lines_of_run


def test_what_is_not_damaged_begins(lines_of_run):
    assert lines_of_run("settings.yaml", SETTINGS) == []


@fuzz(st.data(), share=0.15)
def test_run(world, lines_of_run, data):
    lines = lines_of_run(*data.draw(damages(world)))
    ENDS["refused" if lines else "read"] += 1
    assert len(lines) <= 1, lines
    assert all(line.startswith("error: ") for line in lines)

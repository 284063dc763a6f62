"""Both sides in turn: the real scripts on a tiny model, the peer a script that says what it was given."""

import json
import sys

import pytest

from tests.benchmarks.scripts import run

# Answers as the peers' script does, the second time faster; its arguments are in its JSON.
FAKE_PEER = """
import json, pathlib, sys
calls = pathlib.Path(__file__).with_suffix(".calls")
number = len(calls.read_text().splitlines()) if calls.exists() else 0
with calls.open("a") as out:
    print(" ".join(sys.argv[1:]), file=out)
rate = 1000.0 ** number
print("a line before the last")
print(json.dumps({"samples_per_s": rate, "pairs_per_s": rate, "tokens_per_s": rate, "peak_rss_gib": 4.0}))
"""
KEYS = ["ours", "peer", "ratio", "memory_ratio", "floor_ratio", "repeats"]


@pytest.fixture
def fake_peer(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(FAKE_PEER)
    return script


def compare(*arguments):
    done = run("compare.py", *arguments, "--peer-python", sys.executable)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_ppo(ours):
    """What ppo_step.py prints is consistent with itself."""
    assert ours["response"] == 128
    assert ours["samples_per_s"] == pytest.approx(4 / ours["update_s"][1], rel=1e-3)
    assert ours["floor_ratio"] == pytest.approx(ours["update_s"][1] / ours["floor_s"], rel=1e-2)
    assert ours["compile_s"] > 0
    assert {"gen", "update_actor", "update_critic"} < set(ours["phases"])
    for phase in ours["phases"].values():
        assert phase["seconds"] > 0
        assert 0.1 < phase["peak_rss_gib"] < 8


def test_ppo_on_natural_prompts(tiny_model, pairs_file, fake_peer):
    sizes = ("--batch", 4, "--prompt", 40, "--updates", 2)
    result = compare(
        "ppo", tiny_model, "--natural", "--prompts", pairs_file, "--peers", fake_peer, *sizes, "--repeats", 1
    )
    assert list(result) == KEYS
    assert result["repeats"] == 1
    assert result["ratio"] == pytest.approx(result["ours"]["samples_per_s"], rel=1e-3)
    assert result["memory_ratio"] == pytest.approx(result["ours"]["peak_rss_gib"] / 4, rel=1e-3)
    assert result["floor_ratio"] == result["ours"]["floor_ratio"]
    check_ppo(result["ours"])
    (call,) = fake_peer.with_suffix(".calls").read_text().splitlines()
    assert call.startswith(f"ppo {tiny_model} --threads ")
    assert call.endswith(f"--prompts {pairs_file} --response 128 --batch 4 --prompt 40 --updates 2")


def test_reward_by_the_median_of_pairs(tiny_model, pairs_file, fake_peer):
    sizes = ("--batch", 4, "--length", 96, "--updates", 3)
    result = compare(
        "reward", tiny_model, "--pairs", pairs_file, "--peers", fake_peer, *sizes, "--repeats", 2
    )
    assert list(result) == KEYS
    assert len(fake_peer.with_suffix(".calls").read_text().splitlines()) == 2
    assert len(result["ours"]["update_s"]) == 3
    assert 10 < result["ours"]["tokens_a_side"] < 96
    assert result["peer"]["pairs_per_s"] == 1000.0  # the lower of the two ratios
    assert result["ratio"] > 0


def test_a_side_that_fails_is_named(tiny_model):
    sizes = ("--batch", 4, "--updates", 2, "--length", "short")
    done = run("compare.py", "reward", tiny_model, *sizes, "--peer-python", sys.executable)
    assert done.returncode == 1
    assert "reward_step.py" in done.stderr.splitlines()[-1]
    assert "invalid int value: 'short'" in done.stderr

"""metrics.jsonl and samples.jsonl: one record a step, whole lines, rewinding."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest

from rlhf_jax.errors import InputError
from rlhf_jax.metrics import MetricsLog, Progress, SamplesLog, read_metrics, read_samples


def steps(run_dir, phase):
    return [record["step"] for record in read_metrics(run_dir) if record["phase"] == phase]


def test_a_step_is_one_json_line_and_is_there_at_once(tmp_path):
    log = MetricsLog(tmp_path)
    log.write("ppo", 1, {"reward/score_mean": np.float32(0.1), "actor/steps": 2})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    number = float(np.float32(0.1))
    assert json.loads(line) == {"step": 1, "phase": "ppo", "reward/score_mean": number, "actor/steps": 2}
    log.close()


def test_numbers_that_are_not_finite_become_null_and_are_counted(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("ppo", 1, {"a/b": float("nan"), "a/c": np.inf, "a/d": 1.0})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    (record,) = read_metrics(tmp_path)
    assert (record["a/b"], record["a/c"], record["a/d"], record["nonfinite/count"]) == (None, None, 1.0, 2)


def test_a_step_of_a_phase_occurs_once(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("ppo", 1, {})
        log.write("eval", 1, {})
        with pytest.raises(ValueError, match="rewind"):
            log.write("ppo", 1, {})
    with MetricsLog(tmp_path) as log, pytest.raises(ValueError, match="rewind"):
        log.write("eval", 1, {})


def test_what_is_no_number_is_refused(tmp_path):
    with MetricsLog(tmp_path) as log, pytest.raises(TypeError, match="not a number"):
        log.write("ppo", 1, {"a/b": "high"})


def test_rewinding_drops_later_steps_of_one_phase_only(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 6):
            log.write("reward", step, {"x/y": step})
            log.write("ppo", step, {"x/y": step})
        log.rewind("ppo", 3)
        assert log.last("ppo") == 3
        log.write("ppo", 4, {"x/y": 40})
    assert steps(tmp_path, "ppo") == [1, 2, 3, 4]
    assert steps(tmp_path, "reward") == [1, 2, 3, 4, 5]
    assert read_metrics(tmp_path)[-1]["x/y"] == 40
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rewinding_to_before_the_first_step_drops_the_phase(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("ppo", 0, {})
        log.rewind("ppo", -1)
        assert log.last("ppo") is None
    assert read_metrics(tmp_path) == []


def test_a_restarted_run_writes_the_file_that_an_unbroken_one_writes(tmp_path):
    for name, stop in (("whole", None), ("broken", 4)):
        (tmp_path / name).mkdir()
        with MetricsLog(tmp_path / name) as log:
            for step in range(1, 7):
                if step == stop:
                    log.rewind("ppo", 2)
                    log.write("ppo", 3, {"a/b": 3 / 7})
                log.write("ppo", step, {"a/b": step / 7})
    whole, broken = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "broken"))
    assert whole == broken


def test_a_line_that_a_killed_process_left_unfinished_is_dropped(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write("ppo", 1, {})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "pha')
    assert steps(tmp_path, "ppo") == [1]
    with MetricsLog(tmp_path) as log:
        log.write("ppo", 2, {})
    assert steps(tmp_path, "ppo") == [1, 2]


def test_a_line_that_found_no_room_is_dropped(tmp_path):
    code = """
import resource, sys
from rlhf_jax.metrics import MetricsLog
resource.setrlimit(resource.RLIMIT_FSIZE, (190, resource.RLIM_INFINITY))
with MetricsLog(sys.argv[1]) as log:
    for step in range(9):
        log.write("ppo", step, {"a/b": 0.5})
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert "File too large" in done.stderr
    written = (tmp_path / "metrics.jsonl").read_bytes()
    assert len(written) == 190
    assert not written.endswith(b"\n")
    with MetricsLog(tmp_path) as log:
        last = log.last("ppo")
        log.write("ppo", last + 1, {"a/b": 0.5})
    assert steps(tmp_path, "ppo") == list(range(last + 2))


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', '{"step": "1", "phase": "ppo"}', "\xff"])
def test_a_broken_line_inside_is_refused_by_place(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "ppo"}\n' + line + "\n", encoding="latin-1")
    with pytest.raises(InputError, match=r"metrics.jsonl, line 2"):
        read_metrics(tmp_path)


def test_a_missing_log_is_empty(tmp_path):
    assert read_metrics(tmp_path) == []
    assert read_samples(tmp_path) == []


def test_samples_hold_records_and_rewind(tmp_path):
    record = {"phase": "eval", "prompt_id": 0, "sample": 0, "prompt": [{"role": "user", "content": "a\nb"}]}
    with SamplesLog(tmp_path) as log:
        log.write([{**record, "step": 0, "when": "before", "score": np.float32(1.5)}])
        log.write([{**record, "step": step, "when": "after", "score": float("nan")} for step in (5, 10)])
        log.rewind("eval", 5)
    read = read_samples(tmp_path)
    assert [sample["step"] for sample in read] == [0, 5]
    assert (read[0]["score"], read[1]["score"]) == (1.5, None)
    assert read[0]["prompt"] == record["prompt"]


def test_an_object_store_gets_the_whole_file(tmp_path, monkeypatch):
    """Where nothing can be appended, `flush` writes everything."""
    from rlhf_jax import records

    log = records.RecordLog(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(log, "_remote", True)
    monkeypatch.setattr(records, "REMOTE_WRITE_SECONDS", 1e9)
    monkeypatch.setattr(log, "_written_at", 1e12)
    log.append([{"step": 1, "phase": "ppo"}])
    assert not log.path.exists()
    log.flush()
    assert steps(tmp_path, "ppo") == [1]
    log.append([{"step": 2, "phase": "ppo"}])
    log.rewind("ppo", 1)
    log.close()
    assert steps(tmp_path, "ppo") == [1]


def test_tensorboard_events_hold_the_metric(tmp_path):
    pytest.importorskip("tensorboard")
    with MetricsLog(tmp_path, tensorboard=True) as log:
        log.write("ppo", 1, {"reward/score_mean": 0.5, "a/b": float("nan")})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"ppo/reward/score_mean" in events.read_bytes()
    assert b"a/b" not in events.read_bytes()


def test_a_missing_tensorboard_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(InputError, match=r"pip install 'rlhf-jax\[tensorboard\]'"):
        MetricsLog(tmp_path, tensorboard=True)
    assert list(tmp_path.iterdir()) == []


def test_plain_progress_is_a_line_now_and_then_and_at_the_end():
    out = io.StringIO()
    with Progress("ppo", every=1e9, file=out) as progress:
        for step in range(1, 5):
            progress.update(
                step, 4, {"reward/score_mean": step / 3, "perf/x": 1.0, "reward/kl": float("nan")}
            )
        progress.note("[saved] 4")
    first, last, note = out.getvalue().splitlines()
    assert first.startswith("ppo 1/4")
    assert last.startswith("ppo 4/4")
    assert "reward/score_mean 1.333" in last
    assert "reward/kl not finite" in last
    assert "perf/x" not in last
    assert note == "[saved] 4"


def test_progress_on_a_terminal_is_a_live_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with Progress("reward", file=out) as progress:
        progress.update(3, 10, {"reward/loss": 0.5})
        progress.note("[kept] best")
    assert "reward/loss 0.5" in out.getvalue()
    assert "[kept] best" in out.getvalue()


def test_metrics_import_no_jax():
    code = "import sys, rlhf_jax.metrics; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

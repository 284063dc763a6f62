"""Signs in the metrics: each by hand, told once, and the same after a restart."""

import pytest

from rlhf_jax.checks import check
from rlhf_jax.config import load_config
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import MetricsLog, read_metrics, read_warnings
from rlhf_jax.settings import Health
from rlhf_jax.trainers import pipeline
from rlhf_jax.trainers.health import PATIENCE, History, Unhealthy, Watch, examine
from tests.trainers.test_dump import LENGTHS, SMALL

SOUND = {
    "reward/kl": 2.0,
    "reward/score_mean": 0.0,
    "reward/score_std": 1.0,
    "response_length/mean": 20.0,
    "response_length/clip_ratio": 0.1,
    "critic/vf_explained_var": 0.3,
    "actor/entropy": 1.5,
    "actor/optimizer_steps": 4,
}


def told(rows, settings=None):
    """(step, name) of every sign of these rows, each a change of sound metrics."""
    history, found = History(), []
    for step, row in enumerate(rows, 1):
        record = {"phase": "ppo", "step": step, **SOUND, **row}
        history, signs = examine(history, record, settings or Health())
        found += [(sign.step, sign.name) for sign in signs]
    return found


@pytest.mark.parametrize(
    ("name", "wrong", "threshold"),
    [
        ("kl", {"reward/kl": 21.0}, 2.0),  # 1.05 nats a token
        ("score_fall", {"reward/score_mean": -2.1}, 3.0),
        ("entropy", {"actor/entropy": 0.01}, 0.001),
        ("length_fall", {"response_length/mean": 3.0}, 0.1),
        ("cut_off", {"response_length/clip_ratio": 0.97}, 0.98),
    ],
)
def test_each_sign_is_told_when_it_begins_and_its_threshold_decides(name, wrong, threshold):
    rows = [{}, wrong, wrong, {}, wrong]
    if name == "length_fall":
        wrong["reward/kl"] = 0.0
    assert told(rows) == [(2, name), (5, name)]
    assert told(rows, Health(**{name: threshold})) == []
    assert told(rows, Health(**{name: None})) == []


def test_a_critic_that_explains_nothing_is_told_after_a_while():
    bad = {"critic/vf_explained_var": -1.0}
    assert told([bad] * (PATIENCE - 1)) == []
    assert told([bad] * (PATIENCE + 5)) == [(PATIENCE, "explained_variance")]
    assert told([bad] * (PATIENCE - 1) + [{}] + [bad] * (PATIENCE - 1)) == []
    assert told([bad] * (PATIENCE + 5), Health(explained_variance=-2.0)) == []


def test_the_score_is_held_against_its_best_and_its_first_spread():
    rows = [{"reward/score_std": 0.5}, {"reward/score_mean": 1.0, "reward/score_std": 9.0}]
    assert told([*rows, {"reward/score_mean": 0.1}]) == []  # 1.8 of the first deviations below the best
    assert told([*rows, {"reward/score_mean": -0.1}]) == [(3, "score_fall")]
    assert told([{"reward/score_std": 0.0}, {"reward/score_mean": -9.0}]) == []


@pytest.mark.parametrize(
    "row",
    [
        {"actor/entropy": 0.0, "actor/optimizer_steps": 0},  # all updates were skipped: nothing was measured
        {"reward/kl": None, "reward/score_mean": None},
        {"reward/kl": float("nan"), "response_length/mean": float("nan")},
    ],
    ids=["no update", "null", "not finite"],
)
def test_what_was_not_measured_is_no_sign(row):
    assert told([{}, row, {}]) == []


def test_responses_that_never_ended_are_not_told_of():
    cut = {"response_length/clip_ratio": 1.0}
    assert told([cut, cut]) == []


def test_a_sign_names_value_threshold_and_remedy():
    _, (sign,) = examine(History(), {"step": 3, **SOUND, "actor/entropy": 0.0125}, Health())
    assert sign.text.startswith("step 3: the entropy is 0.0125 nats a token, below health.entropy=0.02: ")
    assert "ppo.entropy_coef" in sign.text


def test_a_restart_tells_what_the_run_would_have_told(tmp_path):
    """Killed after any step: the signs that follow the restored one are found again, none twice."""
    rows = [
        {},
        {"actor/entropy": 0.01},
        {"actor/entropy": 0.01},
        {},
        {"reward/kl": 50.0},
        {"reward/kl": 60.0},
    ]
    whole = written(tmp_path / "whole", rows)
    assert [(w["step"], w["name"]) for w in whole] == [(2, "entropy"), (5, "kl")]
    for restored in range(len(rows)):
        place = tmp_path / f"from-{restored}"
        written(place, rows[: restored + 1])  # a step more than the checkpoint holds
        assert written(place, rows, start=restored) == whole


def written(place, rows, start=0):
    place.mkdir(exist_ok=True)
    with MetricsLog(place) as log:
        log.rewind("ppo", start)
        watch = Watch(Health(), place, start)
        for step, row in enumerate(rows[start:], start + 1):
            log.write("ppo", step, {**SOUND, **row})
            watch(step, {**SOUND, **row})
        watch.close()
    return read_warnings(place)


@pytest.mark.parametrize(("stop", "ends"), [("all", True), ("kl,entropy", True), ("entropy", False)])
def test_health_stop_names_the_signs_that_end_a_run(tmp_path, stop, ends):
    watch = Watch(Health(stop=stop), tmp_path, 0)
    watch(1, {**SOUND, "reward/kl": 50.0})
    watch.close()
    assert (watch.fatal is not None) == ends


@pytest.mark.parametrize("stop", ["true", "kl,", "entrpy", "all,kl"])
def test_a_name_that_is_no_sign_is_refused(stop):
    with pytest.raises(InputError, match=r"health\.stop=.*is none of all, kl, score_fall"):
        check(load_config(None, [f"health.stop={stop}"]))


@pytest.mark.slow
def test_a_run_that_health_stops_is_saved_and_goes_on(tiny, tmp_path):
    settings = [*SMALL, LENGTHS, "ppo.iterations=5", "run.save_every=100", "run.profile_every=0"]
    settings += ["health.kl=1e-6", "health.score_fall=none", "health.stop=kl"]
    with pytest.raises(Unhealthy, match=r"the KL is .* above health\.kl=1e-06.*the same command goes on"):
        pipeline.ppo(tiny(*settings))
    (sign,) = read_warnings(tmp_path / "run")
    steps = [r["step"] for r in read_metrics(tmp_path / "run") if r["phase"] == "ppo"]
    assert steps == list(range(1, sign["step"] + 2))  # it is known when the next step is under way
    pipeline.ppo(tiny(*settings))
    assert [r["step"] for r in read_metrics(tmp_path / "run") if r["phase"] == "ppo"] == [1, 2, 3, 4, 5]
    assert read_warnings(tmp_path / "run") == [sign]

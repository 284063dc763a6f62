"""The report of a made-up run: what it shows, escapes, and says to be missing."""

import base64
import json
import re

import numpy as np
import pytest
from matplotlib import image

from rlhf_jax import comparison, plots
from rlhf_jax.config import from_dict, to_yaml
from rlhf_jax.errors import InputError
from rlhf_jax.report import write_report

HOSTILE = "<script>alert('x')</script> & \"quoted\""
ESCAPED = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; &#34;quoted&#34;"


def ppo_record(step):
    return {
        "step": step,
        "phase": "ppo",
        "reward/score_mean": step / 10,
        "reward/score_std": 1.0,
        "reward/total_mean": step / 12,
        "reward/kl": 0.2 * step,
        "actor/entropy": 3.0 - step / 50,
        "actor/pg_loss": -0.01,
        "critic/vf_loss": 1 / step,
        "actor/pg_clipfrac": 0.1,
        "critic/vf_clipfrac": None,
        "response_length/mean": 20.0 + step,
    }


def sample(i, when, *, gold=True, response=None):
    """One response; those after are longer, repeat themselves and score higher, and the truth falls."""
    after = when == "after"
    text = f"I am sorry {'no no no no no ' * 3}{i}" if after else f"Word{i} and then some other thing {i}"
    record = {
        "step": 40 if after else 0,
        "phase": "eval",
        "when": when,
        "prompt_id": i,
        "sample": 0,
        "prompt": [{"role": "user", "content": f"{HOSTILE} {i}"}],
        "response": response or text,
        "score": i / 10 + (2.0 + i / 30 if after else 0.0),
        "length": 40 if after else 20,
        "truncated": after and i % 2 == 0,
        "kl": 8.0 if after else 0.0,
    }
    return record | ({"gold": i / 10 - (1.0 if after else 0.0)} if gold else {})


def samples(gold=True):
    return [sample(i, when, gold=gold) for when in ("before", "after") for i in range(24)]


def eval_json(gold=True):
    policy = {
        "prompts": 24,
        "before": {"mean": 1.15, "std": 0.7},
        "after": {"mean": 3.53, "std": 0.9},
        "paired_difference": {"mean": 2.38, "ci95_low": 2.3, "ci95_high": 2.5},
        "win_rate": 0.97,
        "kl": 8.0,
        "response_length": {"before": 20.0, "after": 40.0},
    }
    truth = {"before": {"mean": 1.15, "std": 0.7}, "after": {"mean": 0.15, "std": 0.7}}
    reward_model = {"validation_accuracy": 0.64, "validation_pairs": 313, "train_accuracy": 0.7}
    return {"reward_model": reward_model, "policy": policy} | ({"gold": truth} if gold else {})


def write_run(place, metrics=None, responses=None, result=None):
    """A run directory from its parts; None leaves a file out."""
    settings = from_dict({"run": {"dir": "runs/made-up"}, "policy": {"model": HOSTILE}})
    (place / "config.yaml").write_text(to_yaml(settings))
    for name, records in (("metrics.jsonl", metrics), ("samples.jsonl", responses)):
        if records is not None:
            (place / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    if result is not None:
        (place / "eval.json").write_text(json.dumps(result))
    return place


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The paths of the report of a whole run."""
    metrics = [{"step": s, "phase": "sft", "sft/loss": 2 / s} for s in range(1, 4)]
    metrics += [{"step": s, "phase": "reward", "reward/accuracy": 0.6} for s in range(1, 4)]
    metrics += [{"step": 0, "phase": "eval", "eval/score_mean": 0.0, "eval/gold_mean": 1.0}]
    metrics += [ppo_record(s) for s in range(1, 41)]
    return write_report(write_run(tmp_path_factory.mktemp("run"), metrics, samples(), eval_json()))


def visible(page):
    """The page without its pictures."""
    return re.sub(r"data:image/png;base64,[\w+/=]+", "PICTURE", page)


def test_a_whole_run_gives_two_pictures_and_a_page(reported):
    assert [path.name for path in reported] == [
        "rlhf_training_curves.png",
        "reward_comparison.png",
        "report.html",
    ]
    for path in reported[:2]:
        pixels = image.imread(path)
        assert min(pixels.shape[:2]) > 300
        assert pixels[..., :3].std() > 0.02  # something is drawn
    page = visible(reported[2].read_text())
    for words in (
        "On 24 held-out prompts the reward model&#39;s mean score rose by 2.38",
        "95 % interval +2.30 to +2.50",
        "PPO 40 of 100",
        "validation accuracy 0.640",
        "The truth fell while the proxy rose",
        "Responses became longer: 20 to 40 tokens.",
        "Responses repeat themselves more (repeated 3-grams)",
        "More responses are cut off at the limit",
        "“i am sorry …” opens 100% of the highest-scored responses",
        "The true reward fell.",
    ):
        assert words in page, words


def test_the_page_needs_nothing_beside_itself_and_escapes_every_text(reported):
    page = reported[2].read_text()
    assert re.findall(r"<(?:script|link|iframe)\b|https?://|url\(", page) == []
    assert ESCAPED in page
    pictures = re.findall(r"data:image/png;base64,([\w+/=]+)", page)
    assert len(pictures) == 4  # two pictures, each for light and dark pages
    assert len(set(pictures)) == 4
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert "prefers-color-scheme: dark" in page


def test_the_same_records_give_the_same_files(reported):
    before = [path.read_bytes() for path in reported]
    assert [path.read_bytes() for path in write_report(reported[0].parent)] == before


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            (None, None, None),
            ["metrics.jsonl is missing or empty", "samples.jsonl holds no", "eval.json is missing"],
        ),
        (([ppo_record(1)], None, None), ["samples.jsonl holds no", "The policy has not been evaluated"]),
        (
            ([{"step": 1, "phase": "sft", "sft/loss": 1.0}], None, None),
            ["Not recorded, so not drawn: reward, kl"],
        ),
        ((None, samples(gold=False), eval_json(gold=False)), ["No ground truth is known here"]),
        ((None, samples()[:24], None), ["samples.jsonl holds no responses before and after"]),
        ((None, [sample(0, "before"), sample(0, "after")], None), ["eval.json is missing: no interval"]),
        ((None, None, {"reward_model": {"validation_accuracy": 0.6}}), ["has no policy section"]),
    ],
    ids=["nothing", "PPO only", "SFT only", "no truth", "only before", "one pair", "reward model only"],
)
def test_what_is_missing_is_said(parts, words, tmp_path):
    page = visible(write_report(write_run(tmp_path, *parts))[2].read_text())
    for word in words:
        assert word in page, word


def test_missing_scores_and_fields_are_survived(tmp_path):
    responses = samples()
    for record in responses[::3]:
        record["score"] = None
    for record in responses:
        del record["kl"], record["truncated"]
    page = visible(write_report(write_run(tmp_path, None, responses))[2].read_text())
    assert "score unknown" in page
    assert "cut off at the limit</th>" not in page


def test_damaged_records_and_foreign_directories_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no config\.yaml"):
        write_report(tmp_path)
    place = write_run(tmp_path, [ppo_record(1)])
    (place / "eval.json").write_text("{")
    with pytest.raises(InputError, match=r"eval.json is not JSON"):
        write_report(place)
    assert not (place / "report.html").exists()


def test_pairs_are_of_the_same_prompt_and_sample_and_of_the_last_evaluation():
    early = {**sample(0, "after"), "step": 20, "response": "early"}
    alone = {**sample(7, "after"), "sample": 3}
    pairs = comparison.pair_samples(
        [sample(0, "before"), early, sample(1, "before"), *samples()[24:26], alone]
    )
    assert [(old["prompt_id"], new["prompt_id"]) for old, new in pairs] == [(0, 0), (1, 1)]
    assert all(new["step"] == 40 for _, new in pairs)


def test_a_policy_that_did_not_change_gets_no_hint():
    pairs = [(sample(i, "before"), sample(i, "before")) for i in range(20)]
    assert comparison.hints(pairs, {}) == []


def test_score_and_length_that_go_together_are_a_hint():
    pairs = [(sample(i, "before"), {**sample(i, "before"), "length": 10 + i}) for i in range(20)]
    assert any("correlation +1.00" in hint for hint in comparison.hints(pairs, {}))


def test_a_moving_average_keeps_constants_and_lines():
    np.testing.assert_allclose(plots._smooth(np.full(50, 3.0)), 3.0)
    line = np.arange(50.0)
    np.testing.assert_allclose(plots._smooth(line)[5:-5], line[5:-5], rtol=1e-12)


def test_warnings_are_listed_as_text(tmp_path):
    write_run(tmp_path, metrics=[ppo_record(1)])
    write_report(tmp_path)
    assert "Warnings" not in (tmp_path / "report.html").read_text()
    record = {"phase": "ppo", "step": 3, "name": "kl", "text": f"step 3: {HOSTILE}"}
    (tmp_path / "warnings.jsonl").write_text(json.dumps(record) + "\n")
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert f"<li>step 3: {ESCAPED}</li>" in page

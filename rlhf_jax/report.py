"""Two pictures and report.html, from the records of a run directory alone."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from rlhf_jax import comparison, plots
from rlhf_jax.config import load_config, to_yaml
from rlhf_jax.errors import InputError
from rlhf_jax.metrics import read_metrics, read_samples, read_warnings
from rlhf_jax.records import write_atomically
from rlhf_jax.settings import Config

RANDOM_PAIRS, TOP_PAIRS = 6, 8
PHASES = ("sft", "reward", "ppo")


def write_report(run_dir: os.PathLike | str) -> list[epath.Path]:
    """Make the two pictures and the page; returns their paths. The page says what is not recorded."""
    place = epath.Path(run_dir)
    if not (place / "config.yaml").exists():
        raise InputError(f"{run_dir} has no config.yaml; give the directory of a run (run.dir=...)")
    config = load_config(str(place / "config.yaml"), [])
    metrics, pairs, result = (
        read_metrics(place),
        comparison.pair_samples(read_samples(place)),
        _read_eval(place),
    )
    interval = result.get("policy", {}).get("paired_difference")
    scores, gold = comparison.aligned(pairs, "score"), comparison.aligned(pairs, "gold")
    pictures = {
        "rlhf_training_curves": [_png(plots.training_curves(metrics, dark=dark)) for dark in (False, True)],
        "reward_comparison": [
            _png(plots.reward_comparison(scores, gold, interval, dark=dark)) for dark in (False, True)
        ],
    }
    page = _render(
        config=config,
        config_yaml=to_yaml(config),
        facts=_facts(config, metrics),
        sentence=_result_sentence(result),
        missing=_missing(metrics, pairs, result),
        result=result,
        warnings=read_warnings(place),
        pictures={name: [base64.b64encode(png).decode() for png in pngs] for name, pngs in pictures.items()},
        table=comparison.table(pairs),
        gold_sentence=_gold_sentence(result),
        hints=comparison.hints(pairs, result),
        excesses=comparison.excesses(pairs),
        random_pairs=comparison.random_pairs(pairs, RANDOM_PAIRS, config.run.seed),
        top_pairs=sorted(pairs, key=lambda pair: -comparison.score(pair[1]))[:TOP_PAIRS],
    )
    for name, pngs in pictures.items():
        (place / f"{name}.png").write_bytes(pngs[0])
    write_atomically(place / "report.html", page)
    return [place / f"{name}.png" for name in pictures] + [place / "report.html"]


def _read_eval(place: epath.Path) -> dict[str, Any]:
    path = place / "eval.json"
    if not path.exists():
        return {}
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); remove it or evaluate again") from None
    if not isinstance(result, dict) or not all(isinstance(part, dict) for part in result.values()):
        raise InputError(f"{path} does not hold objects by name; remove it or evaluate again")
    return result


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def _facts(config: Config, metrics: Sequence[Mapping]) -> list[tuple[str, str]]:
    """What ran: models, data, iterations, versions."""
    import importlib.metadata

    import rlhf_jax

    data, rollout, ppo = config.data, config.rollout, config.ppo
    done = {phase: max((m["step"] for m in metrics if m["phase"] == phase), default=0) for phase in PHASES}
    taken = f"SFT {done['sft']}, reward model {done['reward']}, PPO {done['ppo']} of {ppo.iterations}"
    steered = f", steered to {ppo.kl_target:g} nats a response" if ppo.kl_target else ""
    sampled = f"{ppo.batch_size} responses of at most {rollout.response_length} tokens"
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax", "transformers")
    ]
    return [
        ("Policy", config.policy.model),
        ("Reward", config.reward.function or config.reward.model),
        ("Preference pairs", data.train),
        ("Held out", data.validation or f"{data.validation_fraction:.0%} of the prompts of the pairs"),
        ("Steps taken", taken),
        ("Rollout", f"{sampled}, temperature {rollout.temperature:g}"),
        ("KL coefficient", f"{ppo.kl_coef:g} in the {ppo.kl_placement}{steered}"),
        ("Seed", str(config.run.seed)),
        ("Report made with", ", ".join([f"rlhf_jax {rlhf_jax.__version__}", *versions])),
    ]


def _result_sentence(result: Mapping[str, Any]) -> str:
    policy = result.get("policy")
    if not policy:
        return "The policy has not been evaluated: eval.json is missing or has no policy section."
    paired, before, after = policy["paired_difference"], policy["before"], policy["after"]
    low, high, mean = paired["ci95_low"], paired["ci95_high"], paired["mean"]
    if low > 0:
        change = f"rose by {mean:.2f}"
    elif high < 0:
        change = f"fell by {-mean:.2f}"
    else:
        change = f"did not change beyond chance: {mean:+.2f}"
    spread = (
        f" ({mean / before['std']:+.1f} standard deviations of the scores before)"
        if before["std"] > 0
        else ""
    )
    return (
        f"On {policy['prompts']} held-out prompts the reward model's mean score {change}{spread}, "
        f"95 % interval {low:+.2f} to {high:+.2f}, from {before['mean']:.2f} to {after['mean']:.2f}. "
        f"The new response wins {policy['win_rate']:.0%} of the comparisons, at a KL of {policy['kl']:.1f} "
        "nats a response."
    )


def _gold_sentence(result: Mapping[str, Any]) -> str:
    gold, policy = result.get("gold"), result.get("policy")
    if not gold or not policy:
        return "No ground truth is known here: a rise of the score may be the reward model's error alone."
    rises = []
    for side in (policy, gold):
        change, std = side["after"]["mean"] - side["before"]["mean"], side["before"]["std"]
        rises.append(change / std if std > 0 else change)
    if rises[0] > 0 > rises[1]:
        verdict = "The truth fell while the proxy rose: the policy exploits the reward model."
    elif rises[0] > 0.5 and rises[0] > 2 * rises[1]:
        verdict = "The proxy rose much more than the truth: part of the rise is the reward model's error."
    else:
        verdict = "Proxy and truth moved together."
    return (
        f"The score of the reward model changed by {rises[0]:+.2f} and the true reward by {rises[1]:+.2f}, "
        f"in standard deviations of their values before. {verdict}"
    )


def _missing(metrics: Sequence, pairs: Sequence, result: Mapping) -> list[str]:
    said = []
    if not metrics:
        said.append("metrics.jsonl is missing or empty: no curves.")
    elif absent := plots.missing_panels(metrics):
        said.append("Not recorded, so not drawn: " + ", ".join(absent).lower() + ".")
    if not pairs:
        said.append("samples.jsonl holds no responses before and after: no comparison, no samples.")
    if not result:
        said.append("eval.json is missing: no interval.")
    return said


def _turns(prompt: Any) -> list[dict[str, str]]:
    """The prompt's messages; a bare text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _number(value: Any) -> str:
    return "unknown" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _render(**values: Any) -> str:
    import importlib.resources

    import jinja2

    template = importlib.resources.files("rlhf_jax").joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["turns"] = _turns
    environment.filters["number"] = _number
    return environment.from_string(template).render(**values)

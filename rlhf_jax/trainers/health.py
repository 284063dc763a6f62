"""Signs in the metrics that a PPO run goes wrong. Each is told once, when it begins.

What is told depends on the records of metrics.jsonl alone, so that a run that stopped and went on tells the
same.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

from etils import epath

from rlhf_jax.errors import Halted
from rlhf_jax.metrics import WARNINGS, read_metrics
from rlhf_jax.records import RecordLog
from rlhf_jax.settings import Health
from rlhf_jax.sharding.processes import is_primary

log = logging.getLogger("rlhf_jax")

PHASE = "ppo"
PATIENCE = 20  # steps in a row in which a critic may explain nothing
REMEDIES = {
    "kl": "the policy leaves its reference behind; raise ppo.kl_coef or lower ppo.learning_rate",
    "score_fall": "what was learnt is lost; lower ppo.learning_rate, or go on from an earlier checkpoint",
    "entropy": "nothing is left to explore; raise ppo.entropy_coef or ppo.kl_coef, or learn slower",
    "length_fall": "responses shrink to nothing; read some, and mend the reward or raise ppo.kl_coef",
    "cut_off": "responses no longer end; use ppo.missing_eos_penalty or a longer rollout.response_length",
    "explained_variance": "the critic predicts worse than a constant; change critic.learning_rate, or use "
    "critic.warmup_iterations",
}


class Unhealthy(Halted):
    """A sign that health.stop names. The state is saved; exit code 4."""

    code = 4


@dataclasses.dataclass(frozen=True)
class Sign:
    """A sign that began at a step."""

    step: int
    name: str  # of the setting under `health` that is its threshold
    value: float
    threshold: float

    @property
    def text(self) -> str:
        what = {
            "kl": "the KL is {0:.3g} nats a token, above",
            "score_fall": "the mean score is {0:.3g} standard deviations below its best, more than",
            "entropy": "the entropy is {0:.3g} nats a token, below",
            "length_fall": "the mean length of responses is {0:.3g} of that of the first step, below",
            "cut_off": "{0:.3g} of the responses are cut off, above",
            "explained_variance": "the critic's explained variance is {0:.3g} after "
            f"{PATIENCE} steps in a row below",
        }[self.name].format(self.value)
        return f"step {self.step}: {what} health.{self.name}={self.threshold:g}: {REMEDIES[self.name]}"


@dataclasses.dataclass(frozen=True)
class History:
    """What earlier steps say of the next one."""

    first: Mapping[str, float] = dataclasses.field(default_factory=dict)  # each metric's first value
    best: float = -math.inf  # mean score
    unexplained: int = 0  # steps in a row with a low explained variance
    lasting: frozenset[str] = frozenset()  # signs that have begun and not ended


def examine(history: History, record: Mapping[str, Any], settings: Health) -> tuple[History, list[Sign]]:
    """The history with one more step, and the signs that begin with it.

    Args:
      record: of metrics.jsonl; a number that is missing, null or not finite says nothing.
    """
    now = {k: float(v) for k, v in record.items() if isinstance(v, int | float) and math.isfinite(v)}
    first = {**now, **history.first}
    low = settings.explained_variance
    explained = now.get("critic/vf_explained_var")
    streak = history.unexplained
    if explained is not None:
        streak = streak + 1 if low is not None and explained < low else 0
    lasting, begun = set(history.lasting), []
    for name, (value, wrong) in _signs(first, history.best, streak, now, settings).items():
        threshold = getattr(settings, name)
        if wrong and name not in lasting:
            begun.append(Sign(int(record["step"]), name, value, threshold))
        (lasting.add if wrong else lasting.discard)(name)
    best = max(history.best, now.get("reward/score_mean", -math.inf))
    return History(first, best, streak, frozenset(lasting)), begun


def _signs(
    first: Mapping[str, float], best: float, streak: int, now: Mapping[str, float], settings: Health
) -> dict[str, tuple[float, bool]]:
    """Name -> (value, whether it is wrong), for what can be told of this step."""
    found: dict[str, tuple[float, bool]] = {}
    length, score = now.get("response_length/mean"), now.get("reward/score_mean")
    if settings.kl is not None and length and "reward/kl" in now:
        value = now["reward/kl"] / length
        found["kl"] = value, value > settings.kl
    spread = first.get("reward/score_std", 0.0)
    if settings.score_fall is not None and score is not None and spread > 0 and best > -math.inf:
        value = (best - score) / spread
        found["score_fall"] = value, value > settings.score_fall
    learnt = now.get("actor/optimizer_steps", 0) > 0  # else nothing was measured
    if settings.entropy is not None and learnt and "actor/entropy" in now:
        found["entropy"] = now["actor/entropy"], now["actor/entropy"] < settings.entropy
    if settings.length_fall is not None and length is not None:
        value = length / max(first["response_length/mean"], 1e-9)
        found["length_fall"] = value, value < settings.length_fall
    cut = now.get("response_length/clip_ratio")
    if settings.cut_off is not None and cut is not None:
        began_below = first["response_length/clip_ratio"] <= settings.cut_off
        found["cut_off"] = cut, began_below and cut > settings.cut_off
    explained = now.get("critic/vf_explained_var")
    if settings.explained_variance is not None and explained is not None:
        found["explained_variance"] = explained, streak >= PATIENCE
    return found


class Watch:
    """Looks at each step as it is written: says what begins, records it in warnings.jsonl.

    Attributes:
      fatal: the first sign that health.stop names; None so far.
    """

    def __init__(self, settings: Health, run_dir: Any, step: int):
        """Goes on after `step`, the last one that is kept; 0: from the beginning."""
        self.fatal: Sign | None = None
        self._settings, self._history = settings, History()
        self._log = RecordLog(epath.Path(run_dir) / WARNINGS, writes=is_primary())
        self._log.rewind(PHASE, step)
        for record in read_metrics(run_dir):
            if record["phase"] == PHASE and record["step"] <= step:
                self._history, _ = examine(self._history, record, settings)

    def __call__(self, step: int, numbers: Mapping[str, Any]) -> None:
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in numbers.items()}
        self._history, begun = examine(self._history, {**plain, "step": step}, self._settings)
        for sign in begun:
            log.warning(sign.text)
            if self.fatal is None and self._stops(sign.name):
                self.fatal = sign
        if begun:
            self._log.append([{"phase": PHASE, **dataclasses.asdict(w), "text": w.text} for w in begun])
            self._log.flush()

    def close(self) -> None:
        self._log.close()

    def _stops(self, name: str) -> bool:
        stop = self._settings.stop
        return stop is not None and (stop == "all" or name in stop.split(","))

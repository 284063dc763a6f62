"""The two pictures of a run, drawn from its records, for light and for dark pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Before is orange and after is blue wherever both occur; the pair stays apart for colour-blind readers.
LIGHT = {"page": "#ffffff", "ink": "#1f2430", "soft": "#6b7280", "grid": "#e5e7eb"}
DARK = {"page": "#15181e", "ink": "#e6e8ec", "soft": "#9aa3b2", "grid": "#2d333d"}
SERIES = {"light": ("#1d5fd1", "#c2570c", "#0f7b6c"), "dark": ("#6ea8fe", "#f0a05a", "#4fd1b5")}
TOP = 0.8  # height of the histograms in their axes
PHASES = {"ppo": "PPO step", "eval": "PPO step", "reward": "reward-model step", "sft": "SFT step"}
SMOOTH_FROM = 30  # points from which a moving average is drawn over the single steps


class Line(NamedTuple):
    """One metric of one phase, with the metric of its standard deviation where there is one."""

    phase: str
    metric: str
    label: str
    std: str = ""


class Panel(NamedTuple):
    title: str
    unit: str
    lines: tuple[Line, ...]


PANELS = (
    Panel("Reward", "standardised score", (
        Line("ppo", "reward/score_mean", "score", "reward/score_std"),
        Line("ppo", "reward/total_mean", "score and KL penalty"),
    )),
    Panel("KL to the reference", "nats a response", (
        Line("ppo", "reward/kl", "k1"),
        Line("ppo", "reward/kl_k3", "k3"),
    )),
    Panel("Entropy", "nats a token", (Line("ppo", "actor/entropy", "entropy"),)),
    Panel("Policy loss", "", (Line("ppo", "actor/pg_loss", "policy loss"),)),
    Panel("Value loss", "", (Line("ppo", "critic/vf_loss", "value loss"),)),
    Panel("Clip fraction", "share of tokens", (
        Line("ppo", "actor/pg_clipfrac", "policy"),
        Line("ppo", "critic/vf_clipfrac", "value"),
    )),
    Panel("Response length", "tokens", (Line("ppo", "response_length/mean", "mean length"),)),
    Panel("Held-out score", "standardised score", (
        Line("eval", "eval/score_mean", "score", "eval/score_std"),
    )),
    Panel("True reward", "known rule", (
        Line("eval", "eval/gold_mean", "held-out prompts"),
        Line("ppo", "reward/gold_mean", "rollouts"),
    )),
    Panel("Reward model: accuracy", "share of pairs", (
        Line("reward", "reward/accuracy", "training"),
        Line("reward", "reward/validation_accuracy", "held out"),
    )),
    Panel("Reward model: loss", "nats a pair", (
        Line("reward", "reward/loss", "training"),
        Line("reward", "reward/validation_loss", "held out"),
    )),
    Panel("Supervised fine-tuning: loss", "nats a token", (
        Line("sft", "sft/loss", "training"),
        Line("sft", "sft/validation_loss", "held out"),
    )),
)  # fmt: skip
REQUIRED = PANELS[:7]  # drawn, or said to be missing, whatever the run was


def training_curves(records: Sequence[Mapping[str, Any]], *, dark: bool = False) -> Figure:
    """Every panel that the records can fill, by step."""
    panels = [panel for panel in PANELS if any(_points(records, line)[0].size for line in panel.lines)]
    with _theme(dark) as colours:
        if not panels:
            figure = Figure(figsize=(6, 2.5), layout="constrained")
            _say(figure.add_subplot(), "metrics.jsonl holds no curves yet")
            return figure
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(4.4 * columns, 2.9 * rows), layout="constrained")
        axes = np.atleast_1d(figure.subplots(rows, columns)).ravel()
        for ax, panel in zip(axes, panels, strict=False):
            _draw_panel(ax, panel, records, colours)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
    return figure


def missing_panels(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Titles of the PPO panels that the records cannot fill."""
    return [p.title for p in REQUIRED if not any(_points(records, line)[0].size for line in p.lines)]


def reward_comparison(
    scores: tuple[np.ndarray, np.ndarray] | None,
    gold: tuple[np.ndarray, np.ndarray] | None = None,
    interval: Mapping[str, float] | None = None,
    *,
    dark: bool = False,
) -> Figure:
    """Distributions before and after, and of the paired difference; a second row for the true reward.

    Args:
      scores: (before, after), aligned: the same prompt and key at the same place.
      gold: the same of the true reward, where it is known.
      interval: mean, ci95_low and ci95_high of the paired difference of the scores.
    """
    with _theme(dark) as colours:
        if scores is None or scores[0].size == 0:
            figure = Figure(figsize=(6, 2.5), layout="constrained")
            _say(figure.add_subplot(), "samples.jsonl holds no pairs of responses before and after")
            return figure
        rows = 1 if gold is None else 2
        figure = Figure(figsize=(9.6, 3.6 * rows), layout="constrained")
        axes = figure.subplots(rows, 2, squeeze=False)
        _draw_pair(axes[0], scores, "standardised score", interval, colours)
        if gold is not None:
            _draw_pair(axes[1], gold, "true reward", None, colours)
    return figure


def _draw_pair(
    axes: Sequence[Axes],
    values: tuple[np.ndarray, np.ndarray],
    name: str,
    interval: Mapping[str, float] | None,
    colours: Sequence[str],
) -> None:
    before, after = values
    count = min(40, max(8, before.size // 6))
    bins = list(np.histogram_bin_edges(np.concatenate(values), bins=count))
    for data, colour, label in ((before, colours[1], "before"), (after, colours[0], "after")):
        axes[0].hist(data, bins=bins, alpha=0.45, color=colour, label=f"{label}: mean {data.mean():.2f}")
        axes[0].axvline(data.mean(), ymax=TOP, color=colour, linewidth=2)
    axes[0].set(title=f"{name[0].upper()}{name[1:]}, before and after", xlabel=name, ylabel="responses")
    difference = after - before
    axes[1].hist(difference, bins=count, alpha=0.55, color=colours[2])
    axes[1].axvline(0, ymax=TOP, color=matplotlib.rcParams["axes.edgecolor"], linewidth=1, linestyle="--")
    axes[1].axvline(
        difference.mean(), ymax=TOP, color=colours[2], linewidth=2, label=f"mean {difference.mean():+.2f}"
    )
    if interval is not None:
        low, high = interval["ci95_low"], interval["ci95_high"]
        label = f"95 % interval of the mean: {low:+.2f} to {high:+.2f}"
        axes[1].axvspan(low, high, ymax=TOP, alpha=0.3, color=colours[2], linewidth=0, label=label)
    axes[1].set(title="Difference on the same prompt", xlabel=f"after - before, {name}", ylabel="responses")
    for ax in axes:
        ax.set_ylim(top=ax.get_ylim()[1] / TOP)  # the legend has the room above
        ax.legend(loc="upper left")


def _draw_panel(ax: Axes, panel: Panel, records: Sequence[Mapping], colours: Sequence[str]) -> None:
    drawn = 0
    for line, colour in zip(panel.lines, colours, strict=False):
        steps, values, stds = _points(records, line)
        if not steps.size:
            continue
        drawn += 1
        if stds is not None:
            ax.fill_between(steps, values - stds, values + stds, alpha=0.15, color=colour, linewidth=0)
        if steps.size >= SMOOTH_FROM:
            ax.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
            ax.plot(steps, _smooth(values), color=colour, label=line.label)
        else:
            ax.plot(steps, values, color=colour, label=line.label, marker="o", markersize=3)
    ax.set(title=panel.title, xlabel=PHASES[panel.lines[0].phase], ylabel=panel.unit)
    if drawn > 1:
        ax.legend()


def _points(records: Sequence[Mapping], line: Line) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Steps, values and standard deviations of the records that have the metric."""
    rows = [r for r in records if r["phase"] == line.phase and r.get(line.metric) is not None]
    steps = np.array([row["step"] for row in rows], float)
    values = np.array([row[line.metric] for row in rows], float)
    if not line.std or not rows or any(row.get(line.std) is None for row in rows):
        return steps, values, None
    return steps, values, np.array([row[line.std] for row in rows], float)


def _smooth(values: np.ndarray) -> np.ndarray:
    """A centred moving average over about a tenth of the points, narrower at the ends."""
    half = max(1, values.size // 20)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(values.size)
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, values.size)
    return (sums[high] - sums[low]) / (high - low)


def _say(ax: Axes, text: str) -> None:
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center", wrap=True)


@contextlib.contextmanager
def _theme(dark: bool) -> Iterator[Sequence[str]]:
    """Colours and sizes of one page; gives the colours of the series."""
    page = DARK if dark else LIGHT
    style: dict[Any, Any] = {
        "figure.facecolor": page["page"],
        "savefig.facecolor": page["page"],
        "axes.facecolor": page["page"],
        "axes.edgecolor": page["soft"],
        "axes.labelcolor": page["soft"],
        "axes.titlecolor": page["ink"],
        "text.color": page["ink"],
        "xtick.color": page["soft"],
        "ytick.color": page["soft"],
        "grid.color": page["grid"],
        "legend.labelcolor": page["ink"],
        "figure.constrained_layout.h_pad": 0.1,
        "figure.constrained_layout.w_pad": 0.1,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.labelsize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "savefig.dpi": 130,
    }
    with matplotlib.rc_context(style):
        yield SERIES["dark" if dark else "light"]

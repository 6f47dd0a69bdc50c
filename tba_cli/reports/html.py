"""report.html and report.png: four panels of a run, each with a caption that says how to read it."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tba.api import EvalInfo, SettingsInfo
from tba.versions import PolicyVersion
from tba_cli.reports.comparison import evaluations_html
from tba_cli.reports.history import History, Poll
from tba_cli.reports.ledger import active_entries, active_steps, lineage_tree
from tba_cli.reports.summary import gapless_pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


DPI = 110
RATE_WINDOW_S = 5.0
SUMMARY_KEYS_SHOWN = (
    "seed",
    "state",
    "steps",
    "settings_changed",
    "start_accuracy",
    "final_accuracy",
    "gain",
    "start_greedy",
    "final_greedy",
    "num_heldout_prompts",
    "best_version",
    "best_metric",
    "best_value",
    "train_s",
    "first_step_s",
    "warm_start_s",
    "trainer_wait_share",
    "clipped_steps_share",
    "rollouts_generated",
    "rollouts_trained",
    "rollouts_failed",
    "generated_per_s",
    "trained_per_s",
    "samples_per_insert",
    "realised_most_on_policy",
    "fallback_share",
    "mean_policy_age",
    "lineages",
)
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c}"
    "figure{margin:2rem 0}img{max-width:100%}figcaption{color:#555}"
    "table{border-collapse:collapse}td{padding:.15rem 1rem .15rem 0;border-bottom:1px solid #ddd}"
    "td+td{font-variant-numeric:tabular-nums}"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: its title, a caption that says how to read it, and the function that draws it."""

    title: str
    caption: str
    draw: Callable[[Axes, History], None]


def render_report(history: History, summary: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return (HTML with the pictures inside, PNG with all four pictures)."""
    figures = "\n".join(
        # the pictures are in the page itself: one file can be sent, and needs no server
        f'<figure><img alt="{html.escape(panel.title)}" src="data:image/png;base64,{_panel_png(panel, history)}">'
        f"<figcaption><b>{html.escape(panel.title)}.</b> {html.escape(panel.caption)}</figcaption></figure>"
        for panel in PANELS
    )
    rows = "\n".join(
        f"<tr><td>{key}</td><td>{html.escape(show(summary.get(key)))}</td></tr>" for key in SUMMARY_KEYS_SHOWN
    )
    title = html.escape(f"tba run {history.run}{'' if history.rehearsal is None else ' (rehearsal)'}")
    late = show(summary.get("pace_late_share"))
    rehearsal = (
        ""
        if history.rehearsal is None
        else f"<p><b>{html.escape(history.rehearsal)}; pace_late_share {late}.</b></p>\n"
    )
    advice = "" if history.advice is None else f"<p><b>{html.escape(history.advice)}</b></p>\n"
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n{rehearsal}{advice}<table>\n{rows}\n</table>\n{figures}\n"
        f"<h2>Evaluations</h2>\n{evaluations_html(history.evals, history.best)}\n{changes_section(history.settings)}"
        "</body></html>\n"
    )
    return page, _overview_png(history)


def show(value: Any) -> str:
    """Return a value of the summary for people."""
    if value is None:
        return "unknown"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw_learning(axes: Axes, history: History) -> None:
    """Draw reward and accuracy of the training batches, and accuracy on held-out prompts, over optimizer steps."""
    active = active_entries(history.ledger, lineage_tree(history.parents), lineage=history.lineage, step=history.step)
    for key, label, style in (
        ("reward_mean", "reward, training batch", {"color": "tab:gray", "alpha": 0.6}),
        ("accuracy", "accuracy, training batch", {"color": "tab:blue", "alpha": 0.4}),
    ):
        points = [(entry.step, entry.metrics[key]) for entry in active if entry.metrics.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1, **style)
    done = sorted(_active_evals(history), key=lambda pair: pair[0])
    for attribute, label, color in (
        ("accuracy", "accuracy, held out, sampled", "tab:orange"),
        ("greedy_accuracy", "accuracy, held out, greedy", "tab:green"),
    ):
        points = [(step, getattr(item, attribute)) for step, item in done if getattr(item, attribute) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", label=label, color=color, markersize=4)
    axes.set_xlabel("optimizer step")
    if axes.has_data():
        axes.legend(fontsize="small")


def draw_policy_age(axes: Axes, history: History) -> None:
    """Draw the share of the trained rollouts by policy age; bins double in width: replay makes a long thin tail."""
    histogram = history.stats.policy_age_histogram
    num_trained = sum(histogram.values())
    bins = age_bins(max(histogram, default=0))
    shares = [sum(histogram.get(age, 0) for age in ages) / max(num_trained, 1) for ages in bins]
    labels = [str(ages[0]) if len(ages) == 1 else f"{ages[0]}-{ages[-1]}" for ages in bins]
    bars = axes.bar(labels, shares, width=0.9, color="tab:blue")
    axes.bar_label(bars, [f"{100 * share:.1f} %" for share in shares], fontsize="x-small")
    axes.tick_params(axis="x", labelsize="small", labelrotation=30)
    axes.set_xlabel("policy age, optimizer steps")
    axes.set_ylabel("share of rollouts trained")


def age_bins(max_age_steps: int) -> list[range]:
    """Return ages in bins: 0, 1, 2-3, 4-7, ... up to the bin that holds `max_age_steps`."""
    bins = [range(1)]
    while bins[-1].stop <= max_age_steps:
        bins.append(range(bins[-1].stop, 2 * bins[-1].stop))
    return bins


def draw_throughput(axes: Axes, history: History) -> None:
    """Draw the rollouts generated and trained per second."""
    for counter, color in (("generated", "tab:orange"), ("trained", "tab:blue")):
        times_s, rates = rate_course(history.polls, counter)
        axes.plot(times_s, rates, label=f"{counter} per second", color=color, linewidth=1)
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("rollouts per second")
    axes.legend(fontsize="small")


def draw_trainer_wait(axes: Axes, history: History) -> None:
    """Draw the seconds per optimizer step: the wait for the batch, and everything else."""
    active = active_entries(history.ledger, lineage_tree(history.parents), lineage=history.lineage, step=history.step)
    active = active[1:]  # the first batch waits for the start of everything, and would hide the rest
    steps = [entry.step for entry in active]
    waits_s = [entry.metrics.get("wait_s") or 0.0 for entry in active]
    works_s = [entry.metrics.get("step_s") or 0.0 for entry in active]
    axes.stackplot(steps, waits_s, works_s, labels=["waits for a batch", "works"], colors=["tab:red", "tab:blue"])
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("seconds")
    if steps:
        axes.legend(fontsize="small")


def rate_course(polls: list[Poll], counter: str) -> tuple[list[float], list[float]]:
    """Return (seconds since the first poll, rates), one point per window, none between two supervisors."""
    times_s: list[float] = []
    rates: list[float] = []
    grown, passed_s = 0, 0.0
    for before, after in gapless_pairs(polls):
        grown += getattr(after, counter) - getattr(before, counter)
        passed_s += after.at_s - before.at_s
        # a poll is one second: single ones would be noise
        if passed_s >= RATE_WINDOW_S:
            times_s.append(after.at_s - polls[0].at_s)
            rates.append(grown / passed_s)
            grown, passed_s = 0, 0.0
    return times_s, rates


PANELS = (
    Panel(
        "Reward and accuracy",
        "The thin lines are noisy means of the training batches, old rollouts included. Trust the dots: they are "
        "evaluations on held-out prompts that are never trained on. Sampled accuracy should rise towards greedy.",
        draw_learning,
    ),
    Panel(
        "Policy age",
        "How old the weights of a rollout were when it was trained on, in bins that double. Mass near 0 is "
        "on-policy; the tail is replay. A tail that grows without bound means that the searchers cannot keep up.",
        draw_policy_age,
    ),
    Panel(
        "Throughput",
        "Rollouts generated and trained per second. Their ratio is samples per insert; where one curve falls to zero "
        "while the other continues, look at the waits of that time in the logs.",
        draw_throughput,
    ),
    Panel(
        "Trainer wait",
        "Seconds of every optimizer step after the first. Red is time without a batch: asynchronous training should "
        "show almost none after the first steps.",
        draw_trainer_wait,
    ),
)


def _active_evals(history: History) -> list[tuple[int, EvalInfo]]:
    """Return (step, evaluation) of the versions on the way to the last one; those of dead lineages are left out."""
    steps = active_steps(lineage_tree(history.parents), lineage=history.lineage, step=history.step)
    pairs = [(PolicyVersion.parse(item.version), item) for item in history.evals if item.state == "done"]
    # a lineage announces its parent's weights first, under its own name: one step before its first
    firsts = {lineage: range(own.start - 1, own.stop) for lineage, own in steps.items()}
    return [(v.step, item) for v, item in pairs if v.step in firsts.get(v.lineage, ())]


def _figure(width: float, height: float) -> Figure:
    import matplotlib as mpl

    # a container has no display
    mpl.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def _panel_png(panel: Panel, history: History) -> str:
    figure = _figure(8, 3.6)
    panel.draw(figure.add_subplot(), history)
    return base64.b64encode(_png(figure)).decode()


def _overview_png(history: History) -> bytes:
    figure = _figure(14, 8)
    for index, panel in enumerate(PANELS, start=1):
        axes = figure.add_subplot(2, 2, index)
        axes.set_title(panel.title)
        panel.draw(axes, history)
    figure.suptitle(f"tba run {history.run}")
    return _png(figure)


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def changes_section(info: SettingsInfo | None) -> str:
    """Return the section about changed live settings; empty when none was changed."""
    if info is None or not info.changes:
        return ""
    lines = [line for audit in info.changes for line in audit.lines()]
    return f"<h2>Changed settings</h2>\n<pre>{html.escape(chr(10).join(lines))}</pre>\n"

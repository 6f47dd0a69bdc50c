"""`tba top`: a table of a run in the terminal that follows it, or one frame of it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from tba.api import ComponentInfo, Curves, RunInfo, Stats
from tba.clients import BufferClient
from tba.errors import UnavailableError
from tba.fields import escape_controls
from tba.versions import PolicyVersion
from tba_cli.commands.control import rollback_line
from tba_cli.commands.rollouts import OVER, with_run
from tba_cli.commands.status import AWAY_S, state_line
from tba_cli.reports.totals import total_lines

BARS = "▁▂▃▄▅▆▇█"
CURVES = ("reward_mean", "policy_age_mean")
NUM_STEPS = 60
"""Steps of a curve, one character each."""


def top_command(args: argparse.Namespace) -> int:
    """Show the run, again every few seconds, until it is over or Ctrl-C; with --once show it once."""

    def once(client: BufferClient) -> None:
        print("\n".join(read_frame(client)[0]))

    with_run(args, once if args.once else lambda client: _follow(client, args.every_s))
    return 0


def _follow(client: BufferClient, every_s: float) -> None:
    """Draw frames.

    Raises:
        UnavailableError: the buffer has not answered for AWAY_S (wait "buffer-unreachable").
    """
    from rich.live import Live
    from rich.text import Text

    answered_s, lines, is_over = time.monotonic(), [""], False
    with Live(auto_refresh=False) as live:
        while not is_over:
            problem = []
            try:
                lines, is_over = read_frame(client)
                answered_s = time.monotonic()
            except UnavailableError as error:
                if time.monotonic() - answered_s > AWAY_S:
                    raise
                problem = [escape_controls(f"{error}; trying again, this is {time.monotonic() - answered_s:.0f} s old")]
            live.update(Text("\n".join([*lines, *problem]), no_wrap=True, overflow="ellipsis"), refresh=True)
            if not is_over:
                time.sleep(every_s)


def read_frame(client: BufferClient) -> tuple[list[str], bool]:
    """Return the lines of a frame, and whether no other one will differ."""
    info, stats, advice = client.run(), client.stats(), client.summary().advice
    curves = client.curves(names=CURVES, from_step=max(0, info.step - NUM_STEPS + 1), max_points=NUM_STEPS)
    # states, notes and reasons are texts of others
    lines = list(map(escape_controls, frame_lines(info, stats, curves, advice)))
    return lines, info.read_only or info.state in OVER


def frame_lines(info: RunInfo, stats: Stats, curves: Curves, advice: str | None) -> list[str]:
    """Return the frame, one fact per line."""
    problems = [text for text in (advice, info.note, info.loss, rollback_line(info)) if text is not None]
    rates = stats.rates
    per_s = "" if rates is None else f"; per second {rates.generated_per_s:.1f} in, {rates.trained_per_s:.1f} trained"
    lines = [
        state_line(info),
        *(f"  {text}" for text in problems),
        f"  rollouts: {stats.num_rollouts} stored ({stats.num_pending} pending, {stats.num_failed} failed), "
        f"{stats.rollouts_generated} generated, {stats.rollouts_trained} trained{per_s}",
        *(f"  {line}" for line in total_lines(stats.tokens)),
        *_curve_lines(curves),
        *_component_lines(info),
    ]
    for wait in info.waits:
        deadline = f"at most {max(0.0, wait.deadline_in_s):.0f} s more"
        lines.append(f"  {wait.owner} waits for {wait.name!r}: {wait.for_s:.0f} s so far, {deadline}")
    for what, counts in (
        ("refused", stats.refused),
        ("evicted", stats.evicted),
        ("refused by the trainer", stats.rollouts_refused_by_trainer),
        ("batches skipped", stats.batches_skipped),
    ):
        if counts:
            lines.append(f"  {what}: " + ", ".join(f"{reason} {number}" for reason, number in sorted(counts.items())))
    return lines


def sparkline(values: Sequence[float | None]) -> str:
    """Return one character per value, from the smallest to the largest; a blank for an unknown one."""
    known = [value for value in values if value is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    top = len(BARS) - 1
    # a constant curve lies in the middle: it is neither low nor high
    return "".join(
        " " if value is None else BARS[round(top * (value - low) / span) if span > 0 else top // 2] for value in values
    )


def _curve_lines(curves: Curves) -> list[str]:
    lines = []
    for name in CURVES:
        values = curves.values.get(name, [])
        known = [value for value in values if value is not None]
        if known:
            span = f"last {known[-1]:.4g}, {min(known):.4g} to {max(known):.4g}"
            lines.append(f"  {name:<16} {sparkline(values)}  {span}, steps {curves.first_steps[0]}-{curves.steps[-1]}")
    return lines


def _component_lines(info: RunInfo) -> list[str]:
    if not info.components:
        return []
    head = f"  {'component':<24} {'state':<14} {'version':>9} {'lag':>5} {'tokens/s':>9}"
    return [head, *(_component_line(item, info.latest_version) for item in info.components)]


def _component_line(item: ComponentInfo, latest: str | None) -> str:
    rate = item.gauges.get("tokens_per_s")
    shown = "" if rate is None or not item.alive else f"{rate:.0f}"
    silent = "" if item.alive else f"  silent for {item.heartbeat_age_s:.0f} s"
    note = f"  {item.note}" if item.note else ""
    lag = version_lag(item.version, latest) if item.kind == "searcher" else ""
    return (
        f"  {item.component_id:<24} {item.state:<14} {item.version or '':>9} {lag:>5} {shown:>9}{silent}{note}".rstrip()
    )


def version_lag(version: str | None, latest: str | None) -> str:
    """Return how many steps weights are behind the latest version; `?` for weights of another lineage."""
    if version is None or latest is None:
        return ""
    own, newest = PolicyVersion.parse(version), PolicyVersion.parse(latest)
    return str(newest.step - own.step) if own.lineage == newest.lineage else "?"

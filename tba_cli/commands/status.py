"""`tba status|pause|resume|stop`: show a run or change its state, through the buffer service.

`tba status --follow` prints what happens in a run, line by line, until the run is over or Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tba.api import (
    ENDED,
    ComponentInfo,
    EvalInfo,
    RunChange,
    RunCommand,
    RunInfo,
    RunSummary,
    SettingsAudit,
    SettingsInfo,
    Stats,
    WaitInfo,
)
from tba.clients import BufferClient
from tba.clients.buffer import Command
from tba.config import MAX_LATE_SHARE
from tba.config.live_settings import setting_text
from tba.config.trainer import REMEDIES
from tba.errors import UnavailableError
from tba.fields import escape_controls
from tba.versions import START
from tba_cli.commands.control import rollback_line, searchers_line
from tba_cli.reports.comparison import best_text
from tba_cli.reports.history import pace_late_share
from tba_cli.reports.totals import total_lines
from tba_cli.run_target import ended_run, open_client

if TYPE_CHECKING:
    from tba_cli.run_folder import RunFolder


FOLLOW_S = 1.0
LASTING_S = 1.0
SETTINGS_FOLLOWED = 20
"""How many of the newest changes of live settings are followed, since they take effect later."""
AWAY_S = 120.0
"""A follower gives up a buffer that does not answer for this long (wait "buffer-unreachable")."""
OVER = ("done", "failed")
WITH_WEIGHTS = ("searcher", "trainer")
NUM_NAMED = 3
"""At most this many components that have ended are named."""


def status_command(args: argparse.Namespace) -> int:
    """Print state, components, waits and evaluations; with --follow also what happens from then on.

    For a run that is over, print since when and why, and what its files hold.
    """
    folder = ended_run(args)
    if folder is not None:
        return _ended_status(folder, as_json=args.json)
    client = open_client(args)
    try:
        if args.follow:
            return follow(client, as_json=args.json)
        info, stats, settings, changes, summary = _read(client)
    finally:
        client.close()
    if args.json:
        found = {"run": info, "stats": stats, "settings": settings, "summary": summary}
        print(json.dumps({name: value.model_dump(mode="json") for name, value in found.items()}, indent=2))
    else:
        print("\n".join(map(escape_controls, status_lines(info, stats, settings, changes, summary.advice))))
    return 0


def _read(client: BufferClient) -> tuple[RunInfo, Stats, SettingsInfo, list[RunChange], RunSummary]:
    # some calls: the numbers may be a moment apart, which nobody can see in a status
    info, stats, settings = client.run(), client.stats(), client.settings()
    page = client.run_changes()
    changes = page.changes
    while page.next is not None:
        page = client.run_changes(after=page.next)
        changes += page.changes
    return info, stats, settings, changes, client.summary()


def _ended_status(folder: RunFolder, *, as_json: bool) -> int:
    from tba_cli.local.ended_run import read_ended
    from tba_cli.reports.history import load_end

    end = load_end(folder)
    info, stats, settings, changes, summary = read_ended(folder, _read)
    # nothing runs any more, so the last components and waits are no news
    info = info.model_copy(update={"components": [], "waits": [], "note": None, "searchers": None})
    if as_json:
        found = {"ended": end, "run": info, "stats": stats, "settings": settings, "summary": summary}
        print(json.dumps({name: value.model_dump(mode="json") for name, value in found.items()}, indent=2))
        return 0
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.at_s))
    print(escape_controls(f"run {info.run!r} is over since {since}: {end.reason}"))
    if not folder.is_finished:
        print(f"  resume with: tba run {_short(folder.recipe_path)} --resume")
    state, *others = status_lines(info, stats, settings, changes, summary.advice)
    print("\n".join(map(escape_controls, [f"  its last state: {state}", *others])))
    return 0


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def pause_command(args: argparse.Namespace) -> int:
    """Pause a run: no new leases, no new batches."""
    return _change(args, "pause")


def resume_command(args: argparse.Namespace) -> int:
    """Let a paused run continue."""
    return _change(args, "resume")


def stop_command(args: argparse.Namespace) -> int:
    """End the run after the step in progress."""
    return _change(args, "stop")


def _change(args: argparse.Namespace, name: Command) -> int:
    client = open_client(args)
    try:
        info = client.command(name, RunCommand(reason=args.reason))
    finally:
        client.close()
    print(info.model_dump_json(indent=2, ensure_ascii=True) if args.json else escape_controls(state_line(info)))
    return 0


def status_lines(
    info: RunInfo,
    stats: Stats,
    settings: SettingsInfo,
    changes: Sequence[RunChange] = (),
    advice: str | None = None,
) -> list[str]:
    """Return the state of the run, one fact per line.

    Args:
        changes: of its state, oldest first.
        advice: what to try (`RunSummary.advice`).
    """
    # no rollout has been stored so far: a quotient would be infinite
    ratio = "none yet" if stats.samples_per_insert is None else f"{stats.samples_per_insert:.2f}"
    used_up = f", {stats.num_used_up} used up" if stats.num_used_up else ""
    is_lagging = info.sampling_version not in (None, info.latest_version)
    lagging = f" (searchers sample with {info.sampling_version})" if is_lagging else ""
    lines = [
        state_line(info),
        *([] if advice is None else [f"  {advice}"]),
        *([] if info.note is None else [f"  {info.note}"]),
        *([] if (waiting := rollback_line(info)) is None else [f"  {waiting}"]),
        *([] if info.loss is None else [f"  {info.loss}"]),
        *([f"  {info.num_lost_changes} acknowledged changes were lost by Redis"] if info.num_lost_changes else []),
        *([] if info.last_change is None else [f"  {change_line(info.last_change)}"]),
        *(f"  {line}" for line in lineage_lines(info, changes)),
        f"  latest version {info.latest_version or 'none'}{lagging}, checkpoint {info.checkpoint or 'none'}",
        f"  rollouts: {stats.rollouts_generated} generated, {stats.num_rollouts} stored ({stats.num_pending} pending, "
        f"{stats.num_failed} failed{used_up}), {stats.rollouts_trained} trained; samples per insert {ratio}",
        *(f"  {line}" for line in total_lines(stats.tokens)),
        f"  prompts: {stats.num_prompts_train} to train on, {stats.num_prompts_heldout} held out",
    ]
    if info.searchers is not None:
        lines.append(f"  {searchers_line(info.searchers)}")
    if changed := _changed_settings(settings):
        lines.append(f"  changed settings (revision {settings.revision}): {changed}")
    for what, counts in (
        ("evicted", stats.evicted),
        ("batches skipped by the trainer", stats.batches_skipped),
        ("rollouts refused by the trainer", stats.rollouts_refused_by_trainer),
    ):
        if counts:
            lines.append(f"  {what}: " + ", ".join(f"{reason} {number}" for reason, number in sorted(counts.items())))
    if (late_share := pace_late_share(info.components)) is not None:
        says = "; it says nothing: lower searcher.pace_tokens_per_s" if late_share > MAX_LATE_SHARE else ""
        lines.append(f"  rehearsal: the engines were slower than their pace for {100 * late_share:.1f} % of it{says}")
    # those that ended as they should are history; `--json` has them
    ended = [
        item.component_id
        for item in info.components
        if item.state in ENDED and not item.alive and not _alarms_text(item.gauges)
    ]
    for item in info.components:
        if item.component_id in ended:
            continue
        lines.append(f"  {component_line(item)}")
        if alarms := _alarms_text(item.gauges):
            lines.append(f"    alarms so far: {alarms}")
            lines.extend(
                f"      {name}: {text}" for name, text in REMEDIES.items() if item.gauges.get(f"alarms_{name}")
            )
    if ended:
        more = f" and {len(ended) - NUM_NAMED} more" if len(ended) > NUM_NAMED else ""
        lines.append(f"  {len(ended)} components have ended: {', '.join(ended[:NUM_NAMED])}{more}")
    lines.extend(f"  {_wait_line(wait)}" for wait in info.waits)
    lines.extend(f"  {eval_line(item)}" for item in info.evals)
    if info.best is not None:
        lines.append(f"  {best_text(info.best)}")
    return lines


def state_line(info: RunInfo) -> str:
    """Return state, reason, step and lineage in a line."""
    reason = f" ({info.state_reason})" if info.state_reason else ""
    return f"run {info.run!r}: {info.state}{reason}, step {info.step}, lineage {info.lineage}"


def lineage_lines(info: RunInfo, changes: Sequence[RunChange]) -> list[str]:
    """Return a line that says where the lineage began, and which rollback of an operator led there; none at 0-0."""
    parent = info.parents.get(info.lineage)
    if parent is None or parent == str(START):
        return []
    rollback = ""
    asked: RunChange | None = None
    for change in changes:
        if change.command == "rollback":
            asked = change
        elif change.command == "lineage" and change.lineage == info.lineage and change.rollback and asked is not None:
            reason = f": {asked.reason}" if asked.reason else ""
            rollback = f": rolled back from step {asked.step} by the {asked.role}{reason}"
    return [f"lineage {info.lineage} began at {parent}{rollback}"]


def change_line(change: RunChange) -> str:
    """Return who brought the run into its state, and when, by this machine's clock."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.at_s))
    said = "a new start" if change.command == "lineage" else repr(change.command)
    return f"{change.old} -> {change.new} by the {change.role} ({said}) at {at}, after step {change.step}"


def component_line(item: ComponentInfo) -> str:
    """Return what a component does; for searchers and trainers also with which weights."""
    version = f", version {item.version or 'none'}" if item.kind in WITH_WEIGHTS else ""
    note = f" ({item.note})" if item.note else ""
    silent = "" if item.alive else f"  SILENT for {item.heartbeat_age_s:.0f} s"
    pace = item.gauges.get("pace_tokens_per_s")
    rehearsal = "" if pace is None else f" [rehearsal: paced at {pace:g} tokens/s]"
    return f"{item.component_id}: {item.state}{version}{note}{rehearsal}{silent}"


def eval_line(item: EvalInfo) -> str:
    """Return how far an evaluation is, or what it measured."""
    abandoned = " (abandoned: the run went back)" if item.abandoned else ""
    return f"evaluation of {item.version}{abandoned}: {_eval_text(item)}"


def _alarms_text(gauges: Mapping[str, float]) -> str:
    """Return the alarms of a trainer that went off, how often, and whether each held in the last step."""
    counts = {name.removeprefix("alarms_"): n for name, n in sorted(gauges.items()) if name.startswith("alarms_") and n}
    return ", ".join(f"{name} {n:.0f}{' (on)' if gauges.get(f'alarm_on_{name}') else ''}" for name, n in counts.items())


def _eval_text(item: EvalInfo) -> str:
    if item.state != "done":
        return f"{item.state}, {item.num_done} of {item.num_prompts} prompts"
    sampled = "unknown" if item.accuracy is None else f"{item.accuracy:.3f}"
    greedy = "unknown" if item.greedy_accuracy is None else f"{item.greedy_accuracy:.3f}"
    more = "".join(f", pass@{k} {value:.3f}" for k, value in item.pass_at.items() if value is not None)
    more += "" if item.kl_to_reference is None else f", KL {item.kl_to_reference:.3f}"
    return f"accuracy {sampled} sampled, {greedy} greedy{more} on {item.num_prompts} held-out prompts"


def follow(client: BufferClient, *, as_json: bool) -> int:
    """Print the run, then every change of it; return 0 when the run is done, 1 when it has failed.

    Raises:
        UnavailableError: the buffer has not answered for AWAY_S.
        ServiceError: it refuses.
    """
    before: ObservedRun | None = None
    answered_s, is_away = time.monotonic(), False
    while True:
        try:
            after = _observe(client, before)
        except UnavailableError as error:
            if time.monotonic() - answered_s > AWAY_S:
                raise
            if not is_away:
                print(f"{error}; trying again for {AWAY_S:.0f} s", file=sys.stderr, flush=True)
            is_away = True
        else:
            if is_away:
                print("the buffer answers again", file=sys.stderr, flush=True)
            answered_s, is_away = time.monotonic(), False
            lines = whole_lines(after.run) if before is None else changed_lines(before, after)
            if as_json:
                lines = [after.run.model_dump_json(ensure_ascii=True)] if lines else []
            else:
                lines = [f"{_now()} {escape_controls(line)}" for line in lines]
            # flushed line by line: a pipe reads it as it happens
            for line in lines:
                print(line, flush=True)
            if after.run.state in OVER:
                return int(after.run.state == "failed")
            before = after
        time.sleep(FOLLOW_S)


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """The run at one moment, and the newest changes of its live settings by revision."""

    run: RunInfo
    settings: Mapping[int, SettingsAudit]


def _observe(client: BufferClient, before: ObservedRun | None) -> ObservedRun:
    # a change of the settings takes effect later, so the last ones are read again
    revision = client.settings().revision if before is None else max(before.settings, default=0)
    newest = client.settings(after=max(0, revision - SETTINGS_FOLLOWED)).changes
    return ObservedRun(client.run(), {audit.revision: audit for audit in newest})


def whole_lines(info: RunInfo) -> list[str]:
    """Return the run as a whole, one fact per line."""
    note = [] if info.note is None else [info.note]
    waits = [_wait_line(wait) for wait in info.waits]
    return [state_line(info), *note, *(component_line(item) for item in info.components), *waits]


def changed_lines(before: ObservedRun, after: ObservedRun) -> list[str]:
    """Return what has changed, one fact per line. Ages, gauges and lengths of waits change all the time, so they make
    no line."""
    lines = _run_lines(before.run, after.run)
    known = {item.component_id: _seen(item) for item in before.run.components}
    for item in after.run.components:
        if known.pop(item.component_id, None) != _seen(item):
            lines.append(component_line(item))
    lines += [f"{component_id}: gone, silent for an hour" for component_id in known]
    waited, waits = _lasting(before.run), _lasting(after.run)
    lines += [
        f"{wait.owner} no longer waits for {wait.name!r}: {wait.for_s:.0f} s"
        for key, wait in waited.items()
        if key not in waits
    ]
    lines += [_wait_line(wait) for key, wait in waits.items() if key not in waited]
    evals = {item.eval_id: item for item in before.run.evals}
    lines += [eval_line(item) for item in after.run.evals if evals.get(item.eval_id) != item]
    for revision, audit in after.settings.items():
        if before.settings.get(revision) != audit:
            lines += audit.lines()
    return lines


def _run_lines(before: RunInfo, info: RunInfo) -> list[str]:
    lines = []
    # the state says the most, and its line has the step as well
    if any(
        getattr(info, name) != getattr(before, name) for name in ("state", "state_reason", "lineage", "last_change")
    ):
        lines.append(state_line(info))
        if info.last_change is not None and info.last_change != before.last_change:
            lines.append(change_line(info.last_change))
    elif (info.step, info.latest_version) != (before.step, before.latest_version):
        lines.append(f"step {info.step}, latest version {info.latest_version or 'none'}")
    # the note tells an age, which changes all the time; a run that is over needs none
    if (info.note is None) != (before.note is None) and (info.note or info.state not in OVER):
        lines.append(info.note or "a trainer sends heartbeats again")
    # a new lineage says that it is done
    if info.rollback != before.rollback and (waiting := rollback_line(info)) is not None:
        lines.append(waiting)
    if info.searchers is not None and info.searchers != before.searchers:
        desired = "" if info.searchers.desired is None else f" of {info.searchers.desired} desired"
        note = f": {info.searchers.note}" if info.searchers.note else ""
        lines.append(f"searchers: {info.searchers.alive}{desired} alive{note}")
    if info.checkpoint != before.checkpoint:
        lines.append(f"checkpoint {info.checkpoint or 'none'}")
    if info.best is not None and info.best != before.best:
        lines.append(best_text(info.best))
    return lines


def _seen(item: ComponentInfo) -> tuple[object, ...]:
    # a trainer that has only made a step gives no line: the step of the run says the same
    version = None if item.kind == "trainer" else item.version
    return item.kind, item.state, version, item.alive, item.note


def _lasting(info: RunInfo) -> dict[tuple[str, str], WaitInfo]:
    return {(wait.owner, wait.name): wait for wait in info.waits if wait.for_s >= LASTING_S}


def _wait_line(wait: WaitInfo) -> str:
    left_s = max(0.0, wait.deadline_in_s)
    return f"{wait.owner} waits for {wait.name!r}: {wait.for_s:.0f} s so far, at most {left_s:.0f} s more"


def _now() -> str:
    return datetime.now().strftime("%H:%M:%S")


def _changed_settings(info: SettingsInfo) -> str:
    """Return in one line every live setting that differs from the recipe; empty when none does."""
    return ", ".join(
        f"{name} {setting_text(value)} (recipe: {setting_text(getattr(info.recipe, name))})"
        for name, value in info.settings.changed().items()
    )

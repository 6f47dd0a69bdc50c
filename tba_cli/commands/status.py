"""`tba status|pause|resume|stop`: show a run or change its state, through the buffer service.

`tba status --follow` prints what happens in a run, line by line, until the run is over or Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba.api import (
    ENDED,
    ComponentInfo,
    DamagedInfo,
    EvalInfo,
    RunChange,
    RunCommand,
    RunEvent,
    RunInfo,
    RunSummary,
    SettingsAudit,
    SettingsInfo,
    Stats,
    WaitChange,
)
from tba.clients import BufferClient
from tba.clients.buffer import Command
from tba.config import MAX_LATE_SHARE
from tba.config.live_settings import setting_text
from tba.config.trainer import REMEDIES
from tba.errors import BusyError, UnavailableError
from tba.fields import escape_controls
from tba.versions import START
from tba_cli.commands.control import rollback_line, searchers_line
from tba_cli.reports.comparison import best_text
from tba_cli.reports.history import pace_late_share
from tba_cli.reports.totals import total_lines
from tba_cli.run_target import ended_run, open_client

if TYPE_CHECKING:
    from tba_cli.run_folder import RunFolder


MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 5.0
AWAY_S = 120.0
"""A follower gives up a buffer that does not answer for this long (wait "buffer-unreachable")."""
OVER = ("done", "failed")
WITH_WEIGHTS = ("searcher", "trainer")
NUM_NAMED = 3
"""At most this many of the items that cannot be read are named."""


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


def retry_versions_command(args: argparse.Namespace) -> int:
    """Have searchers try refused weight versions again."""
    client = open_client(args)
    try:
        info = client.retry_versions(RunCommand(reason=args.reason))
    finally:
        client.close()
    said = "searchers retry the weight versions that they have refused with their next lease request"
    print(info.model_dump_json(indent=2, ensure_ascii=True) if args.json else said)
    return 0


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
        *([] if info.damaged is None else [f"  {_damaged_text(info.damaged)}"]),
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
    for wait in info.waits:
        deadline = f"at most {max(0.0, wait.deadline_in_s):.0f} s more"
        lines.append(f"  {wait.owner} waits for {wait.name!r}: {wait.for_s:.0f} s so far, {deadline}")
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


def _damaged_text(found: DamagedInfo) -> str:
    """Return how many stored items cannot be read, the names of the newest, and where the reasons are."""
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(found.num.items()))
    names = ", ".join(f"{item.kind} {item.name}" for item in found.items[:NUM_NAMED])
    return (
        f"{sum(found.num.values())} stored items cannot be read ({kinds}), last: {names}; `tba status --json` says why "
        "under `damaged`, docs/operations.md what to do (TbaDamagedItems)"
    )


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
    """Print every event; return 0 when the run is done, 1 when it has failed.

    Raises:
        UnavailableError: the buffer has not answered for AWAY_S.
        ServiceError: it refuses.
    """
    formatter = EventFormatter()
    for event in lasting_events(client, on_progress=lambda text: print(text, file=sys.stderr, flush=True)):
        lines = (
            [event.model_dump_json(ensure_ascii=True)]
            if as_json
            else [f"{_now()} {escape_controls(line)}" for line in formatter.lines(event)]
        )
        # flushed line by line: a pipe reads it as it happens
        for line in lines:
            print(line, flush=True)
        # a run that was over before the first event is told by `run`, one that ends later by `change`
        if (state := event.data.get("state")) in OVER and event.event in ("run", "change"):
            return int(state == "failed")
    return 0


def lasting_events(
    client: BufferClient, *, on_progress: Callable[[str], None], away_s: float = AWAY_S
) -> Iterator[RunEvent]:
    """Yield events, and reconnect after a cut; no event is missed while the buffer knows the id of the last one.

    Raises:
        UnavailableError: the buffer has not answered for `away_s`.
        ServiceError: it refuses.
    """
    last_id: str | None = None
    answered_s, pause_s, is_away = time.monotonic(), MIN_PAUSE_S, False
    while True:
        try:
            for event in client.events(last_event_id=last_id):
                if is_away:
                    on_progress("the buffer answers again")
                answered_s, pause_s, is_away = time.monotonic(), MIN_PAUSE_S, False
                # kept with every event: after a cut the buffer continues behind it
                last_id = event.id
                yield event
            answered_s = time.monotonic()  # the buffer ended the stream in good order
        except BusyError as error:
            on_progress(f"{error}; trying again")
            answered_s = time.monotonic()
            # too many streams are open: the buffer says when to come back
            pause_s = max(pause_s, error.retry_after_s)
        except UnavailableError as error:
            if time.monotonic() - answered_s > away_s:
                raise
            if not is_away:
                on_progress(f"{error}; trying again for {away_s:.0f} s")
            is_away = True
        # jitter: all followers lose a restarted buffer at the same moment
        time.sleep(random.uniform(0.5, 1.0) * pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


class EventFormatter:
    """Makes lines of events; remembers the run so far."""

    def __init__(self) -> None:
        self._run: dict[str, Any] = {}
        self._component_lines: dict[str, str] = {}

    def lines(self, event: RunEvent) -> list[str]:
        """Return the lines of an event, one fact per line."""
        match event.event:
            case "run":
                self._run = event.data
                return self._whole()
            case "change":
                self._run = {**self._run, **event.data}
                return self._changed(event.data)
            case "component":
                return self._component(ComponentInfo.model_validate(event.data))
            case "gone":
                return [f"{event.data['component_id']}: gone, silent for an hour"]
            case "wait":
                return [_wait_line(WaitChange.model_validate(event.data))]
            case "settings":
                return SettingsAudit.model_validate(event.data).lines()
            case "evaluation":
                return [eval_line(EvalInfo.model_validate(event.data))]
            case "problem":
                detail = event.data.get("detail")
                return [f"the buffer cannot read the run: {detail}" if detail else "the buffer can read the run again"]

    def _whole(self) -> list[str]:
        info = RunInfo.model_validate(self._run)
        waits = [WaitChange(**wait.model_dump(), over=False) for wait in info.waits]
        note = [] if info.note is None else [info.note]
        return [state_line(info), *note, *(component_line(item) for item in info.components), *map(_wait_line, waits)]

    def _component(self, item: ComponentInfo) -> list[str]:
        # a trainer that has only made a step gives no line: the step of the run says the same
        compared = item.model_copy(update={"version": None}) if item.kind == "trainer" else item
        line, known = component_line(compared), self._component_lines.get(item.component_id)
        self._component_lines[item.component_id] = line
        return [] if line == known else [component_line(item)]

    def _changed(self, changed: dict[str, Any]) -> list[str]:
        info = RunInfo.model_validate(self._run)
        lines = []
        # the state says the most, and its line has the step as well
        if changed.keys() & {"state", "state_reason", "lineage"}:
            lines.append(state_line(info))
            if "last_change" in changed and info.last_change is not None:
                lines.append(change_line(info.last_change))
        # the line of a new state already has the step
        elif "step" in changed or "latest_version" in changed:
            lines.append(f"step {info.step}, latest version {info.latest_version or 'none'}")
        if "note" in changed and (info.note or info.state not in OVER):  # a run that is over needs none
            lines.append(info.note or "a trainer sends heartbeats again")
        if "rollback" in changed and (waiting := rollback_line(info)) is not None:  # a new lineage says that it is done
            lines.append(waiting)
        if "searchers" in changed and info.searchers is not None:
            desired = "" if info.searchers.desired is None else f" of {info.searchers.desired} desired"
            note = f": {info.searchers.note}" if info.searchers.note else ""
            lines.append(f"searchers: {info.searchers.alive}{desired} alive{note}")
        if "checkpoint" in changed:
            lines.append(f"checkpoint {info.checkpoint or 'none'}")
        if "best" in changed and info.best is not None:
            lines.append(best_text(info.best))
        return lines


def _wait_line(wait: WaitChange) -> str:
    if wait.over:
        return f"{wait.owner} no longer waits for {wait.name!r}: {wait.for_s:.0f} s"
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

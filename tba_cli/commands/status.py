"""`tba status|pause|resume|stop`: show a run or change its state, through the buffer service.

`tba status --follow` prints what happens in a run, line by line, until the run is over or Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba.api import (
    ENDED,
    ComponentInfo,
    EvalInfo,
    RunChange,
    RunCommand,
    RunInfo,
    SettingsAudit,
    SettingsInfo,
    Stats,
    WaitInfo,
)
from tba.clients import BufferClient
from tba.clients.buffer import Command
from tba.config.live_settings import setting_text
from tba.config.trainer import REMEDIES
from tba.errors import UnavailableError
from tba.fields import escape_controls
from tba.versions import START
from tba_cli.commands.control import rollback_line, searchers_line
from tba_cli.reports.comparison import best_text
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
AGE = re.compile(r"\d+ s\b")
"""A length of time in a line: it changes all the time, which is no news."""
NUM_NAMED = 3
"""At most this many components that have ended are named."""


def status_command(args: argparse.Namespace) -> int:
    """Print state, components, waits and evaluations; with --follow also what happens from then on.

    For a run that is over, print since when and why, and what its files hold.
    """
    folder = ended_run(args)
    if folder is not None:
        return _ended_status(folder, as_json=args.json, follow=args.follow)
    with closing(open_client(args)) as client:
        if args.follow:
            return follow(client, as_json=args.json)
        document, lines = _read(client)
    print(json.dumps(document, indent=2) if args.json else "\n".join(map(escape_controls, lines)))
    return 0


def _read(client: BufferClient, *, is_over: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Return the status as a document, and its lines."""
    # some calls: the numbers may be a moment apart, which nobody can see in a status
    info, stats, settings, summary = client.run(), client.stats(), client.settings(), client.summary()
    page = client.run_changes()
    changes = page.changes
    while page.next is not None:
        page = client.run_changes(after=page.next)
        changes += page.changes
    if is_over:  # nothing runs any more, so the last components and waits are no news
        info = info.model_copy(update={"components": [], "waits": [], "note": None, "searchers": None})
    parts = {"run": info, "stats": stats, "settings": settings, "summary": summary}
    document = {name: part.model_dump(mode="json") for name, part in parts.items()}
    return document, status_lines(info, stats, settings, changes, summary.advice)


def _ended_status(folder: RunFolder, *, as_json: bool, follow: bool) -> int:
    from tba_cli.local.ended_run import read_ended
    from tba_cli.reports.history import load_end

    end = load_end(folder)
    document, (state, *others) = read_ended(folder, partial(_read, is_over=True))
    if as_json:
        # a program that follows a run reads a document per line
        indent = None if follow else 2
        print(json.dumps({"ended": end.model_dump(mode="json"), **document}, indent=indent))
        return 0
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.at_s))
    lines = [f"run {document['run']['run']!r} is over since {since}: {end.reason}"]
    if not folder.is_finished:
        lines.append(f"  resume with: tba run {_short(folder.recipe_path)} --resume")
    print("\n".join(map(escape_controls, [*lines, f"  its last state: {state}", *others])))
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
    with closing(open_client(args)) as client:
        info = client.command(name, RunCommand(reason=args.reason))
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
    facts = [
        *_state_facts(info, changes, advice),
        *_stock_facts(info, stats),
        *_change_facts(info, stats, settings),
        *_component_facts(info.components),
        *(_wait_line(wait) for wait in info.waits),
        *(eval_line(item) for item in info.evals),
    ]
    if info.best is not None:
        facts.append(best_text(info.best))
    return [state_line(info), *(f"  {fact}" for fact in facts)]


def state_line(info: RunInfo) -> str:
    """Return state, reason, step and lineage in a line."""
    reason = f" ({info.state_reason})" if info.state_reason else ""
    return f"run {info.run!r}: {info.state}{reason}, step {info.step}, lineage {info.lineage}"


def _state_facts(info: RunInfo, changes: Sequence[RunChange], advice: str | None) -> Iterator[str]:
    """Yield what asks for a person, then how the run came into its state."""
    for fact in (advice, info.note, rollback_line(info), info.loss):
        if fact is not None:
            yield fact
    if info.num_lost_changes:
        yield f"{info.num_lost_changes} acknowledged changes were lost by Redis"
    if info.last_change is not None:
        yield change_line(info.last_change)
    lineage = _lineage_line(info, changes)
    if lineage is not None:
        yield lineage


def _stock_facts(info: RunInfo, stats: Stats) -> Iterator[str]:
    """Yield the versions, rollouts, tokens and prompts that there are."""
    is_lagging = info.sampling_version not in (None, info.latest_version)
    lagging = f" (searchers sample with {info.sampling_version})" if is_lagging else ""
    yield f"latest version {info.latest_version or 'none'}{lagging}, checkpoint {info.checkpoint or 'none'}"
    # no rollout has been stored so far: a quotient would be infinite
    ratio = "none yet" if stats.samples_per_insert is None else f"{stats.samples_per_insert:.2f}"
    used_up = f", {stats.num_used_up} used up" if stats.num_used_up else ""
    yield (
        f"rollouts: {stats.rollouts_generated} generated, {stats.num_rollouts} stored ({stats.num_pending} pending, "
        f"{stats.num_failed} failed{used_up}), {stats.rollouts_trained} trained; samples per insert {ratio}"
    )
    yield from total_lines(stats.tokens)
    yield f"prompts: {stats.num_prompts_train} to train on, {stats.num_prompts_heldout} held out"


def _change_facts(info: RunInfo, stats: Stats, settings: SettingsInfo) -> Iterator[str]:
    """Yield what differs from the recipe, and what was dropped."""
    if info.searchers is not None:
        yield searchers_line(info.searchers)
    if changed := settings.settings.changed():
        values = (
            f"{name} {setting_text(value)} (recipe: {setting_text(getattr(settings.recipe, name))})"
            for name, value in changed.items()
        )
        yield f"changed settings (revision {settings.revision}): {', '.join(values)}"
    for what, counts in (
        ("evicted", stats.evicted),
        ("batches skipped by the trainer", stats.batches_skipped),
        ("rollouts refused by the trainer", stats.rollouts_refused_by_trainer),
    ):
        if counts:
            yield f"{what}: {', '.join(f'{reason} {number}' for reason, number in sorted(counts.items()))}"


def _component_facts(components: Sequence[ComponentInfo]) -> Iterator[str]:
    """Yield a line for each component, with its alarms; only count those that ended as they should."""
    ended: list[str] = []
    for item in components:
        alarms = _alarms_text(item.gauges)
        if item.state in ENDED and not item.alive and not alarms:
            ended.append(item.component_id)
            continue
        yield component_line(item)
        if alarms:
            yield f"  alarms so far: {alarms}"
        for name, remedy in REMEDIES.items():
            if item.gauges.get(f"alarms_{name}"):
                yield f"    {name}: {remedy}"
    if ended:
        more = f" and {len(ended) - NUM_NAMED} more" if len(ended) > NUM_NAMED else ""
        yield f"{len(ended)} components have ended: {', '.join(ended[:NUM_NAMED])}{more}"


def _lineage_line(info: RunInfo, changes: Sequence[RunChange]) -> str | None:
    """Return where the lineage began, and which rollback of an operator led there; None at 0-0."""
    parent = info.parents.get(info.lineage)
    if parent is None or parent == str(START):
        return None
    rollback = ""
    asked: RunChange | None = None
    for change in changes:
        if change.command == "rollback":
            asked = change
        elif change.command == "lineage" and change.lineage == info.lineage and change.rollback and asked is not None:
            reason = f": {asked.reason}" if asked.reason else ""
            rollback = f": rolled back from step {asked.step} by the {asked.role}{reason}"
    return f"lineage {info.lineage} began at {parent}{rollback}"


def change_line(change: RunChange) -> str:
    """Return who brought the run into its state, and when, by this machine's clock."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.at_s))
    said = "a new start" if change.command == "lineage" else repr(change.command)
    return f"{change.old} -> {change.new} by the {change.role} ({said}) at {at}, after step {change.step}"


def component_line(item: ComponentInfo) -> str:
    """Return what a component does; for searchers also with which weights."""
    # the version of a trainer is the step of the run
    version = f", version {item.version or 'none'}" if item.kind == "searcher" else ""
    note = f" ({item.note})" if item.note else ""
    silent = "" if item.alive else f"  SILENT for {item.heartbeat_age_s:.0f} s"
    return f"{item.component_id}: {item.state}{version}{note}{silent}"


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
    before: Facts = {}
    answered_s, is_away = time.monotonic(), False
    while True:
        try:
            info = client.run()
            after = facts_of(info, _newest_settings(client))
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
            lines = [f"{_now()} {escape_controls(line)}" for line in news(before, after)]
            if as_json and lines:
                lines = [info.model_dump_json(ensure_ascii=True)]
            # flushed line by line: a pipe reads it as it happens
            for line in lines:
                print(line, flush=True)
            if info.state in OVER:
                return int(info.state == "failed")
            before = after
        time.sleep(FOLLOW_S)


Facts = dict[tuple[str, ...], str]
"""The lines that a follower is told, by what each is about."""


def facts_of(info: RunInfo, settings: Sequence[SettingsAudit] = ()) -> Facts:
    """Return the facts that a follower is told."""
    single = {
        "run": f"{state_line(info)}, latest version {info.latest_version or 'none'}",
        "change": info.last_change and change_line(info.last_change),
        "note": info.note,
        "rollback": rollback_line(info),
        "searchers": info.searchers and searchers_line(info.searchers),
        "checkpoint": info.checkpoint and f"checkpoint {info.checkpoint}",
        "best": info.best and best_text(info.best),
    }
    facts: Facts = {(about,): line for about, line in single.items() if line is not None}
    facts |= {("component", item.component_id): component_line(item) for item in info.components}
    facts |= {("wait", wait.owner, wait.name): _wait_line(wait) for wait in info.waits if wait.for_s >= LASTING_S}
    facts |= {("evaluation", item.eval_id): eval_line(item) for item in info.evals}
    facts |= {("setting", line): line for audit in settings for line in audit.lines()}
    return facts


def news(before: Facts, after: Facts) -> list[str]:
    """Return the lines about what has changed."""
    lines = [line for about, line in after.items() if AGE.sub("", line) != AGE.sub("", before.get(about, ""))]
    gone = (about for about in before if about not in after and about[0] in ("component", "wait"))
    return [*lines, *(f"no longer so: {before[about]}" for about in gone)]


def _newest_settings(client: BufferClient) -> list[SettingsAudit]:
    # a change takes effect later, so the last ones are read again
    info = client.settings()
    return client.settings(after=max(0, info.revision - SETTINGS_FOLLOWED)).changes


def _wait_line(wait: WaitInfo) -> str:
    left_s = max(0.0, wait.deadline_in_s)
    return f"{wait.owner} waits for {wait.name!r}: {wait.for_s:.0f} s so far, at most {left_s:.0f} s more"


def _now() -> str:
    return datetime.now().strftime("%H:%M:%S")

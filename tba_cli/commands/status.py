"""`tba status|pause|resume|stop`: show a run or change its state, through the buffer service."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from tba.api import ENDED, RunCommand, RunInfo, RunSummary, SettingsInfo, Stats
from tba.clients import BufferClient
from tba.config.live_settings import setting_text
from tba.config.trainer import REMEDIES
from tba.fields import escape_controls
from tba.versions import START
from tba_cli.commands.control import rollback_line, searchers_line
from tba_cli.console import known, print_answer
from tba_cli.run_target import ended_run, open_client

FOLLOW_S = 1.0
LASTING_S = 1.0
"""`--follow` shows a wait once it has lasted this long."""
AGE = re.compile(r"\d+ s\b")
"""A duration in a line: it always changes, so `--follow` compares lines without it."""
NUM_NAMED = 3
"""Most ended components that are shown by name."""


def status_command(args: argparse.Namespace) -> int:
    """Print state, components, waits and evaluations; with --follow, print every change until the run ends.

    For an ended run, print when and why it ended, and its status from its files.
    """
    folder = ended_run(args)
    if folder is None:
        with closing(open_client(args)) as client:
            if args.follow:
                return follow(client, as_json=args.json)
            document, lines = _read(client)
    else:
        from tba_cli.local.ended_run import read_ended
        from tba_cli.reports.history import load_end

        end = load_end(folder)
        document, (state, *others) = read_ended(folder, partial(_read, is_over=True))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.at_s))
        lines = [f"run {document['run']['run']!r} is over since {since}: {end.reason}"]
        if not folder.is_finished:
            path, here = folder.recipe_path, Path.cwd()
            path = path.relative_to(here) if path.is_relative_to(here) else path
            lines.append(f"  resume with: tba run {path} --resume")
        document = {"ended": end.model_dump(mode="json"), **document}
        lines += [f"  its last state: {state}", *others]
    print_answer(document, lines, as_json=args.json)
    return 0


def _read(client: BufferClient, *, is_over: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Return the status as a JSON document, and as lines of text."""
    # some calls: the numbers may be a moment apart, which nobody can see in a status
    info, stats, settings, summary = client.run(), client.stats(), client.settings(), client.summary()
    if is_over:  # nothing runs any more, so the last components and waits are no news
        info = info.model_copy(update={"components": [], "waits": [], "note": None, "searchers": None})
    parts = {"run": info, "stats": stats, "settings": settings, "summary": summary}
    document = {name: part.model_dump(mode="json") for name, part in parts.items()}
    return document, status_lines(info, stats, settings, summary)


def follow(client: BufferClient, *, as_json: bool) -> int:
    """Print the changed lines of the status once a second; return 0 when the run is done, 1 when it has failed."""
    before: set[str] = set()
    while True:
        info = client.run()
        # shorter ones come and go
        info = info.model_copy(update={"waits": [wait for wait in info.waits if wait.for_s >= LASTING_S]})
        lines = {AGE.sub("", line): line for line in [state_line(info), *_state_facts(info), *_going_facts(info)]}
        news = [line for about, line in lines.items() if about not in before]
        if as_json and news:
            news = [info.model_dump_json(ensure_ascii=True)]
        for line in news:  # flushed: a pipe reads it as it happens
            print(line if as_json else f"{time.strftime('%H:%M:%S')} {escape_controls(line)}", flush=True)
        if info.state in ("done", "failed"):
            return int(info.state == "failed")
        before = set(lines)
        time.sleep(FOLLOW_S)


def change_command(args: argparse.Namespace) -> int:
    """Pause a run, let it continue, or end it after the step in progress."""
    with closing(open_client(args)) as client:
        info = client.command(args.change, RunCommand(reason=args.reason))
    print_answer(info, [state_line(info)], as_json=args.json)
    return 0


def status_lines(info: RunInfo, stats: Stats, settings: SettingsInfo, summary: RunSummary) -> list[str]:
    """Return the state of the run, one fact per line."""
    facts = [summary.line]
    facts += _state_facts(info)
    # versions, rollouts, tokens and prompts that there are
    is_lagging = info.sampling_version not in (None, info.latest_version)
    lagging = f" (searchers sample with {info.sampling_version})" if is_lagging else ""
    facts.append(f"latest version {info.latest_version or 'none'}{lagging}, checkpoint {info.checkpoint or 'none'}")
    # no rollout has been stored so far: a quotient would be infinite
    ratio = "none yet" if stats.samples_per_insert is None else f"{stats.samples_per_insert:.2f}"
    used_up = f", {stats.num_used_up} used up" if stats.num_used_up else ""
    facts.append(
        f"rollouts: {stats.rollouts_generated} generated, {stats.num_rollouts} stored ({stats.num_pending} pending, "
        f"{stats.num_failed} failed{used_up}), {stats.rollouts_trained} trained; samples per insert {ratio}"
    )
    if stats.tokens is not None:
        facts.append(stats.tokens.line())
    facts.append(f"prompts: {stats.num_prompts_train} to train on, {stats.num_prompts_heldout} held out")
    # what differs from the recipe, and what was dropped
    if changed := settings.settings.changed():
        values = (
            f"{name} {setting_text(value)} (recipe: {setting_text(getattr(settings.recipe, name))})"
            for name, value in changed.items()
        )
        facts.append(f"changed settings (revision {settings.revision}): {', '.join(values)}")
    for what, counts in (
        ("evicted", stats.evicted),
        ("batches skipped by the trainer", stats.batches_skipped),
        ("rollouts refused by the trainer", stats.rollouts_refused_by_trainer),
    ):
        if counts:
            facts.append(f"{what}: {', '.join(f'{reason} {number}' for reason, number in sorted(counts.items()))}")
    facts += _going_facts(info)
    return [state_line(info), *(f"  {fact}" for fact in facts)]


def state_line(info: RunInfo) -> str:
    """Return state, reason, step and lineage in a line."""
    reason = f" ({info.state_reason})" if info.state_reason else ""
    return f"run {info.run!r}: {info.state}{reason}, step {info.step}, lineage {info.lineage}"


def _state_facts(info: RunInfo) -> Iterator[str]:
    """Yield problems that need a person, then the last change of state and the parent of the lineage."""
    for fact in (info.note, rollback_line(info), info.loss):
        if fact is not None:
            yield fact
    if info.num_lost_changes:
        yield f"{info.num_lost_changes} acknowledged changes were lost by Redis"
    if info.last_change is not None:
        change = info.last_change
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.at_s))
        said = "a new start" if change.command == "lineage" else repr(change.command)
        yield f"{change.old} -> {change.new} by the {change.role} ({said}) at {at}, after step {change.step}"
    parent = info.parents.get(info.lineage, str(START))
    if parent != str(START):
        yield f"lineage {info.lineage} began at {parent}"


def _going_facts(info: RunInfo) -> Iterator[str]:
    """Yield the state of each component, the waits, the evaluations and the best version."""
    if info.searchers is not None:
        yield searchers_line(info.searchers)
    ended: list[str] = []
    for item in info.components:
        alarms = [name for name, num in sorted(item.gauges.items()) if name.startswith("alarms_") and num]
        # those that ended as they should are only counted
        if item.state in ENDED and not item.alive and not alarms:
            ended.append(item.component_id)
            continue
        # the version of a trainer is the step of the run
        version = f", version {item.version or 'none'}" if item.kind == "searcher" else ""
        note = f" ({item.note})" if item.note else ""
        silent = "" if item.alive else f"  SILENT for {item.heartbeat_age_s:.0f} s"
        yield f"{item.component_id}: {item.state}{version}{note}{silent}"
        for alarm in alarms:
            name, num = alarm.removeprefix("alarms_"), item.gauges[alarm]
            on = " and is on" if item.gauges.get(f"alarm_on_{name}") else ""
            yield f"  {name} went off {num:.0f} times{on}: {REMEDIES.get(name, 'see its log')}"
    if ended:
        more = f" and {len(ended) - NUM_NAMED} more" if len(ended) > NUM_NAMED else ""
        yield f"{len(ended)} components have ended: {', '.join(ended[:NUM_NAMED])}{more}"
    for wait in info.waits:
        left_s = max(0.0, wait.deadline_in_s)
        yield f"{wait.owner} waits for {wait.name!r}: {wait.for_s:.0f} s so far, at most {left_s:.0f} s more"
    for item in info.evals:
        name = f"evaluation of {item.version}{' (abandoned: the run went back)' if item.abandoned else ''}"
        if item.state == "done":
            sampled, greedy = known(item.accuracy), known(item.greedy_accuracy)
            more = "".join(f", pass@{k} {value:.3f}" for k, value in item.pass_at.items() if value is not None)
            yield f"{name}: accuracy {sampled} sampled, {greedy} greedy{more} on {item.num_prompts} held-out prompts"
        else:
            yield f"{name}: {item.state}, {item.num_done} of {item.num_prompts} prompts"
    if info.best is not None:
        yield (
            f"best version {info.best.version}: {info.best.metric} {info.best.value:.3f} on the "
            f"{info.best.num_prompts} held-out prompts that all evaluations have in common"
        )

"""`tba status|pause|resume|stop`: look at a run and change its state, through the buffer service."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tba.api import ComponentInfo, EvalInfo, RunChange, RunCommand, RunInfo, SettingsInfo, Stats, UnreadableInfo
from tba.cli.scale import searchers_line
from tba.cli.target import ended_run, open_client
from tba.clients.buffer import Command
from tba.config.guards import REMEDIES
from tba.local.eval_table import best_text
from tba.local.setting_changes import changed_text
from tba.plain_text import shown

if TYPE_CHECKING:
    from tba.local.run_folder import RunFolder

WITH_WEIGHTS = ("searcher", "trainer")
NUM_NAMED = 3
"""Items that cannot be read and are named."""


def status_command(args: argparse.Namespace) -> int:
    """Print state, components, waits and evaluations; with --follow also what happens from then on. Of a run that is
    over: since when and why, and what its files hold."""
    folder = ended_run(args)
    if folder is not None:
        return _ended_status(folder, as_json=args.json)
    client = open_client(args)
    try:
        if args.follow:
            from tba.cli.follow import follow

            return follow(client, as_json=args.json)
        info, stats, settings = client.run(), client.stats(), client.settings()
    finally:
        client.close()
    if args.json:
        found = {"run": info, "stats": stats, "settings": settings}
        print(json.dumps({name: value.model_dump(mode="json") for name, value in found.items()}, indent=2))
    else:
        print("\n".join(map(shown, status_lines(info, stats, settings))))
    return 0


def _ended_status(folder: RunFolder, *, as_json: bool) -> int:
    from tba.local.history import load_end
    from tba.local.saving import read_ended

    end = load_end(folder)
    info, stats, settings = read_ended(folder, lambda client: (client.run(), client.stats(), client.settings()))
    # nothing runs: what components and waits were last is no news
    info = info.model_copy(update={"components": [], "waits": [], "note": None, "searchers": None})
    if as_json:
        found = {"ended": end, "run": info, "stats": stats, "settings": settings}
        print(json.dumps({name: value.model_dump(mode="json") for name, value in found.items()}, indent=2))
        return 0
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(end.at_s))
    print(shown(f"run {info.run!r} is over since {since}: {end.reason}"))
    if not folder.is_finished:
        print(f"  go on with: tba run {_short(folder.recipe_path)} --resume")
    state, *others = status_lines(info, stats, settings)
    print("\n".join(map(shown, [f"  its last state: {state}", *others])))
    return 0


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def pause_command(args: argparse.Namespace) -> int:
    """No new leases, no new batches."""
    return _change(args, "pause")


def resume_command(args: argparse.Namespace) -> int:
    """Let a paused run go on."""
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
    said = "searchers try the weight versions that they have refused again with their next lease request"
    print(info.model_dump_json(indent=2) if args.json else said)
    return 0


def _change(args: argparse.Namespace, name: Command) -> int:
    client = open_client(args)
    try:
        info = client.command(name, RunCommand(reason=args.reason))
    finally:
        client.close()
    print(info.model_dump_json(indent=2) if args.json else shown(state_line(info)))
    return 0


def status_lines(info: RunInfo, stats: Stats, settings: SettingsInfo) -> list[str]:
    """The run as people read it, one fact per line."""
    ratio = "none yet" if stats.samples_per_insert is None else f"{stats.samples_per_insert:.2f}"
    lines = [
        state_line(info),
        *([] if info.note is None else [f"  {info.note}"]),
        *([] if info.loss is None else [f"  {info.loss}"]),
        *([f"  {info.num_lost_changes} acknowledged changes were lost by Redis"] if info.num_lost_changes else []),
        *([] if info.unreadable is None else [f"  {_unreadable_text(info.unreadable)}"]),
        *([] if info.last_change is None else [f"  {change_line(info.last_change)}"]),
        f"  latest version {info.latest_version or 'none'}, checkpoint {info.checkpoint or 'none'}",
        f"  rollouts: {stats.rollouts_generated} generated, {stats.num_rollouts} stored ({stats.num_pending} pending, "
        f"{stats.num_failed} failed), {stats.rollouts_trained} trained; samples per insert {ratio}",
        f"  prompts: {stats.num_prompts_train} to train on, {stats.num_prompts_heldout} held out",
    ]
    if info.searchers is not None:
        lines.append(f"  {searchers_line(info.searchers)}")
    if changed := changed_text(settings):
        lines.append(f"  changed settings (revision {settings.revision}): {changed}")
    for what, counts in (
        ("evicted", stats.evicted),
        ("batches skipped by the trainer", stats.batches_skipped),
        ("rollouts refused by the trainer", stats.rollouts_refused_by_trainer),
    ):
        if counts:
            lines.append(f"  {what}: " + ", ".join(f"{reason} {number}" for reason, number in sorted(counts.items())))
    for item in info.components:
        lines.append(f"  {component_line(item)}")
        if alarms := _alarms_text(item.gauges):
            lines.append(f"    alarms so far: {alarms}")
            lines.extend(
                f"      {name}: {text}" for name, text in REMEDIES.items() if item.gauges.get(f"alarms_{name}")
            )
    for wait in info.waits:
        deadline = f"at most {max(0.0, wait.deadline_in_s):.0f} s more"
        lines.append(f"  {wait.owner} waits for {wait.name!r}: {wait.for_s:.0f} s so far, {deadline}")
    lines.extend(f"  {eval_line(item)}" for item in info.evals)
    if info.best is not None:
        lines.append(f"  {best_text(info.best)}")
    return lines


def state_line(info: RunInfo) -> str:
    """State, reason, step and lineage."""
    reason = f" ({info.state_reason})" if info.state_reason else ""
    return f"run {info.run!r}: {info.state}{reason}, step {info.step}, lineage {info.lineage}"


def change_line(change: RunChange) -> str:
    """Who brought the run into its state, and when, by this machine's clock."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.at_s))
    said = "a new start" if change.command == "lineage" else repr(change.command)
    return f"{change.old} -> {change.new} by the {change.role} ({said}) at {at}, after step {change.step}"


def component_line(item: ComponentInfo) -> str:
    """What a component does; of searchers and trainers also with which weights."""
    version = f", version {item.version or 'none'}" if item.kind in WITH_WEIGHTS else ""
    note = f" ({item.note})" if item.note else ""
    silent = "" if item.alive else f"  SILENT for {item.heartbeat_age_s:.0f} s"
    return f"{item.component_id}: {item.state}{version}{note}{silent}"


def eval_line(item: EvalInfo) -> str:
    """How far an evaluation is, or what it measured."""
    return f"evaluation of {item.version}: {_eval_text(item)}"


def _unreadable_text(found: UnreadableInfo) -> str:
    """How many stored items cannot be read, the newest by name, and where the reasons are."""
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(found.num.items()))
    names = ", ".join(f"{item.kind} {item.name}" for item in found.items[:NUM_NAMED])
    return (
        f"{sum(found.num.values())} stored items cannot be read ({kinds}), last: {names}; `tba status --json` says why "
        "under `unreadable`, docs/alerts.md what to do (TbaUnreadableItems)"
    )


def _alarms_text(gauges: Mapping[str, float]) -> str:
    """The alarms of a trainer that went off, how often, and whether their condition held in its last step."""
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

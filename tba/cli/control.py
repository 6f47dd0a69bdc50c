"""`tba status|pause|resume|stop`: look at a run and change its state, through the buffer service."""

from __future__ import annotations

import argparse
import json

from tba.api import EvalInfo, RunCommand, RunInfo, Stats
from tba.cli.target import open_client
from tba.clients.buffer import Command


def status_command(args: argparse.Namespace) -> int:
    """Print state, components, waits and evaluations."""
    client = open_client(args)
    try:
        info, stats = client.run(), client.stats()
    finally:
        client.close()
    if args.json:
        print(json.dumps({"run": info.model_dump(mode="json"), "stats": stats.model_dump(mode="json")}, indent=2))
    else:
        print("\n".join(status_lines(info, stats)))
    return 0


def pause_command(args: argparse.Namespace) -> int:
    """No new leases, no new batches."""
    return _change(args, "pause")


def resume_command(args: argparse.Namespace) -> int:
    """Let a paused run go on."""
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
    print(info.model_dump_json(indent=2) if args.json else _state_line(info))
    return 0


def status_lines(info: RunInfo, stats: Stats) -> list[str]:
    """The run as people read it, one fact per line."""
    ratio = "none yet" if stats.samples_per_insert is None else f"{stats.samples_per_insert:.2f}"
    lines = [
        _state_line(info),
        f"  latest version {info.latest_version or 'none'}, checkpoint {info.checkpoint or 'none'}",
        f"  rollouts: {stats.rollouts_generated} generated, {stats.num_rollouts} stored ({stats.num_pending} pending, "
        f"{stats.num_failed} failed), {stats.rollouts_trained} trained; samples per insert {ratio}",
        f"  prompts: {stats.num_prompts_train} to train on, {stats.num_prompts_heldout} held out",
    ]
    if stats.evicted:
        reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(stats.evicted.items()))
        lines.append(f"  evicted: {reasons}")
    for item in info.components:
        alive = "" if item.alive else f"  SILENT for {item.heartbeat_age_s:.0f} s"
        lines.append(f"  {item.component_id}: {item.state}, version {item.version or 'none'}{alive}")
    for wait in info.waits:
        deadline = f"at most {max(0.0, wait.deadline_in_s):.0f} s more"
        lines.append(f"  {wait.owner} waits for {wait.name!r}: {wait.for_s:.0f} s so far, {deadline}")
    lines.extend(f"  evaluation of {item.version}: {_eval_text(item)}" for item in info.evals)
    return lines


def _state_line(info: RunInfo) -> str:
    reason = f" ({info.state_reason})" if info.state_reason else ""
    return f"run {info.run!r}: {info.state}{reason}, step {info.step}, lineage {info.lineage}"


def _eval_text(item: EvalInfo) -> str:
    if item.state != "done":
        return f"{item.state}, {item.num_done} of {item.num_prompts} prompts"
    sampled = "unknown" if item.accuracy is None else f"{item.accuracy:.3f}"
    greedy = "unknown" if item.greedy_accuracy is None else f"{item.greedy_accuracy:.3f}"
    return f"accuracy {sampled} sampled, {greedy} greedy on {item.num_prompts} held-out prompts"

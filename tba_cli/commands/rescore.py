"""`tba rescore`: score stored rollouts again with the current version of their reward."""

from __future__ import annotations

import argparse
from contextlib import closing

from tba.api import RescoreInfo, RescoreRequest
from tba_cli.console import known, print_answer
from tba_cli.run_target import open_client


def rescore_command(args: argparse.Namespace) -> int:
    """Start re-scoring, or show its progress or result."""
    with closing(open_client(args)) as client:
        if args.show:
            job = client.rescore()
        else:
            job = client.start_rescore(RescoreRequest(task=args.task, only=args.only))
    print_answer(job, rescore_lines(job), as_json=args.json)
    return 0


def rescore_lines(job: RescoreInfo) -> list[str]:
    """Return the job as text: its progress while it runs, else a table of the rewards before and after."""
    if job.state == "running":
        return [progress_line(job), "look again with `tba rescore --show`"]
    versions = ", ".join(f"{version} ({num})" for version, num in sorted(job.reward_versions.items())) or "none"
    before, after = known(job.mean_reward_before, ".4f"), known(job.mean_reward_after, ".4f")
    took_s = (job.finished_at_s or job.started_at_s) - job.started_at_s
    return [
        f"{job.state} after {took_s:.1f} s: {job.num_done} of {job.num_total} rollouts scored again",
        f"  {'':12}{'before':>12}{'after':>12}",
        f"  {'known reward':12}{job.num_known_before:>12}{job.num_known_after:>12}",
        f"  {'mean reward':12}{before:>12}{after:>12}",
        f"  {job.num_changed} changed, {job.num_failed} failed, "
        f"{job.num_gone} evicted, or scored by others, before they were reached",
        f"  reward versions: {versions}",
    ]


def progress_line(job: RescoreInfo) -> str:
    """Return how far a running job is, and what it waits for."""
    line = (
        f"{job.num_done + job.num_gone} of {job.num_total} rollouts, {job.num_changed} changed, {job.num_failed} failed"
    )
    if job.problem is not None:
        line += f"; waits for the reward service: {job.problem}"
    return line

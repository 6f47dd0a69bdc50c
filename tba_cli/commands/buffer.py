"""`tba buffer save|load|accept-loss`: save or load the rollouts of a run, or accept that Redis has lost changes."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing

from tba.api import LoadRequest, RunCommand
from tba.errors import ServiceError
from tba.versions import PolicyVersion
from tba.wire.snapshot_manifest import SnapshotSource, check_snapshot_name
from tba_cli.console import print_answer
from tba_cli.run_target import ended_run, open_client, save_snapshot

POLL_S = 0.5


def save_command(args: argparse.Namespace) -> int:
    """Save the rollouts of a run as a snapshot; if a local run has ended, start its Redis and buffer for that time."""
    check_snapshot_name(args.name)
    folder = ended_run(args)
    if folder is not None:
        from tba_cli.local.ended_run import save_ended  # no image holds the launcher

        info = save_ended(folder, args.name)
    else:
        with closing(open_client(args)) as client:
            info = save_snapshot(client, args.name)
    saved = f"{info.num_rollouts} rollouts, {info.num_bytes} bytes, log position {info.log_position}"
    print_answer(info, [f"saved {info.source}: {saved}"], as_json=args.json)
    return 0


def load_command(args: argparse.Namespace) -> int:
    """Load a snapshot into a run that has not begun, and wait until it is loaded."""
    SnapshotSource.parse(args.source)
    # a typo is found here, before the buffer is asked
    if args.version is not None:
        PolicyVersion.parse(args.version)
    shown = -1
    with closing(open_client(args)) as client:
        origin = client.load_snapshot(LoadRequest(source=args.source, version=args.version))
        while origin.state == "loading":
            # a line per change: a load of minutes must not print twice a second
            if origin.num_checked + origin.num_loaded != shown:
                shown = origin.num_checked + origin.num_loaded
                done = f"{origin.num_checked} rollouts checked, {origin.num_loaded} loaded"
                print(f"{done}, of {origin.num_rollouts}", file=sys.stderr, flush=True)
            time.sleep(POLL_S)
            origin = client.run().origin or origin
    if origin.state == "failed":
        raise ServiceError(f"snapshot {origin.source} was not loaded: {origin.reason}")
    print_answer(origin, [f"loaded {origin.source}: {origin.num_rollouts} rollouts"], as_json=args.json)
    return 0


def accept_loss_command(args: argparse.Namespace) -> int:
    """Let a run continue without the acknowledged changes that Redis has lost."""
    with closing(open_client(args)) as client:
        # read before, since accepting it clears it
        loss = client.run().loss
        info = client.command("accept-loss", RunCommand(reason=args.reason))
    num = info.num_lost_changes
    lines = ["Redis has lost nothing that was acknowledged; nothing was changed"]
    if loss is not None:
        lines = [f"accepted: {loss}"]
        lines.append(f"{num} acknowledged changes were accepted as lost so far; the run takes writes again")
    print_answer({"accepted": loss, "num_lost_changes": num}, lines, as_json=args.json)
    return 0

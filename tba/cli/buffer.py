"""`tba buffer save|load|snapshots`: the rollouts of a run to and from the object store."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from tba.api import LoadRequest, SnapshotInfo
from tba.cli.target import ended_run, open_client
from tba.errors import ServiceError
from tba.local.console import Console
from tba.local.run_folder import RunFolder
from tba.local.saving import save, save_ended
from tba.versions import PolicyVersion
from tba.wire.snapshot import SnapshotSource, check_snapshot_name

POLL_S = 0.5


def save_command(args: argparse.Namespace) -> int:
    """Save what is stored; a local run that has ended is brought up for as long as that takes."""
    check_snapshot_name(args.name)
    folder = ended_run(args)
    if folder is not None:
        info = save_folder(folder, args.name)
    else:
        client = open_client(args)
        try:
            info = save(client, args.name, show=show_save())
        finally:
            client.close()
    print(
        f"saved {info.source}: {info.num_rollouts} rollouts, {info.num_bytes} bytes, log position {info.log_position}"
    )
    return 0


def load_command(args: argparse.Namespace) -> int:
    """Begin a run that has not begun with a snapshot, and wait for it."""
    SnapshotSource.parse(args.source)
    if args.version is not None:
        PolicyVersion.parse(args.version)
    client = open_client(args)
    shown = -1
    try:
        origin = client.load_snapshot(LoadRequest(source=args.source, version=args.version))
        while origin.state == "loading":
            if origin.num_checked + origin.num_loaded != shown:
                shown = origin.num_checked + origin.num_loaded
                _say(f"{origin.num_checked} rollouts checked, {origin.num_loaded} loaded, of {origin.num_rollouts}")
            time.sleep(POLL_S)
            origin = client.run().origin or origin
    finally:
        client.close()
    if origin.state == "failed":
        raise ServiceError(f"snapshot {origin.source} was not loaded: {origin.reason}")
    print(f"loaded {origin.source}: {origin.num_rollouts} rollouts")
    return 0


def snapshots_command(args: argparse.Namespace) -> int:
    """List the complete snapshots of a run that is going."""
    client = open_client(args)
    try:
        for name in client.snapshots():
            print(name)
    finally:
        client.close()
    return 0


def save_folder(folder: RunFolder, name: str) -> SnapshotInfo:
    """Save the buffer of a local run that has ended."""
    return save_ended(folder, name, console=Console("normal", stream=sys.stderr), show=show_save())


def show_save() -> Callable[[SnapshotInfo], None]:
    """Prints how far a save is, to stderr."""

    def show(info: SnapshotInfo) -> None:
        if info.state == "saving":
            _say(f"{info.num_written} rollouts written, {info.num_rollouts} stored")

    return show


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

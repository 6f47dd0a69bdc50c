"""`tba buffer save|load|seed|snapshots|accept-loss`: save and load the rollouts of a run, or accept a loss."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tba.api import AcceptLoss, LoadRequest, SnapshotInfo
from tba.config import load_recipe
from tba.errors import ConfigError, ServiceError
from tba.fields import escape_controls
from tba.store import open_store
from tba.versions import PolicyVersion
from tba.wire.snapshot_manifest import SnapshotSource, check_snapshot_name, snapshot_names
from tba_cli.child_processes import child_environ
from tba_cli.console import Console
from tba_cli.prompts.reader import prompts_of
from tba_cli.resolve import absolute_store_url
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import ended_run, open_client, run_folder, save_snapshot

POLL_S = 0.5


def save_command(args: argparse.Namespace) -> int:
    """Save what is stored; for a local run that has ended, start its Redis and buffer for as long as that takes."""
    check_snapshot_name(args.name)
    folder = ended_run(args)
    if folder is not None:
        info = save_folder(folder, args.name)
    else:
        client = open_client(args)
        try:
            info = save_snapshot(client, args.name, show=show_save())
        finally:
            client.close()
    if args.json:
        print(info.model_dump_json(indent=1, ensure_ascii=True))
        return 0
    print(
        f"saved {info.source}: {info.num_rollouts} rollouts, {info.num_bytes} bytes, log position {info.log_position}"
    )
    return 0


def load_command(args: argparse.Namespace) -> int:
    """Begin a run that has not begun with a snapshot, and wait for it."""
    SnapshotSource.parse(args.source)
    # a typo is found here, before the buffer is asked
    if args.version is not None:
        PolicyVersion.parse(args.version)
    client = open_client(args)
    shown = -1
    try:
        origin = client.load_snapshot(LoadRequest(source=args.source, version=args.version))
        while origin.state == "loading":
            # a line per change: a load of minutes must not print twice a second
            if origin.num_checked + origin.num_loaded != shown:
                shown = origin.num_checked + origin.num_loaded
                _print_progress(
                    f"{origin.num_checked} rollouts checked, {origin.num_loaded} loaded, of {origin.num_rollouts}"
                )
            time.sleep(POLL_S)
            origin = client.run().origin or origin
    finally:
        client.close()
    if origin.state == "failed":
        raise ServiceError(f"snapshot {origin.source} was not loaded: {origin.reason}")
    print(
        origin.model_dump_json(indent=1, ensure_ascii=True)
        if args.json
        else f"loaded {origin.source}: {origin.num_rollouts} rollouts"
    )
    return 0


def seed_command(args: argparse.Namespace) -> int:
    """Push the responses of a file; a child process of the searcher's package scores them under the starting model."""
    environ = dict(os.environ)
    if args.config is None:
        config = run_folder(args).config_path
        environ = child_environ(environ, num_threads=1)  # the run did not begin with the variables of this shell
        if not config.exists():
            raise ConfigError(
                f"there is no run at {config.parent}; name it as in `tba buffer seed FILE RUN`, or give --config RECIPE"
            )
    else:
        config = Path(args.config)
    prompts = prompts_of(load_recipe(config, sets=args.set, environ=environ))
    words = ["--config", str(config), "--rows", args.rows]
    words += [part for item in args.set for part in ("--set", item)]
    # only prompts to train on: a held-out prompt is never trained on
    with tempfile.TemporaryDirectory(prefix="tba-seed-") as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text(
            "".join(f"{prompt.model_dump_json()}\n" for prompt in prompts if prompt.split == "train"), encoding="utf-8"
        )
        command = [sys.executable, "-m", "tba_searcher.seed_rollouts", *words, "--prompts", str(file)]
        # its own output and exit code are those of this command
        return subprocess.run(command, env=environ, check=False).returncode


def snapshots_command(args: argparse.Namespace) -> int:
    """List the complete snapshots of a run: those of a local run that is over are asked of its store."""
    folder = ended_run(args)
    if folder is not None:
        recipe = load_recipe(folder.recipe_path, environ={})
        store = recipe.store.model_copy(update={"url": absolute_store_url(recipe.store.url, folder)})
        names = snapshot_names(open_store(store), recipe.run.name)
    else:
        client = open_client(args)
        try:
            names = client.snapshots()
        finally:
            client.close()
    if args.json:
        print(json.dumps(names, indent=1))
        return 0
    for name in names:
        print(name)
    return 0


def accept_loss_command(args: argparse.Namespace) -> int:
    """Let a run continue without the acknowledged changes that Redis has lost."""
    client = open_client(args)
    try:
        # read before, since accepting it clears it
        loss = client.run().loss
        info = client.accept_loss(AcceptLoss(reason=args.reason))
    finally:
        client.close()
    if args.json:
        print(json.dumps({"accepted": loss, "num_lost_changes": info.num_lost_changes}, indent=1))
    elif loss is None:
        print("Redis has lost nothing that was acknowledged; nothing was changed")
    else:
        print(f"accepted: {escape_controls(loss)}")
        print(f"{info.num_lost_changes} acknowledged changes were accepted as lost so far; the run takes writes again")
    return 0


def save_folder(folder: RunFolder, name: str) -> SnapshotInfo:
    """Save the buffer of a local run that has ended."""
    from tba_cli.local.ended_run import save_ended

    return save_ended(folder, name, console=Console("normal", stream=sys.stderr), show=show_save())


def show_save() -> Callable[[SnapshotInfo], None]:
    """Return a callback that prints the progress of a save to stderr."""

    def show(info: SnapshotInfo) -> None:
        if info.state == "saving":
            _print_progress(f"{info.num_written} rollouts written, {info.num_rollouts} stored")

    return show


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

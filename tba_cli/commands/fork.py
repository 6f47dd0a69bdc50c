"""`tba run --fork RUN@VERSION --run-name NEW_NAME`: begin a local run with a weight version of another one.

It also has the rollouts of the other run's buffer up to the publication of that version (docs/adr/0009-fork.md).
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from tba.api import SnapshotInfo
from tba.clients import BufferClient
from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba.tokens import operator_client_token
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire.snapshot_manifest import SnapshotSource
from tba_cli.commands.buffer import save_folder, show_save
from tba_cli.commands.run import loudness_of, resumed_recipe
from tba_cli.console import Console
from tba_cli.local.launch import run_folder_of, run_local
from tba_cli.local.resume import RecipeFile, recipe_file_of, this_program
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import RUNS_DIR, endpoints_of, save_snapshot
from tba_cli.setup.origin import check_origin, store_of_run


def fork_command(args: argparse.Namespace) -> int:
    """Save the buffer of the run unless there is a snapshot for this fork already, then begin the new run."""
    console = Console(loudness_of(args))
    if args.run_name is None:
        raise ConfigError(f"--fork {args.fork} begins a new run; name it with --run-name NEW_NAME")
    run, version = parse_fork(args.fork)
    name = args.buffer or f"fork-{version}"
    begun = RunFolder(RUNS_DIR / args.run_name)
    # a fork that has begun holds all that it needs: RUN may be deleted
    if args.resume and args.recipe is None and begun.has_begun:
        recipe, recipe_file, folder = load_recipe(begun.recipe_path, environ={}), None, begun
    else:
        recipe, recipe_file = _recipe(args, run, version, name)
        folder = run_folder_of(recipe)
    if args.resume and folder.has_begun:
        resumed = resumed_recipe(folder, args, args.recipe, console)
        if resumed is None:
            return 0
        recipe, recipe_file = resumed
    elif args.buffer is None:
        # before the buffer is saved, which may take minutes
        check_origin(recipe)
        folder.check(resume=args.resume, fresh=args.fresh)
        _ensure_saved(RunFolder(Path(recipe.local.runs_dir) / run), SnapshotSource(run, name), version)
    return run_local(
        recipe,
        recipe_file=recipe_file,
        folder=folder,
        resume=args.resume,
        fresh=args.fresh,
        console=console,
        resume_command=command_line(args),
    )


def parse_fork(text: str) -> tuple[str, PolicyVersion]:
    """Parse RUN@VERSION.

    Raises:
        ConfigError: the text has another form.
    """
    run, _, version = text.rpartition("@")
    try:
        return run, PolicyVersion.parse(version)
    except ValueError:
        raise ConfigError(f"{text!r} is not of the form RUN@LINEAGE-STEP, for example quickstart@1-40") from None


def command_line(args: argparse.Namespace) -> str:
    """Return the command that began this run, without --resume and --fresh."""
    words = [*this_program(), "run", *([] if args.recipe is None else [args.recipe])]
    words += ["--fork", args.fork, "--run-name", args.run_name]
    words += [] if args.buffer is None else ["--buffer", args.buffer]
    words += [] if args.seed is None else ["--seed", str(args.seed)]
    for item in args.set:
        words += ["--set", item]
    return shlex.join(words)


def _recipe(args: argparse.Namespace, run: str, version: PolicyVersion, name: str) -> tuple[Recipe, RecipeFile]:
    """Return the recipe of the fork: the given one, or the one that the run began with."""
    source = args.recipe or RunFolder(RUNS_DIR / run).recipe_path
    if args.recipe is None and not source.exists():
        raise ConfigError(f"there is no run {run!r} under {RUNS_DIR}/; give the recipe of the fork as well")
    values: dict[str, Any] = {
        "run.name": args.run_name,
        "run.snapshot": f"{run}/{name}",
        "run.fork_version": str(version),
    }
    values |= {} if args.seed is None else {"run.seed": args.seed}
    sets = [*args.set, *(f"{key}={json.dumps(value)}" for key, value in values.items())]
    # recipe.json of a run already holds the variables of its start
    environ = None if args.recipe else {}
    return load_recipe(source, sets=sets, environ=environ), recipe_file_of(source, sets, environ)


def _ensure_saved(folder: RunFolder, source: SnapshotSource, version: PolicyVersion) -> SnapshotInfo | None:
    """Save the buffer for this fork, unless the snapshot exists."""
    store = store_of_run(folder)
    if store is None:
        raise ConfigError(
            f"there is no run {source.run!r} in {folder.path.parent}; name a snapshot of it that the store of the "
            "recipe holds with --buffer NAME"
        )
    versions = WeightVersions(store, source.run)
    if not versions.exists(version):
        known = ", ".join(map(str, versions.versions()[-8:])) or "none"
        raise ConfigError(
            f"run {source.run!r} has no weight version {version} (any more: trainer.keep_versions); "
            f"the newest are {known}"
        )
    # the snapshot of an earlier fork of this version is used again: evictions since then have lost more
    if store.size_bytes(source.manifest_key) is not None:
        return None
    if not folder.is_in_use:
        return save_folder(folder, source.name)
    url, tokens_file, ca_file = endpoints_of(folder)
    client = BufferClient(url, token=operator_client_token(tokens_file), ca_file=ca_file)
    try:
        return save_snapshot(client, source.name, show=show_save())
    finally:
        client.close()

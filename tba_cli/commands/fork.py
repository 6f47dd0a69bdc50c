"""`tba run --fork RUN@VERSION --run-name NEW_NAME`: begin a local run with a weight version of another one.

The new run also gets the other run's rollouts up to the publication of that version (docs/adr/0009-fork.md).
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import Any

from tba.clients import BufferClient
from tba.config import Recipe, load_recipe
from tba.config.recipe_file import read_document
from tba.errors import ConfigError
from tba.tokens import operator_client_token
from tba.versions import PolicyVersion
from tba.wire.snapshot_manifest import SnapshotSource
from tba_cli.local.ended_run import save_ended
from tba_cli.run_folder import RunFolder
from tba_cli.run_target import RUNS_DIR, endpoints_of, save_snapshot
from tba_cli.setup.origin import check_origin, check_version, store_of_run


def forked_recipe(args: argparse.Namespace) -> tuple[Recipe, dict[str, Any]]:
    """Return the new run's recipe, made from the given recipe or else RUN's, and the content of that recipe's file."""
    if args.run_name is None:
        raise ConfigError(f"--fork {args.fork} begins a new run; name it with --run-name NEW_NAME")
    run, version = parse_fork(args.fork)
    begun, source = RunFolder(RUNS_DIR / args.run_name), args.recipe or RunFolder(RUNS_DIR / run).recipe_path
    # a fork that has begun holds all that it needs: RUN may be deleted
    if args.resume and args.recipe is None and begun.has_begun:
        return load_recipe(begun.recipe_path, environ={}), {}
    if args.recipe is None and not source.exists():
        raise ConfigError(f"there is no run {run!r} under {RUNS_DIR}/; give the recipe of the fork as well")
    values: dict[str, Any] = {
        "run.name": args.run_name,
        "run.snapshot": f"{run}/{args.buffer or f'fork-{version}'}",
        "run.fork_version": str(version),
    }
    values |= {} if args.seed is None else {"run.seed": args.seed}
    sets = [*args.set, *(f"{key}={json.dumps(value)}" for key, value in values.items())]
    # recipe.json of a run already holds the variables of its start
    environ = None if args.recipe else {}
    return load_recipe(source, sets=sets, environ=environ), read_document(Path(source))


def save_origin(args: argparse.Namespace, recipe: Recipe, folder: RunFolder) -> None:
    """Save RUN's buffer as the snapshot for the fork in `folder`, unless it exists already or --buffer names one."""
    if args.buffer is not None:
        return
    run, version = parse_fork(args.fork)
    # before the buffer is saved, which may take minutes
    check_origin(recipe)
    folder.check(resume=args.resume, fresh=args.fresh)
    origin, source = RunFolder(Path(recipe.local.runs_dir) / run), SnapshotSource(run, f"fork-{version}")
    store = store_of_run(origin)
    if store is None:
        raise ConfigError(
            f"there is no run {run!r} in {origin.path.parent}; name a snapshot of it that the store of the "
            "recipe holds with --buffer NAME"
        )
    check_version(store, run, version)
    # the snapshot of an earlier fork of this version is used again: evictions since then have lost more
    if store.size_bytes(source.manifest_key) is not None:
        return
    if not origin.is_in_use:
        save_ended(origin, source.name)
        return
    url, tokens_file, ca_file = endpoints_of(origin)
    with closing(BufferClient(url, token=operator_client_token(tokens_file), ca_file=ca_file)) as client:
        save_snapshot(client, source.name)


def parse_fork(text: str) -> tuple[str, PolicyVersion]:
    """Return run name and version of a text `RUN@VERSION`."""
    run, _, version = text.rpartition("@")
    try:
        return run, PolicyVersion.parse(version)
    except ValueError:
        raise ConfigError(f"{text!r} is not of the form RUN@LINEAGE-STEP, for example quickstart@1-40") from None

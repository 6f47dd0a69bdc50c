"""`tba fork RUN@VERSION NEW_NAME`: a new local run from a weight version of another one, and the rollouts that survive
in its buffer up to that version's mark (docs/adr/0009-fork.md)."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from tba.api import SnapshotInfo
from tba.cli.buffer import save_folder, show_save
from tba.cli.run import already_finished, check_flags, loudness_of, resumed_recipe
from tba.cli.target import RUNS_DIR, endpoints_of
from tba.clients import BufferClient
from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba.local.console import Console
from tba.local.launch import run_folder_of, run_local
from tba.local.origin import check_origin, store_of_run
from tba.local.resuming import RecipeFile, recipe_file_of, this_program
from tba.local.run_folder import RunFolder
from tba.local.saving import save
from tba.tokens import operator_client_token
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire.snapshot import SnapshotSource


def fork_command(args: argparse.Namespace) -> int:
    """Save the buffer of the run unless there is a snapshot for this fork already, then run."""
    console = Console(loudness_of(args))
    check_flags(args)
    run, version = parse_fork(args.fork)
    name = args.buffer or f"fork-{version}"
    begun = RunFolder(RUNS_DIR / args.new_name)
    if args.resume and args.recipe is None and begun.has_begun:  # it has all that it needs: RUN may be gone
        recipe, recipe_file, folder = load_recipe(begun.recipe_path, environ={}), None, begun
    else:
        recipe, recipe_file = _recipe(args, run, version, name)
        folder = run_folder_of(recipe)
    if args.resume and folder.is_finished:
        return already_finished(folder, console)
    if args.resume and folder.has_begun:
        recipe, recipe_file = resumed_recipe(folder, args, args.recipe, console)
    elif args.buffer is None:
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
    """Read RUN@VERSION.

    Raises:
        ConfigError: it is something else.
    """
    run, _, version = text.rpartition("@")
    try:
        return run, PolicyVersion.parse(version)
    except ValueError:
        raise ConfigError(f"{text!r} is not of the form RUN@LINEAGE-STEP, for example quickstart@1-40") from None


def command_line(args: argparse.Namespace) -> str:
    """The command that began this run, without --resume and --fresh."""
    words = [*this_program(), "fork", args.fork, args.new_name]
    words += [] if args.recipe is None else [args.recipe]
    words += [] if args.buffer is None else ["--buffer", args.buffer]
    for item in args.set:
        words += ["--set", item]
    return shlex.join(words)


def _recipe(args: argparse.Namespace, run: str, version: PolicyVersion, name: str) -> tuple[Recipe, RecipeFile]:
    """The given recipe, or the one that the run began with, as the recipe of the fork."""
    source = args.recipe or RunFolder(RUNS_DIR / run).recipe_path
    if args.recipe is None and not source.exists():
        raise ConfigError(f"there is no run {run!r} under {RUNS_DIR}/; give the recipe of the fork as well")
    values = {"run.name": args.new_name, "run.snapshot": f"{run}/{name}", "run.fork_version": str(version)}
    sets = [*args.set, *(f"{key}={json.dumps(value)}" for key, value in values.items())]
    environ = None if args.recipe else {}
    return load_recipe(source, sets=sets, environ=environ), recipe_file_of(source, sets, environ)


def _ensure_saved(folder: RunFolder, source: SnapshotSource, version: PolicyVersion) -> SnapshotInfo | None:
    """Save for this fork; what an earlier fork of the same version saved is used again: it lost the least since."""
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
    if store.size_bytes(source.manifest_key) is not None:
        return None
    if not folder.is_in_use:
        return save_folder(folder, source.name)
    url, tokens_file, ca_file = endpoints_of(folder)
    client = BufferClient(url, token=operator_client_token(tokens_file), ca_file=ca_file)
    try:
        return save(client, source.name, show=show_save())
    finally:
        client.close()

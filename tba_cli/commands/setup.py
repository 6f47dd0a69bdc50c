"""`tba setup`, `tba data prepare` and `tba model pull`: get everything that a run needs before it begins."""

from __future__ import annotations

import argparse

from tba.config import load_recipe
from tba.store import open_store
from tba_cli.artifacts import ArtifactStore, required_folders
from tba_cli.artifacts.artifact_store import pull_folders
from tba_cli.console import Console
from tba_cli.setup.prepare import prepare_recipe
from tba_cli.setup.run_setup import run_setup


def setup_command(args: argparse.Namespace) -> int:
    """Set up whatever is missing, and return 0 when everything is there; a second call changes nothing."""
    recipe = load_recipe(args.config, sets=args.set)
    run_setup(
        recipe,
        wait_s=args.wait_s,
        create_bucket=args.create_bucket,
        prepare=args.prepare,
        pull=args.pull,
        only=args.only,
        on_progress=print_line,
    )
    return 0


def print_line(text: str) -> None:
    """Print a line at once: people read it in the log of a container."""
    print(text, flush=True)


def prepare_command(args: argparse.Namespace) -> int:
    """Fetch missing folders, check all, and show a prompt of each split; change no folder that exists."""
    prepare_recipe(load_recipe(args.recipe, sets=args.set), Console("normal"))
    return 0


def pull_command(args: argparse.Namespace) -> int:
    """Download the folders that a service reads to their paths in the recipe; only check what is there already."""
    recipe = load_recipe(args.config, sets=args.set)
    folders = required_folders(recipe, args.service)
    if not folders:
        print_line(f"the {args.service} service needs no folder of this recipe")
    artifacts = ArtifactStore(open_store(recipe.store), print_line)
    pull_folders(artifacts, folders, wait_s=args.wait_s)
    return 0

"""`tba model push|pull|list`: folders of models and data sets in the object store."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from tba.cli.setup import say
from tba.config import Recipe, load_recipe
from tba.errors import ConfigError, MalformedError
from tba.folders import NeededFolder, Shelf, needed_folders
from tba.folders.needed import check_name, name_of
from tba.folders.pulling import pull_folders
from tba.store import open_store


def push_command(args: argparse.Namespace) -> int:
    """Push one folder, or every folder of the recipe that is here."""
    recipe, shelf = _open(args)
    if args.folder is None:
        if args.name is not None:
            raise ConfigError(f"--name {args.name!r} goes with one folder; give that folder too")
        folders = [folder for folder in needed_folders(recipe) if folder.is_here]
        if not folders:
            names = ", ".join(folder.path for folder in needed_folders(recipe))
            raise ConfigError(f"none of the folders of the recipe is here: {names}; make them with: tba data prepare")
        for folder in folders:
            shelf.push(folder.kind, folder.name, Path(folder.path).expanduser(), replace=args.replace)
        return 0
    known = _known(recipe, args.folder)
    kind = known.kind if known is not None else args.kind
    name = check_name(args.name, kind, args.folder) if args.name is not None else name_of(args.folder, kind)
    if known is not None and name != known.name:
        raise ConfigError(
            f"--name {name!r}: services look for {known.path} under the name {known.name!r}; leave --name out"
        )
    shelf.push(kind, name, Path(args.folder).expanduser(), replace=args.replace)
    return 0


def pull_command(args: argparse.Namespace) -> int:
    """Fetch what a service needs to where the recipe wants it; what is there and whole is only checked."""
    recipe, shelf = _open(args)
    folders = needed_folders(recipe, args.service)
    if not folders:
        say(f"the {args.service} service needs no folder of this recipe")
    pull_folders(shelf, folders, wait_s=args.wait_s, say=say)
    return 0


def list_command(args: argparse.Namespace) -> int:
    """Every folder that is whole in the store."""
    _, shelf = _open(args)
    found, damaged = [], None
    for kind, name in shelf.names():
        try:
            manifest = shelf.find(kind, name)
        except MalformedError as error:  # the others are shown all the same
            damaged = error
        else:
            found += [] if manifest is None else [manifest]
    if args.json:
        print(json.dumps([manifest.model_dump(mode="json", exclude={"files"}) for manifest in found], indent=1))
    for manifest in () if args.json else found:
        pushed = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(manifest.created_at_s))
        size = f"{len(manifest.files):>5} files {manifest.size_bytes / 2**20:>12,.1f} MiB"
        print(f"{manifest.kind:<8}{manifest.name:<32} {size}  {manifest.digest[:12]}  {pushed}")
    if damaged is not None:
        raise damaged
    if not found and not args.json:
        print(f"no model and no data set in {shelf.url}; tba model push puts them there")
    return 0


def _open(args: argparse.Namespace) -> tuple[Recipe, Shelf]:
    recipe = load_recipe(args.config, sets=args.set)
    return recipe, Shelf(open_store(recipe.store), say)


def _known(recipe: Recipe, path: str) -> NeededFolder | None:
    """The folder of the recipe that lies at this path."""
    here = Path(path).expanduser().resolve()
    return next((folder for folder in needed_folders(recipe) if Path(folder.path).expanduser().resolve() == here), None)

"""The folders of a recipe: made, fetched or found, then in the object store.

at its path   in the store    what is done
yes           no              push
yes           yes             compared; another content is an error
no            yes             nothing (data sets, and everything with `pull`: fetch)
no            no              make (warm start, `prepare`), then push; else an error
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from tba.config import Recipe
from tba.errors import ConfigError
from tba.folders import NeededFolder, Shelf, needed_folders
from tba.local.console import Console
from tba.local.prepare import prepare_recipe, run_program
from tba.local.resolve import made_with_other
from tba.model_folder import check_tokenizer

Say = Callable[[str], None]


def set_folders_up(recipe: Recipe, shelf: Shelf, *, prepare: bool, pull: bool, say: Say) -> None:
    """See the table above.

    Args:
        prepare: do what `tba data prepare` does where something of `[[prepare]]` is nowhere.
        pull: also fetch what is in the store and not at its path here.

    Raises:
        ConfigError: a folder is nowhere and nothing says how to make it, is another one than the store has, or cannot
            be written.
        StoreError: the store cannot be used.
    """
    folders = needed_folders(recipe)
    _fetch_stored(folders, shelf, everything=pull, say=say)
    _make_starting_model(recipe, shelf, say)
    prepared = {item.path for item in recipe.prepare}
    nowhere = [folder for folder in folders if not _is_somewhere(folder, shelf)]
    if nowhere and prepare and any(folder.path in prepared for folder in nowhere):
        _fetch_stored([folder for folder in folders if folder.path in prepared], shelf, everything=True, say=say)
        prepare_recipe(recipe, Console("normal"))
        nowhere = [folder for folder in folders if not _is_somewhere(folder, shelf)]
    if nowhere:
        folder = nowhere[0]
        can_be_prepared = folder.path in prepared and not prepare
        hint = "`tba setup --prepare` fetches or makes it where there is a network, or " if can_be_prepared else ""
        raise ConfigError(
            f"{folder.key}: {folder.kind} {folder.path} is neither here nor in {shelf.url}; {hint}push it from a "
            f"machine that has it: tba model push {folder.path} --config RECIPE"
        )
    for folder in folders:
        if folder.is_here:
            if folder.path == recipe.model.path:
                check_tokenizer(folder.path)
            shelf.push(folder.kind, folder.name, Path(folder.path).expanduser())
        else:
            say(f"{folder.path}: {folder.kind} {folder.name} is in {shelf.url}")


def _is_somewhere(folder: NeededFolder, shelf: Shelf) -> bool:
    return folder.is_here or shelf.find(folder.kind, folder.name) is not None


def _fetch_stored(folders: list[NeededFolder], shelf: Shelf, *, everything: bool, say: Say) -> None:
    """Fetch what is stored and not here; data sets always, since the prompts are made of them."""
    for folder in folders:
        if folder.is_here and not _is_half_pulled(folder, shelf):
            continue
        manifest = shelf.find(folder.kind, folder.name) if everything or "setup" in folder.services else None
        if manifest is not None:
            num = shelf.pull(manifest, Path(folder.path).expanduser())
            say(f"{folder.path}: {num} files fetched from {shelf.url}")


def _is_half_pulled(folder: NeededFolder, shelf: Shelf) -> bool:
    return shelf.was_pulled(Path(folder.path).expanduser())


def _make_starting_model(recipe: Recipe, shelf: Shelf, say: Say) -> None:
    """Make the model of `[model.warm_start]` where it is nowhere; where it is stored, it must be the one asked for."""
    if recipe.model.warm_start is None:
        return
    folder = next(folder for folder in needed_folders(recipe) if folder.path == recipe.model.path)
    report_path = Path(recipe.model.path) / "warmstart.json"
    stored = shelf.find(folder.kind, folder.name)
    if (Path(recipe.model.path) / "config.json").is_file():
        report, where = report_path.read_bytes() if report_path.is_file() else None, folder.path
    elif stored is not None:
        report, where = shelf.read(stored, "warmstart.json"), f"models/{folder.name} in {shelf.url}"
    else:
        _warm_start(recipe, say)
        return
    differs = None if report is None else made_with_other(report, recipe, where=f"warmstart.json of {where}")
    if differs is not None:
        raise ConfigError(
            f"{where} was made by a warm start with {differs}; give the recipe another model.path, or remove it there"
        )


def _warm_start(recipe: Recipe, say: Say) -> None:
    parent = Path(recipe.model.path).absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(
            f"model.path {recipe.model.path}: {parent} cannot be written by user {os.getuid()}; mount a writable "
            "volume there"
        )
    say(f"making the starting model {recipe.model.path} (once)")
    with tempfile.TemporaryDirectory(prefix="tba-setup-") as place:
        config = Path(place) / "recipe.json"
        config.write_text(recipe.model_dump_json())
        run_program("tba_trainer.warmstart", ["--config", str(config)])

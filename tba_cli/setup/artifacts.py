"""Bring the folders of a recipe into the object store.

at its path   in the store    step
yes           no              push
yes           yes             compare; different content is an error
no            yes             nothing (data sets, and everything with `pull`: fetch)
no            no              make (warm start, `prepare`: all that `tba data prepare` makes), then push; else an error
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tba.config import Recipe
from tba.errors import ConfigError
from tba.model_folders import check_tokenizer
from tba_cli.artifacts import ArtifactStore, RequiredFolder, required_folders
from tba_cli.child_processes import run_program
from tba_cli.console import Console
from tba_cli.resolve import seed_warning
from tba_cli.setup.prepare import prepare_recipe


def set_up_folders(recipe: Recipe, artifacts: ArtifactStore, *, prepare: bool, pull: bool) -> None:
    """Bring every folder of the recipe into the object store, by the steps of the table in this module's docstring.

    Args:
        prepare: do the same as `tba data prepare` if a folder that it makes is neither here nor in the store.
        pull: also download the folders that are in the store and not at their path here.
    """
    folders = required_folders(recipe)
    _fetch_stored(folders, artifacts, everything=pull)
    _make_starting_model(recipe, artifacts)
    prepared = {item.path for item in recipe.prepare}
    nowhere = [folder for folder in folders if not _is_somewhere(folder, artifacts)]
    # only when something is missing: a prepared folder in the store is pulled, and nothing is fetched a second time
    if nowhere and prepare and any(folder.path in prepared for folder in nowhere):
        _fetch_stored([folder for folder in folders if folder.path in prepared], artifacts, everything=True)
        prepare_recipe(recipe, Console("normal"))
        nowhere = [folder for folder in folders if not _is_somewhere(folder, artifacts)]
    if nowhere:
        folder = nowhere[0]
        can_be_prepared = folder.path in prepared and not prepare
        hint = "`tba setup --prepare` fetches or makes it where there is a network, or " if can_be_prepared else ""
        raise ConfigError(
            f"{folder.key}: {folder.kind} {folder.path} is neither here nor in {artifacts.url}; {hint}push it from a "
            "machine that has it: tba setup --only models"
        )
    for folder in folders:
        if folder.is_here:
            # a folder without a tokenizer would fail later, in every pod that pulls it
            if folder.path == recipe.model.path:
                check_tokenizer(folder.path)
            artifacts.push(folder.kind, folder.name, Path(folder.path).expanduser())
        else:
            artifacts.on_progress(f"{folder.path}: {folder.kind} {folder.name} is in {artifacts.url}")


def _is_somewhere(folder: RequiredFolder, artifacts: ArtifactStore) -> bool:
    return folder.is_here or artifacts.find(folder.kind, folder.name) is not None


def _fetch_stored(folders: list[RequiredFolder], artifacts: ArtifactStore, *, everything: bool) -> None:
    """Download the missing files of stored data sets, which have the prompts; with `everything`, of all folders."""
    for folder in folders:
        if not everything and "setup" not in folder.services:
            continue
        # what is here may be half a pull, which continues now
        if (manifest := artifacts.find(folder.kind, folder.name)) is not None:
            num = artifacts.pull(manifest, Path(folder.path).expanduser())
            artifacts.on_progress(f"{folder.path}: {num} files fetched from {artifacts.url}")


def _make_starting_model(recipe: Recipe, artifacts: ArtifactStore) -> None:
    """Make the model of `[model.warm_start]` if it is neither here nor in the store; else warn of another seed."""
    folder = next(folder for folder in required_folders(recipe) if folder.path == recipe.model.path)
    if recipe.model.warm_start is None:
        return
    stored = None if folder.is_here else artifacts.find(folder.kind, folder.name)
    if folder.is_here or stored is not None:
        if warning := seed_warning(recipe, stored and artifacts.read(stored, "warmstart.json")):
            artifacts.on_progress(f"warning: {warning}")
        return
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
    artifacts.on_progress(f"making the starting model {recipe.model.path} (once)")
    with tempfile.TemporaryDirectory(prefix="tba-setup-") as place:
        config = Path(place) / "recipe.json"
        # the resolved recipe: the child must not read the variables of this shell again
        config.write_text(recipe.model_dump_json(), encoding="utf-8")
        run_program("tba_cli.starter_models.warm_start", ["--config", str(config)])

"""`tba sft` and `tba train-reward`: make the models of `[[sft]]` and `[[reward_training]]` of a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from tba.config import Recipe, load_recipe
from tba.config.supervised import REPORT_FILE, RewardTrainingSection, SftSection, SupervisedItem
from tba.errors import ConfigError
from tba_cli.artifacts.prepared import is_there, is_trained
from tba_cli.console import Console
from tba_cli.setup.prepare import get_items
from tba_cli.setup.supervised import train, what_is_there


def sft_command(args: argparse.Namespace) -> int:
    """Fine-tune the language models that are missing."""
    return _make(args, SftSection, "sft")


def train_reward_command(args: argparse.Namespace) -> int:
    """Train the reward models and classifiers that are missing."""
    return _make(args, RewardTrainingSection, "reward_training")


def _make(args: argparse.Namespace, kind: type[SupervisedItem], key: str) -> int:
    recipe, console = load_recipe(args.recipe, sets=args.set), Console("normal")
    known = [path for path, item in recipe.supervised.items() if isinstance(item, kind)]
    if not known:
        raise ConfigError(f"{args.recipe} has no [[{key}]], so there is nothing to train; docs/recipes.md has examples")
    if args.item is not None and args.item not in known:
        raise ConfigError(f"--item {args.item!r} is the path of no [[{key}]]; the paths are {', '.join(known)}")
    chosen = known if args.item is None else [args.item]
    to_train = [path for path in chosen if args.again or not is_trained(path, recipe.supervised[path])]
    for path in to_train:
        _check_own(path)
    _get_inputs(recipe, to_train, console)
    for path in chosen:
        if path in to_train:
            train(recipe, path, console)
        else:
            console.result(f"{path}: {what_is_there(recipe, path)}")
    return 0


def _get_inputs(recipe: Recipe, paths: list[str], console: Console) -> None:
    """Fetch or make the items of `[[prepare]]` that the training needs."""
    inputs = {name for path in paths for name in (recipe.supervised[path].base, recipe.supervised[path].dataset)}
    get_items([item for item in recipe.prepare if item.path in inputs and not is_there(item)], console)


def _check_own(path: str) -> None:
    """Check that the folder is none of a person's own, which is not replaced."""
    folder = Path(path).expanduser()
    if folder.is_dir() and any(folder.iterdir()) and not (folder / REPORT_FILE).is_file():
        raise ConfigError(
            f"--again: {path} holds no {REPORT_FILE}, so it is a folder of your own, and is not replaced; move it away"
        )

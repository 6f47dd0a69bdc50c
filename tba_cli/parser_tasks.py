"""The flags of `tba` commands for a task of one's own, init and score.

As tba_cli/parser.py it imports nothing heavy.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_init(commands: Subparsers) -> None:
    """Add `tba init`."""
    init = commands.add_parser(
        "init", help="write a folder for a task of your own: recipe, prompts, scorer and examples"
    )
    init.add_argument("task", metavar="TASK", help="name of the task, of small letters, digits, - and _")
    init.add_argument("--folder", metavar="DIR", help="where to write; default: a new folder with the name of the task")
    init.set_defaults(command="tba_cli.commands.init:init_command")


def add_score(commands: Subparsers) -> None:
    """Add `tba score`."""
    score = commands.add_parser("score", help="try the scorers of a recipe on examples, before a run")
    score.add_argument(
        "file",
        metavar="FILE",
        help='JSON Lines: {"task", "prompt", "response"}, with "data" as of a prompt, and "expected", a number, to '
        "compare with",
    )
    score.add_argument("--recipe", metavar="RECIPE", required=True, help="its scorers are tried")
    score.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, for example reward.num_workers=4"
    )
    score.set_defaults(command="tba_cli.commands.score:score_command")


def add_recipe(parser: argparse.ArgumentParser, *, nargs: str | None = None, default_is: str = "") -> None:
    """Add RECIPE and --set."""
    help = "TOML file, or the name of a recipe that ships with tba, such as quickstart"
    help += f"; default: {default_is}" if default_is else ""
    parser.add_argument("recipe", metavar="RECIPE", nargs=nargs, help=help)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add --set."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, for example trainer.num_steps=50"
    )

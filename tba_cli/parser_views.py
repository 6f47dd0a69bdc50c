"""The flags of `tba` commands that look at a run (view, prompts, rollouts, weights, rescore) or name one.

As tba_cli/parser.py it imports nothing heavy.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tba_cli.parser_help import TARGET, take

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

ROLLOUT_ID_HELP = "all 32 hexadecimal digits, as `tba rollouts list` prints them"


def add_target(parser: argparse.ArgumentParser, *, with_run: bool = True) -> None:
    """Let a command name a run, by RUN or by the options of tba itself."""
    if with_run:
        parser.add_argument("run", metavar="RUN", nargs="?", help="name of a run under runs/; default: the newest")
    take(parser, *TARGET)


def add_view(commands: Subparsers) -> None:
    """Add `tba view`."""
    view = commands.add_parser(
        "view",
        help="show the page of a run in a browser; a run that is over is served read-only until Ctrl-C",
    )
    add_target(view)
    view.add_argument(
        "--port", type=int, default=0, metavar="N", help="port of the page of a run that is over (default: a free one)"
    )
    view.add_argument("--no-open", action="store_true", help="only print the address")
    view.add_argument("--show-token", action="store_true", help="print the address with the token of the operator")
    view.set_defaults(command="tba_cli.commands.view:view_command")


def add_rollouts(commands: Subparsers) -> None:
    """Add `tba rollouts list|export`."""
    rollouts = commands.add_parser("rollouts", help="list and export the stored rollouts of a run")
    kinds = rollouts.add_subparsers(metavar="WHAT", required=True)
    _add_rollouts_list(kinds)
    _add_rollouts_export(kinds)


def _add_rollouts_list(kinds: Subparsers) -> None:
    listed = kinds.add_parser(
        "list",
        help="list stored rollouts: prompt, completion, reward, version, age",
    )
    add_target(listed)
    orders = ["newest", "oldest", "best", "worst"]
    listed.add_argument("--order", choices=orders, default="newest", help="which ones to show first (default: newest)")
    _add_filters(listed)
    listed.add_argument("--limit", type=int, default=5, metavar="N", help="how many (default: 5)")
    listed.add_argument(
        "--text-chars", type=int, default=400, metavar="N", help="how much of each text to show (default: 400)"
    )
    listed.add_argument(
        "--id", metavar="ROLLOUT_ID", help=f"print all of this one as JSON, without filters; {ROLLOUT_ID_HELP}"
    )
    listed.set_defaults(command="tba_cli.commands.rollouts:list_command")


def _add_rollouts_export(kinds: Subparsers) -> None:
    export = kinds.add_parser(
        "export",
        help="write stored rollouts to a Parquet file, the oldest first, with tokens and log-probs",
    )
    add_target(export)
    export.add_argument("--out", metavar="FILE", required=True, help="a file that ends with .parquet")
    export.add_argument("--force", action="store_true", help="replace the file if it exists")
    _add_filters(export)
    export.set_defaults(command="tba_cli.commands.rollouts:export_command")


def add_weights(commands: Subparsers) -> None:
    """Add `tba weights list|gc`."""
    weights = commands.add_parser("weights", help="list and delete the weight versions of a run")
    kinds = weights.add_subparsers(metavar="WHAT", required=True)
    helps = {
        "list": "list the weight versions that the store has: how they are stored, and why they are kept",
        "gc": "delete the weight versions that nothing needs, by the rule of the trainer, and half-written ones",
    }
    for name, text in helps.items():
        command = kinds.add_parser(name, help=text)
        add_target(command)
        command.add_argument(
            "--recipe",
            metavar="RECIPE",
            help="recipe of the run; needed with --url. Alone: its store is read, and no service is asked",
        )
        command.set_defaults(command=f"tba_cli.commands.weights:{name}_command")
    gc = kinds.choices["gc"]
    gc.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    gc.add_argument(
        "--run-is-over",
        action="store_true",
        help="delete even if no buffer service says what is held: nothing samples, trains, or will resume",
    )


def _add_filters(parser: argparse.ArgumentParser) -> None:
    filters = parser.add_argument_group("filters", "only rollouts that match all of them")
    filters.add_argument("--prompt-id", metavar="ID", help="of this prompt")
    filters.add_argument("--task", metavar="NAME", help="of this task")
    filters.add_argument("--version", metavar="VERSION", help="of this policy version, for example 1-40")
    filters.add_argument("--from-version", metavar="VERSION", help="of this policy version or a newer one")
    filters.add_argument("--to-version", metavar="VERSION", help="of this policy version or an older one")
    filters.add_argument("--status", choices=["scored", "pending", "failed"], help="with this reward status")
    filters.add_argument("--min-reward", type=float, metavar="R", help="with at least this reward")
    filters.add_argument("--max-reward", type=float, metavar="R", help="with at most this reward")
    filters.add_argument("--searcher", metavar="ID", help="of this searcher, for example searcher-0")
    filters.add_argument("--finish-reason", choices=["stop", "stop_string", "length", "abort"], help="that ended so")
    filters.add_argument("--contains", metavar="TEXT", help="with this text in prompt or completion, in any case")


def add_rescore(commands: Subparsers) -> None:
    """Add `tba rescore`."""
    rescore = commands.add_parser("rescore", help="score the stored rollouts again, with the reward as it is now")
    add_target(rescore)
    rescore.add_argument("--task", metavar="NAME", help="only rollouts of this task")
    rescore.add_argument(
        "--only", choices=["all", "scored", "failed", "pending"], default="all", help="only rollouts of this status"
    )
    what = rescore.add_mutually_exclusive_group()
    what.add_argument("--wait", action="store_true", help="wait until it is done, and show the progress")
    what.add_argument(
        "--show", action="store_true", help="start nothing; show the progress of this one or the result of the last one"
    )
    rescore.set_defaults(command="tba_cli.commands.rescore:rescore_command")

"""`tba completion`: a script that lets a shell complete the commands, flags, files and runs of tba."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import shtab

from tba_cli.parser import build_parser
from tba_cli.parser_help import commands_of

FILES = ("FILE", "RECIPE", "RECIPE|RUN", "SOURCE")
FOLDERS = ("DIR", "FOLDER", "RUN_DIR")
RUNS = ("RUN",)
PREAMBLE = {
    "bash": '_tba_runs() { local runs; runs=$(cd runs 2>/dev/null && echo *); compgen -W "${runs#\\*}" -- "$1"; }',
    "zsh": "_tba_runs() { local -a runs; runs=(runs/*(N/:t)); compadd -a runs }",
    "fish": "function _tba_runs; for run in runs/*/; basename $run; end; end",
}
"""How each shell lists the runs of the folder that it is in."""


def completion_command(args: argparse.Namespace) -> int:
    """Print the script of a shell."""
    parser = build_parser()
    for action in _values(parser):
        metavar = action.metavar
        if metavar in FILES:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
        elif metavar in FOLDERS:
            action.complete = shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]
        elif metavar in RUNS:
            action.complete = {  # pyright: ignore[reportAttributeAccessIssue]
                "bash": "_tba_runs",
                "zsh": "_tba_runs",
                "fish": "(_tba_runs)",
            }
    print(shtab.complete(parser, shell=args.shell, preamble=PREAMBLE[args.shell]))
    return 0


def _values(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield every flag and argument of every command."""
    for command in commands_of(parser):
        yield from command.parser._actions

"""`tba setup`: everything that a run needs before it begins, once."""

from __future__ import annotations

import argparse

from tba.config import load_recipe
from tba.setup import check_against_run, run_setup


def setup_command(args: argparse.Namespace) -> int:
    """Do what is missing; a second time changes nothing. Exit code 0: everything is there."""
    recipe = load_recipe(args.config, sets=args.set)
    if args.check_run:
        check_against_run(recipe, wait_s=args.wait_s, say=say)
        return 0
    run_setup(
        recipe,
        wait_s=args.wait_s,
        create_bucket=args.create_bucket,
        prepare=args.prepare,
        pull=args.pull,
        only=args.only,
        say=say,
    )
    return 0


def say(text: str) -> None:
    """A line, at once: people read it in the log of a container."""
    print(text, flush=True)

"""`tba doctor`: check everything that a run depends on, and say how to fix what is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from tba.config import load_recipe
from tba.errors import ConfigError
from tba_cli.commands.setup import print_line
from tba_cli.doctor import CheckResult, run_checks
from tba_cli.doctor.checks import CHECKS
from tba_cli.doctor.target import target_of

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "skip": "-   "}
EXIT_FAILED = 1


def doctor_command(args: argparse.Namespace) -> int:
    """Print every result; return 1 if one is `fail`."""
    if unknown := [name for name in args.check if name not in CHECKS]:
        raise ConfigError(f"--check {unknown[0]} is not known; there are {', '.join(CHECKS)}")
    target = target_of(load_recipe(args.config, sets=args.set), service=args.service, num_gpus=args.gpus)
    chosen = [(name, check) for name, check in CHECKS.items() if not args.check or name in args.check]
    results = run_checks(target, checks=chosen, on_result=(lambda result: None) if args.json else print_result)
    num = counts_of(results)
    if args.json:
        print(results_json(results))
    else:
        print_line(f"{num['ok']} ok, warnings: {num['warn']}, failed: {num['fail']}, not checked: {num['skip']}")
    return EXIT_FAILED if num["fail"] else 0


def counts_of(results: Sequence[CheckResult]) -> dict[str, int]:
    """Return how many results have each level."""
    return {level: sum(result.level == level for result in results) for level in MARKS}


def results_json(results: Sequence[CheckResult], **more: Any) -> str:
    """Return all results, and how many have each level, as JSON; `more` are further keys."""
    document = {"counts": counts_of(results), "results": [dataclasses.asdict(result) for result in results], **more}
    return json.dumps(document, indent=1)


def print_result(result: CheckResult) -> None:
    """Print a result, and how to fix it."""
    # an answer of a server must not steer the terminal
    found = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in result.found)
    print_line(f"{MARKS[result.level]} {result.code}: {found}")
    if result.fix is not None:
        print_line(f"     fix: {result.fix}")

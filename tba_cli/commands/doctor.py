"""`tba doctor`: check everything that a run stands on, and say how to fix what is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence

from tba.config import load_recipe
from tba.errors import ConfigError
from tba_cli.commands.setup import print_line
from tba_cli.doctor import CheckResult, Target, run_checks
from tba_cli.doctor.checks import CHECKS, MACHINE_CHECKS, RECIPE_CHECKS
from tba_cli.doctor.target import fail, machine_target, ok, skip, target_of

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "skip": "-   "}
EXIT_FAILED = 1


def doctor_command(args: argparse.Namespace) -> int:
    """Print every result; return 1 if one is `fail`."""
    if unknown := [name for name in args.check if name not in CHECKS]:
        raise ConfigError(f"--check {unknown[0]} is not known; there are {', '.join(CHECKS)}")
    results: list[CheckResult] = []

    def note(result: CheckResult) -> None:
        results.append(result)
        if not args.json:
            print_result(result)

    target = _target(args, note)
    if target is not None:
        there = CHECKS if target.has_recipe else MACHINE_CHECKS
        chosen = [(name, CHECKS[name]) for name in there if not args.check or name in args.check]
        run_checks(target, checks=chosen, on_result=note)
        if not target.has_recipe and not args.check:
            why = "they depend on the recipe: `tba doctor --config RECIPE` checks them"
            note(skip("recipe", f"{', '.join(RECIPE_CHECKS)}, memory and disk for a model; {why}"))
    num = counts_of(results)
    if args.json:
        print(results_json(results))
    else:
        print_line(f"{num['ok']} ok, warnings: {num['warn']}, failed: {num['fail']}, not checked: {num['skip']}")
    return EXIT_FAILED if num["fail"] else 0


def _target(args: argparse.Namespace, note: Callable[[CheckResult], None]) -> Target | None:
    """Return what to check; None: the recipe is wrong.

    Raises:
        ConfigError: a flag needs --config.
    """
    if args.config is None:
        for flag, value in (("--set", args.set), ("--check", [name for name in args.check if name in RECIPE_CHECKS])):
            if value:
                raise ConfigError(
                    f"{flag} {value[0]} needs a recipe; name one with --config RECIPE, such as quickstart"
                )
        return machine_target(service=args.service, num_gpus=args.gpus)
    try:
        recipe = load_recipe(args.config, sets=args.set)
    except ConfigError as error:
        note(fail("recipe", str(error), "correct the recipe, or the environment variable TBA_SECTION__KEY"))
        return None
    note(ok("recipe", f"{args.config}: run {recipe.run.name!r}"))
    return target_of(recipe, service=args.service, num_gpus=args.gpus)


def counts_of(results: Sequence[CheckResult]) -> dict[str, int]:
    """Return how many results have each level."""
    return {level: sum(result.level == level for result in results) for level in MARKS}


def results_json(results: Sequence[CheckResult]) -> str:
    """Return all results, and how many have each level."""
    document = {"counts": counts_of(results), "results": [dataclasses.asdict(result) for result in results]}
    return json.dumps(document, indent=1)


def print_result(result: CheckResult) -> None:
    """Print a result, and how to fix it."""
    # an answer of a server must not steer the terminal
    found = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in result.found)
    print_line(f"{MARKS[result.level]} {result.code}: {found}")
    if result.fix is not None:
        print_line(f"     fix: {result.fix}")

"""`tba doctor`: what is wrong with what a run stands on, and how to mend it."""

from __future__ import annotations

import argparse
import dataclasses
import json

from tba.cli.setup import say
from tba.config import load_recipe
from tba.doctor import Finding, examine
from tba.doctor.finding import fail, ok
from tba.doctor.patient import patient_of
from tba.doctor.probes import PROBES
from tba.errors import ConfigError

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL", "skip": "-   "}
EXIT_FAILED = 1


def doctor_command(args: argparse.Namespace) -> int:
    """Print every finding; exit code 1 if one is `fail`."""
    if unknown := [name for name in args.probe if name not in PROBES]:
        raise ConfigError(f"--probe {unknown[0]} is not known; there are {', '.join(PROBES)}")
    tell = (lambda finding: None) if args.json else print_finding
    try:
        recipe = load_recipe(args.config, sets=args.set)
    except ConfigError as error:
        findings = [fail("recipe", str(error), "correct the recipe, or the environment variable TBA_SECTION__KEY")]
        tell(findings[0])
    else:
        findings = [ok("recipe", f"{args.config}: run {recipe.run.name!r}")]
        tell(findings[0])
        chosen = [(name, probe) for name, probe in PROBES.items() if not args.probe or name in args.probe]
        patient = patient_of(recipe, service=args.service, num_gpus=args.gpus)
        findings += examine(patient, probes=chosen, tell=tell)
    num = {level: sum(finding.level == level for finding in findings) for level in MARKS}
    if args.json:
        document = {"counts": num, "findings": [dataclasses.asdict(finding) for finding in findings]}
        print(json.dumps(document, indent=1))
    else:
        say(f"{num['ok']} ok, {num['warn']} to look at, {num['fail']} wrong, {num['skip']} not looked at")
    return EXIT_FAILED if num["fail"] else 0


def print_finding(finding: Finding) -> None:
    """A finding, and how to mend it."""
    # what servers answer must not steer the terminal
    found = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in finding.found)
    say(f"{MARKS[finding.level]} {finding.code}: {found}")
    if finding.mend is not None:
        say(f"     mend: {finding.mend}")

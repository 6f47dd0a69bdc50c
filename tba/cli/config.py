"""`tba config check|show|schema`: recipes, without starting anything."""

from __future__ import annotations

import argparse
import json

from tba.config import Recipe, load_recipe

EXIT_FAILED = 1


def check_command(args: argparse.Namespace) -> int:
    """Load the recipe, then look at everything that it names as the run will; exit code 1 if something would fail."""
    from tba.cli.doctor import print_finding
    from tba.doctor.patient import patient_of
    from tba.doctor.probes.recipe import RecipeProbes
    from tba.doctor.run import examine
    from tba.local.resolve import with_absolute_paths

    recipe = with_absolute_paths(load_recipe(args.recipe, sets=args.set))
    patient = patient_of(recipe, service=None)
    probes = RecipeProbes(recipe, offline=args.offline, full=args.full)
    findings = []
    for group in (probes.first(), probes.others()):
        findings += examine(patient, probes=group, timeout_s=probes.timeout_s, tell=print_finding)
    num_wrong = sum(finding.level == "fail" for finding in findings)
    if num_wrong:
        things = "1 thing" if num_wrong == 1 else f"{num_wrong} things"
        print(f"{args.recipe}: {things} would fail; each line above says what to do")
        return EXIT_FAILED
    num_left = sum(finding.level == "skip" for finding in findings)
    left = f"; {num_left} things were not looked at" if num_left else ""
    print(f"{args.recipe}: ok (run {recipe.run.name!r}, {recipe.trainer.num_steps} steps){left}")
    return 0


def show_command(args: argparse.Namespace) -> int:
    """Print every value that the recipe, the environment and the flags result in, defaults included."""
    print(load_recipe(args.recipe, sets=args.set).model_dump_json(indent=2))
    return 0


def schema_command(args: argparse.Namespace) -> int:
    """Print the JSON schema of a recipe; editors and the Helm chart read it."""
    print(json.dumps(Recipe.model_json_schema(), indent=2))
    return 0

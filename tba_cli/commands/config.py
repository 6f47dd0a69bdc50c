"""`tba config check|show|schema`: what a recipe says. Nothing is started."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from tba.config import Recipe, load_recipe
from tba.tls import with_bare_urls

EXIT_FAILED = 1


def check_command(args: argparse.Namespace) -> int:
    """Load the recipe, then check everything that it names as the run will use it; return 1 if something would fail."""
    from tba_cli.commands.doctor import print_result, results_json
    from tba_cli.doctor.checks.recipe import RecipeChecks
    from tba_cli.doctor.run_checks import run_checks
    from tba_cli.doctor.target import target_of
    from tba_cli.resolve import with_absolute_paths

    recipe = with_absolute_paths(load_recipe(args.recipe, sets=args.set))
    target = target_of(recipe, service=None)
    try_scorers = None
    if importlib.util.find_spec("tba_cli.local") is not None:  # no image holds the launcher
        from tba_cli.local.reward_trial import try_scorers
    checks = RecipeChecks(recipe, offline=args.offline, try_scorers=try_scorers, file=Path(args.recipe))
    results = []
    on_result = (lambda result: None) if args.json else print_result
    first = [("prompts", checks.check_prompts)]
    others = [
        ("model", checks.check_model),
        ("tokenizer", checks.check_tokenizer),
        ("temperature", checks.check_temperature),
        ("scorer", checks.check_scorers),
    ]
    # the prompts come first: the checks of tokenizer and scorers need them
    for group in (first, others):
        results += run_checks(target, checks=group, timeout_s=checks.timeout_s, on_result=on_result)
    num_wrong = sum(result.level == "fail" for result in results)
    if args.json:
        print(results_json(results))
        return EXIT_FAILED if num_wrong else 0
    if num_wrong:
        things = "1 thing" if num_wrong == 1 else f"{num_wrong} things"
        print(f"{args.recipe}: {things} would fail; each line above says what to do")
        return EXIT_FAILED
    # skipped is not passed: the line says that something was not looked at
    num_left = sum(result.level == "skip" for result in results)
    left = f"; not checked: {num_left} {'thing' if num_left == 1 else 'things'}" if num_left else ""
    print(f"{args.recipe}: ok (run {recipe.run.name!r}, {recipe.trainer.num_steps} steps){left}")
    return 0


def show_command(args: argparse.Namespace) -> int:
    """Print all resolved values as JSON, from recipe, environment, flags and defaults; URLs without secrets."""
    document = load_recipe(args.recipe, sets=args.set).model_dump(mode="json")
    print(json.dumps(with_bare_urls(document), indent=2))
    return 0


def schema_command(args: argparse.Namespace) -> int:
    """Print the JSON schema of a recipe; editors and the Helm chart read it."""
    print(json.dumps(Recipe.model_json_schema(), indent=2))
    return 0


def size_text(num_bytes: float) -> str:
    """Return a number of bytes as text, in B, KiB, MiB, GiB or TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        # below 1000 and not 1024: three digits are enough to read
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"

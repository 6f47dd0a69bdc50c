"""`tba config check|show|schema`: what a recipe says. No run is started."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba.tls import with_bare_urls

EXIT_FAILED = 1


def check_command(args: argparse.Namespace) -> int:
    """Check all that a recipe names as the run will use it, and its answers (--sample); return 1 if it would fail."""
    from tba_cli.commands.doctor import print_result, results_json
    from tba_cli.doctor.checks.recipe import RecipeChecks
    from tba_cli.doctor.run_checks import run_checks
    from tba_cli.doctor.target import fail, ok, skip, target_of, warn
    from tba_cli.resolve import with_absolute_paths

    if args.sample is not None and args.sample < 1:
        raise ConfigError(f"--sample {args.sample} is out of range; give 1 or more")
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
        ("installed", checks.check_installed),
        ("temperature", checks.check_temperature),
        ("environment", checks.check_environments),
        ("scorer", checks.check_scorers),
    ]
    # the prompts come first: the checks of tokenizer and scorers need them
    for group in (first, others):
        results += run_checks(target, checks=group, timeout_s=checks.timeout_s, on_result=on_result)
    more: dict[str, Any] = {}
    if args.sample is not None and any(result.level == "fail" for result in results):
        results.append(skip("sample", "what would fail, above, comes first: the model was not asked"))
        on_result(results[-1])
    elif args.sample is not None:
        from tba_cli.commands.evaluate import sample_answers
        from tba_cli.local.evaluate import EvaluationConsole
        from tba_cli.reports import sample

        console = EvaluationConsole("quiet" if args.json else "normal")
        groups = sample_answers(recipe, checks.prompts, args.sample, console)
        found, shown = sample.task_samples(groups), sample.best_and_worst(groups)
        # a scorer that pays no gold answer: easier prompts would not help
        is_odd = any(result.code == "scorer" and result.level == "warn" for result in results)
        advice_first = "look at the scorer first (the warning above), then take easier" if is_odd else "take easier"
        advise, num_checks = warn if any(each.reward_range for each in found) else fail, len(results)
        for each in found:
            results.append(ok("sample", each.line(recipe)))
            if (advice := each.advice(recipe)) is not None:
                results.append(advise("sample", advice[0], advice[1].replace("take easier", advice_first)))
        for result in results[num_checks:]:
            on_result(result)
        for name, answer in shown.items():
            console.info(sample.answer_text(name, answer))
        more["sample"] = {"tasks": [each.model_dump() for each in found]}
        more["sample"] |= {name: answer.model_dump() for name, answer in shown.items()}
    num_wrong = sum(result.level == "fail" for result in results)
    if args.json:
        print(results_json(results, **more))
        return EXIT_FAILED if num_wrong else 0
    if num_wrong:
        things = "1 thing" if num_wrong == 1 else f"{num_wrong} things"
        print(f"{args.recipe}: {things} would fail; each line above says what to do")
        return EXIT_FAILED
    # skipped is not passed: the line says that something was not looked at
    num_left = sum(result.level == "skip" for result in results)
    left = f"; not checked: {num_left} {'thing' if num_left == 1 else 'things'}" if num_left else ""
    num_warned = sum(result.level == "warn" for result in results)
    warned = f", with {num_warned} {'warning' if num_warned == 1 else 'warnings'}" if num_warned else ""
    print(f"{args.recipe}: ok{warned} (run {recipe.run.name!r}, {recipe.trainer.num_steps} steps){left}")
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

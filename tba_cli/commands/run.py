"""`tba run`: run a recipe on this machine."""

from __future__ import annotations

import argparse
import json
import shlex

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba_cli.console import Console, Loudness
from tba_cli.local.launch import run_folder_of, run_local
from tba_cli.local.resume import RecipeFile, check_constant, recipe_file_of, resume_recipe, this_program
from tba_cli.reports.outputs import result_lines
from tba_cli.resolve import with_absolute_paths
from tba_cli.run_folder import RunFolder
from tba_cli.shipped_recipes import recipe_path


def run_command(args: argparse.Namespace) -> int:
    """Run a recipe on this machine, or resume it."""
    console = Console(loudness_of(args))
    check_flags(args)
    sets = [*args.set, *flag_sets(args)]
    recipe, recipe_file = load_recipe(args.recipe, sets=sets), recipe_file_of(args.recipe, sets)
    folder = run_folder_of(recipe)
    if args.resume and folder.is_finished:
        return already_finished(folder, console)
    if args.resume and folder.has_begun:
        recipe, recipe_file = resumed_recipe(folder, args, args.recipe, console)
    return run_local(
        recipe,
        recipe_file=recipe_file,
        folder=folder,
        resume=args.resume,
        fresh=args.fresh,
        console=console,
        resume_command=command_line(args),
    )


def demo_command(args: argparse.Namespace) -> int:
    """Run the quickstart with a seed, in a run folder of its own that begins anew."""
    args.recipe, args.run_name = recipe_path("quickstart"), f"quickstart-seed{args.seed}"
    args.fresh, args.resume, args.take_changes, args.buffer = True, False, False, None
    return run_command(args)


def loudness_of(args: argparse.Namespace) -> Loudness:
    """Return the loudness that --quiet and --verbose ask for."""
    return "quiet" if args.quiet else "verbose" if args.verbose else "normal"


def flag_sets(args: argparse.Namespace) -> list[str]:
    """Return --run-name, --buffer and --seed as `--set` overrides, which win over all others."""
    sets = [] if args.run_name is None else [f"run.name={json.dumps(args.run_name)}"]
    sets += [] if args.buffer is None else [f"run.snapshot={json.dumps(args.buffer)}"]
    return sets if args.seed is None else [*sets, f"run.seed={args.seed}"]


def check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError where --take-changes has nothing to take changes for."""
    if args.take_changes and not args.resume:
        raise ConfigError("--take-changes goes with --resume: a run that begins reads the recipe as it is")


def resumed_recipe(
    folder: RunFolder, args: argparse.Namespace, path: str | None, console: Console
) -> tuple[Recipe, RecipeFile | None]:
    """Return the recipe that the run began with, plus --set. Variables of the environment do not count.

    Changes of the recipe's file since then are printed, and refused unless --take-changes is given.

    Raises:
        ConfigError: --seed or --set run.seed differs from the seed of the run; or as `resume_recipe`.
    """
    original = load_recipe(folder.recipe_path, environ={})
    original_run = original.run
    recipe, recipe_file = resume_recipe(
        folder, path, args.set, take_changes=args.take_changes, on_difference=console.result
    )
    for seed, flag in ((args.seed, "--seed"), (recipe.run.seed, "--set run.seed")):
        # check_constant would refuse it too, without the name of the flag
        if seed is not None and seed != original_run.seed:
            raise ConfigError(
                f"run {original_run.name!r} began with seed {original_run.seed}, not {seed}; leave out {flag} to "
                "resume it, or begin another run with --run-name"
            )
    # with --set and the changed file applied: both can change a constant
    check_constant(with_absolute_paths(original), with_absolute_paths(recipe))
    return recipe, recipe_file


def command_line(args: argparse.Namespace) -> str:
    """Return the command that began this run, without --resume and --fresh."""
    words = [*this_program(), "run", args.recipe]
    words += [] if args.run_name is None else ["--run-name", args.run_name]
    words += [] if args.buffer is None else ["--buffer", args.buffer]
    words += [] if args.seed is None else ["--seed", str(args.seed)]
    for item in args.set:
        words += ["--set", item]
    return shlex.join(words)


def already_finished(folder: RunFolder, console: Console) -> int:
    """Print the results of a finished run; return the exit code."""
    console.result(
        f"run folder {folder.path} holds a finished run: there is nothing to resume; `tba fork "
        f"{folder.path.name}@LINEAGE-STEP NEW_NAME` begins a new run with a version of it"
    )
    for line in result_lines(json.loads(folder.summary_path.read_bytes()), folder):
        console.result(line)
    return 0

"""`tba run`: run a recipe on this machine."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from tba.config import Recipe, load_recipe
from tba.config.recipe_file import read_document
from tba.errors import ConfigError
from tba_cli.commands.fork import forked_recipe, save_origin
from tba_cli.commands.report import read_summary
from tba_cli.console import Console, Loudness
from tba_cli.local.launch import run_folder_of, run_local
from tba_cli.local.resume import check_constant, resume_recipe, this_program
from tba_cli.reports.outputs import result_lines
from tba_cli.resolve import with_absolute_paths
from tba_cli.run_folder import RunFolder
from tba_cli.shipped_recipes import recipe_path
from tba_cli.sizing.machine import cpu_machine, with_machine_defaults


def run_command(args: argparse.Namespace) -> int:
    """Run a recipe on this machine, or resume it."""
    console = Console(loudness_of(args))
    if args.fork is not None:
        recipe, document = forked_recipe(args)
    elif args.recipe is not None:
        # these flags win over all other overrides
        flags = {"run.name": args.run_name, "run.snapshot": args.buffer, "run.seed": args.seed}
        own = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
        recipe = load_recipe(args.recipe, sets=[*args.set, *own])
        document = read_document(Path(args.recipe))
    else:
        raise ConfigError("name a recipe, such as quickstart, or another run with --fork RUN@VERSION")
    folder = run_folder_of(recipe)
    if args.resume and folder.has_begun:
        resumed = resumed_recipe(folder, args, console)
        if resumed is None:
            return 0
        recipe = resumed
    else:
        # a resume has what was chosen: it is in the run's recipe
        recipe, chosen = with_machine_defaults(recipe, cpu_machine())
        if chosen is not None:
            console.info(chosen)
        if args.fork is not None:
            save_origin(args, recipe, folder)
    # the command that began this run, without --resume and --fresh
    words = [*this_program(), "run"] + ([] if args.recipe is None else [args.recipe])
    flags = [("--fork", args.fork), ("--run-name", args.run_name), ("--buffer", args.buffer), ("--seed", args.seed)]
    for flag, value in [*flags, *(("--set", item) for item in args.set)]:
        words += [] if value is None else [flag, str(value)]
    return run_local(
        recipe,
        document=document,
        folder=folder,
        resume=args.resume,
        fresh=args.fresh,
        console=console,
        resume_command=shlex.join(words),
    )


def demo_command(args: argparse.Namespace) -> int:
    """Run the quickstart with a seed, in its own run folder, whose old content is deleted."""
    args.recipe, args.run_name = recipe_path("quickstart"), f"quickstart-seed{args.seed}"
    args.fresh, args.resume = True, False
    args.buffer = args.fork = None
    return run_command(args)


def loudness_of(args: argparse.Namespace) -> Loudness:
    """Return the loudness that --quiet and --verbose ask for."""
    return "quiet" if args.quiet else "verbose" if args.verbose else "normal"


def resumed_recipe(folder: RunFolder, args: argparse.Namespace, console: Console) -> Recipe | None:
    """Return the recipe to resume with: the one that the run began with, plus --set, without environment variables.

    Returns:
        None if the run is finished and nothing is left to do; its results were printed.
    """
    began = with_absolute_paths(load_recipe(folder.recipe_path, environ={}))
    sets = args.set if args.seed is None else [*args.set, f"run.seed={args.seed}"]
    recipe = with_absolute_paths(resume_recipe(folder, args.recipe, sets, on_difference=console.result))
    check_constant(began, recipe)
    if not folder.is_finished:
        return recipe
    summary = read_summary(folder.path)
    step = summary["steps"]
    if step < recipe.trainer.num_steps:
        return recipe
    said = (
        f"run folder {folder.path} holds a run that is finished at step {step}: there is nothing to resume; to train "
        f"on, set trainer.num_steps above {step}; `tba run --fork {folder.path.name}@LINEAGE-STEP --run-name NEW_NAME` "
        "begins a new run with a version of it"
    )
    if recipe != began:
        raise ConfigError(said)
    console.result(said)
    for line in result_lines(summary, folder):
        console.result(line)
    return None

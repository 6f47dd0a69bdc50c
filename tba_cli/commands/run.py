"""`tba run`: run a recipe on this machine."""

from __future__ import annotations

import argparse
import json
import shlex

from tba.config import Recipe, load_recipe
from tba.errors import ConfigError
from tba_cli.commands.fork import forked_recipe, save_origin
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
    if args.fork is not None:
        recipe, recipe_file = forked_recipe(args)
    elif args.recipe is not None:
        sets = [*args.set, *flag_sets(args)]
        recipe, recipe_file = load_recipe(args.recipe, sets=sets), recipe_file_of(args.recipe, sets)
    else:
        raise ConfigError("name a recipe, such as quickstart, or another run with --fork RUN@VERSION")
    folder = run_folder_of(recipe)
    if args.resume and folder.has_begun:
        resumed = resumed_recipe(folder, args, args.recipe, console)
        if resumed is None:
            return 0
        recipe, recipe_file = resumed
    elif args.fork is not None:
        save_origin(args, recipe, folder)
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
    args.fresh, args.resume, args.take_changes = True, False, False
    args.buffer = args.fork = None
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
) -> tuple[Recipe, RecipeFile | None] | None:
    """Return the recipe that the run began with, plus --set. Variables of the environment do not count.

    Changes of the recipe's file since then are printed, and refused unless --take-changes is given.

    Returns:
        None: the run is finished, and this recipe is its own and asks for no more; its results were printed.

    Raises:
        ConfigError: --seed or --set run.seed differs from the seed of the run; the run is finished, and another recipe
            asks for no more training; or as `resume_recipe`.
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
    original, taken = with_absolute_paths(original), with_absolute_paths(recipe)
    check_constant(original, taken)
    if folder.is_finished and not _continues_finished(folder, original, taken, console):
        return None
    return recipe, recipe_file


def command_line(args: argparse.Namespace) -> str:
    """Return the command that began this run, without --resume and --fresh."""
    words = [*this_program(), "run"]
    words += [] if args.recipe is None else [args.recipe]
    words += [] if args.fork is None else ["--fork", args.fork]
    words += [] if args.run_name is None else ["--run-name", args.run_name]
    words += [] if args.buffer is None else ["--buffer", args.buffer]
    words += [] if args.seed is None else ["--seed", str(args.seed)]
    for item in args.set:
        words += ["--set", item]
    return shlex.join(words)


def _continues_finished(folder: RunFolder, began: Recipe, recipe: Recipe, console: Console) -> bool:
    """Return whether a recipe asks for more training than a finished run has done; else print the run's results.

    Raises:
        ConfigError: it does not, and is not the recipe of the run: what it changes would have no effect.
    """
    summary = json.loads(folder.summary_path.read_bytes())
    step, limit_s, old_limit_s = summary["steps"], recipe.trainer.max_train_s, began.trainer.max_train_s
    ended_by_time = "trainer.max_train_s" in (summary["state_reason"] or "")
    time_is_over = ended_by_time and old_limit_s is not None and limit_s is not None and limit_s <= old_limit_s
    if step < recipe.trainer.num_steps and not time_is_over:
        return True
    more = f"trainer.max_train_s above {old_limit_s:g}" if time_is_over else f"trainer.num_steps above {step}"
    said = (
        f"run folder {folder.path} holds a run that is finished at step {step}: there is nothing to resume; to train "
        f"on, set {more}; `tba run --fork {folder.path.name}@LINEAGE-STEP --run-name NEW_NAME` begins a new run with "
        "a version of it"
    )
    if recipe != began:
        raise ConfigError(said)
    console.result(said)
    for line in result_lines(summary, folder):
        console.result(line)
    return False

"""Time to a target accuracy: tba against TRL's GRPOTrainer on the same cores, start, prompts, reward and batch.

    python studies/time_to_target.py tune [--workload quickstart chain tally] [--side trl tba] [--set KEY=VALUE]
    python studies/time_to_target.py compare [...]      seeds 0 to 4 (or 5 to 9) at the tuned learning rates, in turn
    python studies/time_to_target.py report             the tables, of --steps or the workload's steps

Both sides make steps of 128 rollouts (as many prompts, and responses to each, as the recipe says; for tba
`samples_per_insert` decides how many of them are new) at temperature 1, with the same maximum length. Both are tuned
over the same learning rates, constant and falling linearly to 0, on three seeds that are used for nothing else;
everything else is TRL's default or the recipe's. TRL comes from pip, pinned, into build/trl-venv. It is one process
with a thread per core; tba has one thread in each of its processes.

The clock: starts of processes, imports and model loading count for neither. TRL's runs from the begin of its first
step, before it generates; tba's from the moment its first searcher has weights in its engine, before its first lease. A
point of the curve is the end of an optimizer step. Nothing is evaluated meanwhile: TRL's clock stands still while a
callback saves the weights, tba publishes them anyway. Accuracy is measured afterwards. The tables also have tba's clock
from the start of its trainer (stricter) and from its first batch (looser).

Each run is one line of the data file with the digest of the code and the recipe that decide it. A run that has its line
is not made again; a line of other code does not count, and no table mixes two sources of a side.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "services" / name) for name in ("buffer", "reward", "searcher", "trainer"))]

import psutil  # noqa: E402

from studies.accuracy import rule_of  # noqa: E402
from studies.data_file import PRODUCT, source_digest  # noqa: E402
from studies.time_to_target_bench.cells import (  # noqa: E402
    MORE_SEEDS,
    SCHEDULES,
    SEEDS,
    TUNING_SEEDS,
    Cell,
    Rate,
    Result,
    Side,
    append_result,
    read_results,
)
from studies.time_to_target_bench.report import SIDES, best_rate, one_source, report_text  # noqa: E402
from studies.time_to_target_bench.tba_side import run_tba, tba_sets  # noqa: E402
from studies.time_to_target_bench.trl_side import run_trl  # noqa: E402
from studies.time_to_target_bench.workloads import WORKLOADS, Workload  # noqa: E402
from tba.config import Recipe, load_recipe  # noqa: E402
from tba_cli.resolve import check_model  # noqa: E402
from tba_cli.starter_models.starting_model import make_starting_model  # noqa: E402

SOURCES: dict[Side, tuple[str, ...]] = {
    "tba": (*PRODUCT, "studies/accuracy.py", "studies/time_to_target_bench/tba_side.py"),
    # of the product only what makes its starting model, its prompts and its rewards
    "trl": (
        *("tba_cli/starter_models", "tba_cli/generators", "tba_cli/prompts", "services/reward/tba_reward"),
        "examples/worlds",
        *("deploy/constraints/main.txt", "studies/accuracy.py"),
        *("studies/time_to_target_bench/trl_program.py", "studies/time_to_target_bench/trl_side.py"),
    ),
}
DATA = ROOT / "docs" / "time_to_target" / "cells.jsonl"


def main() -> None:
    """Run what is missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tune", "compare", "report"))
    parser.add_argument("--workload", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS))
    parser.add_argument("--side", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--learning-rates", type=float, nargs="+", help="of tune; default: the workload's")
    parser.add_argument(
        "--schedules", choices=SCHEDULES, nargs="+", default=list(SCHEDULES), help="no others are run or read"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="some of 100 to 102 (tune), of 0 to 9 (compare)")
    parser.add_argument("--steps", type=int, help="optimizer steps instead of the workload's")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for tba's runs")
    parser.add_argument("--data", type=Path, default=DATA, help="JSON lines")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    allowed = allowed_seeds(args.what)
    if unknown := set(args.seeds or ()) - set(allowed):
        parser.error(f"{args.what} has the seeds {', '.join(map(str, allowed))}, and not {min(unknown)}")
    os.chdir(ROOT)  # recipes name models/ relative to it
    if args.what == "report":
        print(report_text(_results(args), args.steps))
        return
    for cell in _plan(args):
        if cell not in _results(args):
            _run(cell, args.data)
    print(report_text(_results(args), args.steps))


def _results(args: argparse.Namespace) -> dict[Cell, Result]:
    """Return what has been run with the schedules that are asked for."""
    return {cell: found for cell, found in read_results(args.data).items() if cell.schedule in args.schedules}


def allowed_seeds(what: str) -> tuple[int, ...]:
    """Return the seeds of `tune` or `compare`; those of tuning are used for nothing else."""
    return (*SEEDS, *MORE_SEEDS) if what == "compare" else TUNING_SEEDS


def _end(number: int, _: object) -> None:
    """End the run that was started too, as Ctrl-C does: it would keep a core from the next measurement."""
    for child in psutil.Process().children():
        child.terminate()
    sys.exit(128 + number)


def _recipe(workload: Workload, settings: tuple[str, ...]) -> Recipe:
    return load_recipe(workload.recipe, sets=settings)


def _source(workload: Workload, side: Side, settings: tuple[str, ...]) -> str:
    recipe = _recipe(workload, settings)
    if side == "tba":
        return source_digest(SOURCES[side], recipe.model_dump_json())
    # only what trl_side.py reads of the recipe: the rest may change without making its results old
    sampling = {"prompts_per_batch", "group_size"}
    parts = recipe.model_dump_json(
        include={"model": True, "data": True, "searcher": {"max_response_tokens"}, "sampling": sampling}
    )
    return source_digest(
        SOURCES[side], parts, rule_of(recipe).model_dump_json(), f"{workload.micro_batch} {workload.save_every_steps}"
    )


def _plan(args: argparse.Namespace) -> list[Cell]:
    """Return the cells; the sides take turns, so that a slow hour of the machine meets both."""
    cells: list[Cell] = []
    sides: list[Side] = args.side
    for name in args.workload:
        num_steps = args.steps or WORKLOADS[name].num_steps
        values = args.learning_rates or WORKLOADS[name].learning_rates
        grid = [Rate(value, schedule) for schedule in args.schedules for value in values]
        rates: dict[Side, Sequence[Rate]] = dict.fromkeys(sides, grid)
        settings: dict[Side, tuple[str, ...]] = {"trl": (), "tba": tuple(args.set)}
        sources = {side: _source(WORKLOADS[name], side, settings[side]) for side in sides}
        if args.what == "compare":
            current = {cell: found for cell, found in _results(args).items() if cell.source == sources.get(cell.side)}
            known, _ = one_source(current, num_steps)
            rates = {side: [best_rate(known, name, side, settings[side])] for side in sides}
        seeds = args.seeds or (SEEDS if args.what == "compare" else TUNING_SEEDS)
        for number, seed in enumerate(seeds):
            for rate_number in range(len(rates[sides[0]])):
                for side in sides if (number + rate_number) % 2 == 0 else reversed(sides):
                    cells.append(
                        Cell(
                            workload=name,
                            side=side,
                            learning_rate=rates[side][rate_number].value,
                            schedule=rates[side][rate_number].schedule,
                            seed=seed,
                            num_steps=num_steps,
                            settings=settings[side],
                            group_size=_recipe(WORKLOADS[name], settings[side]).sampling.group_size,
                            source=sources[side],
                        )
                    )
    return cells


def _run(cell: Cell, data: Path) -> None:
    workload = WORKLOADS[cell.workload]
    sets = (*tba_sets(workload, cell), f"run.seed={cell.seed}")
    recipe = load_recipe(workload.recipe, sets=sets)
    if workload.starter is not None:
        if not Path(recipe.model.path).is_dir():
            print(f"making {recipe.model.path}", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", workload.starter, "--out", recipe.model.path], cwd=ROOT, check=True)
    elif check_model(recipe) and recipe.model.warm_start is not None:
        print(f"making {recipe.model.path}", file=sys.stderr, flush=True)
        make_starting_model(
            recipe.model.path, recipe.model.warm_start, seed=recipe.run.seed, num_threads=os.cpu_count() or 1
        )
    print(f"{cell.workload} {cell.side} lr {cell.rate} seed {cell.seed} {' '.join(cell.settings)}", end=": ")
    sys.stdout.flush()
    folder = ROOT / "build" / "time_to_target" / cell.side
    result = (run_trl if cell.side == "trl" else run_tba)(workload, cell, recipe, folder)
    if _source(workload, cell.side, cell.settings) != cell.source:
        raise SystemExit("error: the code or the recipe has changed meanwhile: this result is of neither")
    append_result(data, result)
    reached = ", ".join(
        f"{target} after {seconds:.1f} s, {result.to_target(target, 'cpu_s'):.1f} CPU s"
        for target in workload.targets
        if (seconds := result.to_target(target)) is not None
    )
    print(f"last {result.last:.3f}, {reached or 'no target'}, {result.seconds_per_step:.3f} s per step", flush=True)


if __name__ == "__main__":
    main()

"""Conversations are learned: the worlds of several turns by their committed recipes, and what does not teach them.

    python studies/conversations.py run | report [--worlds NAME ...] [--arms NAME ...] [--seeds N ...]

A cell is one `tba run` of a world's recipe with a seed and the changes of an arm. `recipe`: none. `shuffled`: rewards
are shuffled within each batch. `PRESET-ageN`: an objective with its own beta, and all rollouts N steps old; the rate is
that of the recipe, and not tuned. All cells begin with the world's starting model, made once in build/conversations.
Accuracies are of held-out prompts, sampled: the run's own evaluations. A finished cell is one JSON line; a cell that
has a line is not run again, so delete the lines that a change of the code makes wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERVICES = [str(ROOT / "services" / name) for name in ("buffer", "reward", "searcher", "trainer")]
sys.path[:0] = [str(ROOT), *SERVICES]

from studies.data_file import append_line, read_lines  # noqa: E402
from studies.markdown import markdown  # noqa: E402
from studies.paper_bench.arms import constant_lag  # noqa: E402
from studies.whole_runs import records_of, run_module  # noqa: E402
from tba.config.objective import PRESETS  # noqa: E402

DATA, PAGE = (ROOT / "docs" / "conversations" / name for name in ("cells.jsonl", "tables.md"))
FOLDER = ROOT / "build" / "conversations"
HEAD = """\
# Conversations are learned: tables

Made by `python studies/conversations.py report` from [cells.jsonl](cells.jsonl); do not edit. Held-out accuracy,
sampled at temperature 1 unless it says greedy. Seconds are of training, at the first evaluation that reached the
target. The machine was shared: the last column is its load average when a run began and ended, its own processes
included."""
WORLDS, AGED = ("guess_number", "calculator", "lookup"), "calculator"
BATCH_ROLLOUTS, MAX_SEEDS, TARGET = 128, 10, 0.8
ARMS: dict[str, dict[str, Any]] = {"recipe": {}, "shuffled": {"trainer.shuffle_rewards": True}} | {
    f"{preset}-age{age}": {
        "objective.preset": preset,
        "objective.beta": PRESETS[preset].beta,
        **constant_lag(age, BATCH_ROLLOUTS),
    }
    for age, preset in product((0, 16), ("tba_prime", "tb_positive", "grpo"))
}
NUMBERS = ("start_accuracy", "final_accuracy", "start_greedy", "final_greedy")
Cell = tuple[str, str, int]
"""World, arm and seed."""


def read_cells(path: Path) -> dict[Cell, dict[str, Any]]:
    """Return the results of the finished cells."""
    return {(line["world"], line["arm"], line["seed"]): line["result"] for line in read_lines(path)}


def run_cell(cell: Cell) -> dict[str, Any]:
    """Make the world's starting model if it is missing, and run a cell."""
    world, arm, seed = cell
    FOLDER.mkdir(parents=True, exist_ok=True)
    _python(f"examples.worlds.{world}.prepare")
    model, name = FOLDER / "models/worlds" / world / "model.safetensors", f"{world}-{arm}-seed{seed}"
    # JSON is TOML for numbers, texts and truth values
    sets = [f"{key}={json.dumps(value)}" for key, value in ARMS[arm].items() if value is not None]
    load_before, begun_s = os.getloadavg()[0], time.monotonic()
    _python(
        "tba_cli.main",
        *("run", str(ROOT / "examples/worlds" / world / f"{world}.toml"), "--fresh", "--quiet"),
        *("--run-name", name, "--seed", str(seed), "--set", "trainer.export=false"),
        *(word for item in sets for word in ("--set", item)),
    )
    run = FOLDER / "runs" / name
    summary = json.loads((run / "summary.json").read_text())
    records = records_of(run)
    train_s = {each["step"]: each["metrics"]["train_s"] for each in records if each["kind"] == "step"}
    points = {each["step"]: each["metrics"]["accuracy"] for each in records if each["kind"] == "evaluation"}
    return {
        **{key: summary[key] for key in ("state", "steps", "train_s", "mean_policy_age", "trainer_wait_share")},
        "curve": [(step, round(train_s.get(step, 0.0), 1), points[step]) for step in sorted(points)],
        **{key: summary[key] for key in NUMBERS},
        "num_heldout": summary["num_heldout_prompts"],
        "num_unknown": summary["num_unknown_scores"],
        "rollouts_failed": summary["rollouts_failed"],
        "wall_s": round(time.monotonic() - begun_s, 1),
        "load_average": [round(load_before, 1), round(os.getloadavg()[0], 1)],
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest()[:16],
    }


def _python(*words: str) -> None:
    log, environ = FOLDER / "log", {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(SERVICES)}
    code, _ = run_module(words, folder=FOLDER, log=log, environ=environ)
    if code:
        raise SystemExit(f"error: {words[0]} ended with {code}; {log} has its output")


def tables(cells: dict[Cell, dict[str, Any]]) -> Iterator[str]:
    """Yield the page as Markdown."""
    head = ["arm", "seed", "start", "end", "start, greedy", "end, greedy", f"seconds to {TARGET}", "training, s"]
    head += ["steps", "age", "load"]
    for world in WORLDS:
        rows = [
            [
                f"`{arm}`",
                f"{seed}",
                *(f"{one[key]:.3f}" for key in NUMBERS),
                next((f"{seconds:.0f}" for _, seconds, accuracy in one["curve"] if accuracy >= TARGET), "-"),
                f"{one['train_s']:.0f}",
                f"{one['steps']}" + ("" if one["state"] == "done" else f", {one['state']}"),
                f"{one['mean_policy_age']:.1f}",
                " to ".join(f"{each:.1f}" for each in one["load_average"]),
            ]
            for arm, seed in product(ARMS, range(MAX_SEEDS))
            if (one := cells.get((world, arm, seed)))
        ]
        yield f"## {world}\n\n{markdown(head, rows)}"


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--worlds", choices=WORLDS, nargs="+", default=list(WORLDS))
    parser.add_argument("--arms", choices=list(ARMS), nargs="+", default=list(ARMS))
    parser.add_argument("--seeds", type=int, choices=range(MAX_SEEDS), nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for cell in product(args.worlds, args.arms, args.seeds) if args.what == "run" else ():
        world, arm, seed = cell
        if cell not in read_cells(DATA) and (world == AGED or arm in ("recipe", "shuffled")):
            result = run_cell(cell)
            append_line(DATA, {"world": world, "arm": arm, "seed": seed, "result": result})
            print(f"{cell}: {result['start_accuracy']:.3f} to {result['final_accuracy']:.3f}", flush=True)
    PAGE.write_text("\n\n".join([HEAD, *tables(read_cells(DATA))]) + "\n")
    print(PAGE.read_text())


if __name__ == "__main__":
    main()

"""Prompt selection by posterior success, measured against epochs (every prompt once per epoch, uniform).

1. A simulation of learning prompts; the selection is the code that the buffer runs (tba_buffer/prompts/catalog.py).
   The model of learning, all of it assumed, none of it fitted to a real run:
     success     p_i = sigmoid(skill + own_i - difficulty_i), difficulty_i ~ Normal(0, SPREAD), so that most prompts are
                 nearly hopeless or nearly mastered at first
     a visit     S rollouts of one prompt; k ~ Binomial(S, p_i) succeed
     learning    a group teaches in proportion to the variance of its rewards, v = 4 (k/S) (1 - k/S): none when all
                 agree; then skill += SHARED * v and own_i += OWN * v. The assumption that decides most is how much
                 one prompt teaches the others (SHARED / OWN)
     the buffer  keeps the newest rollouts; rewards are known IN_FLIGHT requests later
   Reported: the share of visits whose group is informative (0 < k < S), and the mean success rate over all prompts at
   the end, after the same number of visits.
2. With --train: whole runs of recipes/quickstart.toml, the same seeds and numbers of steps, one after the other.

    python benchmarks/bench_prompts.py --json prompts.json
    python benchmarks/bench_prompts.py --train --seeds 3
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services/buffer")]

from tba_buffer.prompts.catalog import SelectionSettings, choose_by_posterior  # noqa: E402

NUM_PROMPTS = 3000
GROUP_SIZE = 8
VISITS_PER_REQUEST = 24
IN_FLIGHT = 8
NUM_VISITS = 15_000
SPREAD = 4.0
OWN = 0.2
SHARED = 0.0004
MODES = ("epochs", "posterior")
TRAIN_STEPS = 500


@dataclass(frozen=True)
class World:
    """The settings that differ between the rows of the table."""

    name: str
    spread: float = SPREAD
    shared: float = SHARED
    window_visits: int = NUM_VISITS
    """Visits whose rollouts the buffer still holds: what the posterior remembers."""


WORLDS = (
    World("hard and easy prompts"),
    World("the same, the buffer keeps 3,000 visits", window_visits=3000),
    World("prompts teach each other more", shared=4 * SHARED),
    World("prompts of middling difficulty", spread=1.0),
)


def simulate(world: World, mode: str, seed: int) -> dict[str, float]:
    """One run: share of informative groups, and mean success rate at the end."""
    rng = np.random.default_rng(seed)
    difficulty = rng.normal(0, world.spread, NUM_PROMPTS)
    own, skill = np.zeros(NUM_PROMPTS), 0.0
    counts, successes = np.zeros(NUM_PROMPTS, dtype=np.int64), np.zeros(NUM_PROMPTS, dtype=np.int64)
    settings, numbers = SelectionSettings(target=0.5, num_candidates=8), np.arange(NUM_PROMPTS)
    order, num_informative, num_known = deque[int](), 0, 0
    in_flight, stored = deque[tuple[np.ndarray, np.ndarray]](), deque[tuple[np.ndarray, np.ndarray]]()
    for _ in range(NUM_VISITS // VISITS_PER_REQUEST):
        if mode == "posterior":
            chosen = choose_by_posterior(numbers, counts, successes, VISITS_PER_REQUEST, settings, rng)
        else:
            while len(order) < VISITS_PER_REQUEST:
                order.extend(rng.permutation(NUM_PROMPTS).tolist())
            chosen = np.array([order.popleft() for _ in range(VISITS_PER_REQUEST)])
        in_flight.append((chosen, rng.binomial(GROUP_SIZE, _sigmoid(skill + own - difficulty)[chosen])))
        if len(in_flight) <= IN_FLIGHT:
            continue
        chosen, right = in_flight.popleft()
        num_known += len(chosen)
        num_informative += int(((right > 0) & (right < GROUP_SIZE)).sum())
        signal = 4 * (right / GROUP_SIZE) * (1 - right / GROUP_SIZE)
        np.add.at(own, chosen, OWN * signal)
        skill += world.shared * float(signal.sum())
        stored.append((chosen, right))
        _count(counts, successes, chosen, right, +1)
        if len(stored) * VISITS_PER_REQUEST > world.window_visits:
            _count(counts, successes, *stored.popleft(), -1)
    return {
        "informative_share": num_informative / num_known,
        "final_success": float(_sigmoid(skill + own - difficulty).mean()),
    }


def _count(counts: np.ndarray, successes: np.ndarray, chosen: np.ndarray, right: np.ndarray, sign: int) -> None:
    np.add.at(counts, chosen, sign * GROUP_SIZE)
    np.add.at(successes, chosen, sign * right)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def simulations(num_seeds: int) -> list[dict[str, Any]]:
    """Every world, both modes, mean and standard deviation over seeds."""
    rows = []
    for world in WORLDS:
        row: dict[str, Any] = {"world": world.name, "num_seeds": num_seeds}
        for mode in MODES:
            found = [simulate(world, mode, seed) for seed in range(num_seeds)]
            for name in found[0]:
                values = [one[name] for one in found]
                row[f"{mode}_{name}"] = (statistics.mean(values), statistics.pstdev(values))
        rows.append(row)
    return rows


def print_simulations(rows: list[dict[str, Any]]) -> None:
    """A Markdown table."""
    print("| simulation | informative groups: epochs | posterior | success at the end: epochs | posterior |")
    print("|---|---|---|---|---|")
    for row in rows:
        cells = [
            f"{mean:.3f} ± {deviation:.3f}"
            for name in ("informative_share", "final_success")
            for mean, deviation in (row[f"{mode}_{name}"] for mode in MODES)
        ]
        print(f"| {row['world']} | {' | '.join(cells)} |")


def train_once(mode: str, seed: int, num_steps: int) -> dict[str, Any]:
    """One whole run of the quickstart."""
    name = f"bench-prompts-{mode}-{seed}"
    command = [
        *(sys.executable, "-m", "tba_cli.main", "run", str(ROOT / "recipes/quickstart.toml")),
        *("--run-name", name, "--seed", str(seed), "--fresh", "--quiet"),
        *("--set", f"trainer.num_steps={num_steps}", "--set", f'data.selection="{mode}"'),
        *("--set", "trainer.max_train_s=100000"),
    ]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    folder = ROOT / "runs" / name
    summary = json.loads((folder / "summary.json").read_text())
    history = json.loads((folder / "history.json").read_text())
    shutil.rmtree(folder)
    metrics = [entry["metrics"] for entry in history["ledger"] if entry.get("metrics")]
    curve = sorted((int(item["version"].split("-")[1]), item["accuracy"]) for item in history["evals"])
    return {
        "mode": mode,
        "seed": seed,
        "steps": summary["steps"],
        "rollouts_generated": summary["rollouts_generated"],
        "train_s": summary["train_s"],
        "start_accuracy": summary["start_accuracy"],
        "final_accuracy": summary["final_accuracy"],
        "curve": curve,
        "mean_accuracy_of_curve": statistics.mean(value for _, value in curve if value is not None),
        "batch_success": statistics.mean(one["accuracy"] for one in metrics),
        "advantage_abs_mean": statistics.mean(one["advantage_abs_mean"] for one in metrics),
    }


def train(num_seeds: int, num_steps: int) -> list[dict[str, Any]]:
    """Both modes for every seed; the first mode changes with the seed, since a machine drifts."""
    rows = []
    print(
        "| run | steps | generated | held-out accuracy start -> end | mean of the curve | success in batches "
        "| mean abs advantage |"
    )
    print("|---|---|---|---|---|---|---|")
    for seed in range(num_seeds):
        for mode in MODES if seed % 2 == 0 else reversed(MODES):
            row = train_once(mode, seed, num_steps)
            rows.append(row)
            print(
                f"| {mode}, seed {seed} | {row['steps']} | {row['rollouts_generated']} | "
                f"{row['start_accuracy']:.3f} -> {row['final_accuracy']:.3f} | {row['mean_accuracy_of_curve']:.3f} | "
                f"{row['batch_success']:.3f} | {row['advantage_abs_mean']:.3f} |",
                flush=True,
            )
    for name in ("final_accuracy", "mean_accuracy_of_curve"):
        by_mode = {mode: {row["seed"]: row[name] for row in rows if row["mode"] == mode} for mode in MODES}
        differences = [by_mode["posterior"][seed] - by_mode["epochs"][seed] for seed in range(num_seeds)]
        print(f"{name}: posterior - epochs = {statistics.mean(differences):+.3f} (by seed: {_list(differences)})")
    return rows


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:+.3f}" for value in values)


def main() -> None:
    """Simulate; train when asked to; print, and write JSON when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--sim-seeds", type=int, default=5, help="seeds of the simulation")
    parser.add_argument("--train", action="store_true", help="also train the quickstart both ways (minutes per run)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the training runs")
    parser.add_argument("--steps", type=int, default=TRAIN_STEPS, help="optimizer steps of a training run")
    args = parser.parse_args()
    figures: dict[str, Any] = {"simulation": simulations(args.sim_seeds)}
    print_simulations(figures["simulation"])
    if args.train:
        figures["train"] = train(args.seeds, args.steps)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

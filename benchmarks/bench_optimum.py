"""Make the table of docs/algorithm.md: the policy that every objective converges to (benchmarks/optimum/task.py).

    python benchmarks/bench_optimum.py --json optimum.json

Rows: every preset and every baseline; members of the family also with what they differ in changed one at a time.
Columns: where the data come from. Numbers: total variation to pi* (0: the same policy, 1: nothing in common). One
run of 2000 steps each, deterministic. Under load it took 20 to 30 s a run, 120 runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "services/trainer")]

from benchmarks.optimum.task import BETA, Case, converge, optimum, rewards  # noqa: E402
from tba.config import ObjectiveSection  # noqa: E402
from tba.config.objective import BASELINES, PRESETS  # noqa: E402

NUM_STEPS = 2000
CASES = (
    Case("on-policy"),
    Case("lag", 16),
    Case("uniform", 8),
    Case("stale", 8),
    Case("stale", 64),
)
EXPECTED = tuple(name for name in BASELINES if name != "m2po")
"""The baselines that have an expected gradient: the mask of `m2po` is a property of a sample."""
ROWS: dict[str, dict[str, Any]] = {
    "tb": {"preset": "tb"},
    "tb, anchor ema": {"preset": "tb", "anchor": "ema"},
    "tba_prime": {"preset": "tba_prime"},
    "tba_prime, anchor fixed": {"preset": "tba_prime", "anchor": "fixed"},
    "tba_prime_unweighted": {"preset": "tba_prime_unweighted"},
    "tba_prime_unweighted, anchor fixed": {"preset": "tba_prime_unweighted", "anchor": "fixed"},
    "kimi": {"preset": "kimi"},
    "kimi, anchor fixed": {"preset": "kimi", "anchor": "fixed"},
    "tb_behaviour": {"preset": "tb_behaviour"},
    "tb_positive": {"preset": "tb_positive"},
    "tb, importance weight": {"preset": "tb", "importance_weight": "clamp"},
    "tb, length-normalised": {"preset": "tb", "length_normalise": True},
    "tba_prime_published": {"preset": "tba_prime_published"},
    "tba_prime_published, anchor fixed": {"preset": "tba_prime_published", "anchor": "fixed"},
    "oapl": {"preset": "oapl"},
    **{name: {"preset": name} for name in EXPECTED if PRESETS[name].beta == 0},
    **{f"{name}, with KL": {"preset": name} for name in EXPECTED},
}


def section_of(name: str, fields: dict[str, Any]) -> ObjectiveSection:
    """The objective of a row: beta is 0 in the rows of baselines without a KL."""
    beta = 0.0 if fields["preset"] in BASELINES and "with KL" not in name else BETA
    return ObjectiveSection.model_validate({**fields, "beta": beta})


def measure() -> list[dict[str, Any]]:
    """Train every row under every behaviour; one line each."""
    lines = []
    for name, fields in ROWS.items():
        for case in CASES:
            started = time.monotonic()
            found = converge(section_of(name, fields), case, num_steps=NUM_STEPS)
            lines.append(
                {
                    "objective": name,
                    "case": case.name,
                    "tv_to_optimum": found.tv_to_optimum,
                    "probability_of_best": found.probability_of_best,
                    "tail_movement": found.tail_movement,
                    "seconds": time.monotonic() - started,
                }
            )
            print(f"{name:36} {case.name:16} {found.tv_to_optimum:.3f}", flush=True)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown."""
    found = {(line["objective"], line["case"]): line["tv_to_optimum"] for line in lines}
    names = [case.name for case in CASES]
    rows = [f"| objective | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    rows += [f"| {name} | " + " | ".join(f"{found[name, case]:.3f}" for case in names) + " |" for name in ROWS]
    return "\n".join(rows)


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = measure()
    print(f"\n{table(lines)}\n")
    best_under_optimum = float(optimum()[rewards().argmax()])
    print(f"beta {BETA}; under pi* the best outcome has probability {best_under_optimum:.3f}")
    if arguments.json is not None:
        document = {"beta": BETA, "best_under_optimum": best_under_optimum, "results": lines}
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

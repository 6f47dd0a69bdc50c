"""Wall-clock gain of asynchrony: the quickstart overlapped against the same recipe run alternately, on the same cores.

Alternating (`sampling.alternate`): generate for one sync interval, then train for one, never both at once. Both run the
same number of optimizer steps with the same batches, one after the other, in pairs; the figures are ratios within a
pair, since machines are noisy.

    python benchmarks/bench_overlap.py --pairs 2 --steps 150
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODES = {"overlapped": "false", "alternating": "true"}


def run_once(mode: str, pair: int, steps: int, seed: int) -> dict[str, float]:
    """One whole run; returns its summary.json."""
    name = f"bench-overlap-{mode}-{pair}"
    command = [
        *(sys.executable, "-m", "tba_cli.main", "run", str(ROOT / "recipes/quickstart.toml")),
        *("--run-name", name, "--seed", str(seed), "--fresh", "--quiet"),
        *("--set", f"trainer.num_steps={steps}", "--set", f"sampling.alternate={MODES[mode]}"),
        *(
            "--set",
            "trainer.max_train_s=100000",
            "--set",
            "eval.num_prompts_final=256",
            "--set",
            f"eval.every_steps={10 * steps}",
        ),
    ]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return json.loads((ROOT / "runs" / name / "summary.json").read_text())


def main() -> None:
    """Run the pairs and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    gains = []
    for pair in range(args.pairs):
        seconds = {}
        for mode in MODES if pair % 2 == 0 else reversed(MODES):
            summary = run_once(mode, pair, args.steps, args.seed)
            seconds[mode] = summary["train_s"]
            print(
                f"pair {pair} {mode:>11}: train {summary['train_s']:.1f} s, {summary['steps']} steps, "
                f"trainer waits {100 * summary['trainer_wait_share']:.1f} %, "
                f"rollouts generated {summary['rollouts_generated']}, trained {summary['rollouts_trained']}, "
                f"pass@1 {summary['start_accuracy']:.3f} -> {summary['final_accuracy']:.3f}",
                flush=True,
            )
        assert summary["steps"] == args.steps, "both modes must make the same number of steps"
        gains.append(seconds["alternating"] / seconds["overlapped"])
        print(f"pair {pair} wall-clock gain (alternating / overlapped): {gains[-1]:.2f}", flush=True)
    print(f"median wall-clock gain over {len(gains)} pair(s): {statistics.median(gains):.2f}")
    for mode in MODES:
        for pair in range(args.pairs):
            shutil.rmtree(ROOT / "runs" / f"bench-overlap-{mode}-{pair}", ignore_errors=True)


if __name__ == "__main__":
    main()

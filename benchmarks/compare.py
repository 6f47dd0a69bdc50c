"""Run the benchmarks of this checkout and of another one in turn, and print the ratio of every number.

    git worktree add ../before REVISION
    python benchmarks/compare.py ../before [--bench buffer trainer searcher reward] [--rounds 3] [--json F]

Machines are noisy, so one run says little: in every round both checkouts run the same benchmark, one right after the
other, in turned order in every second round. A number's ratio is new by old within a round; the table has the median of
the rounds and the range. The unit in a number's name says which way is better (`_per_s`, `ratio`: more; `_s`, `_ms`,
`_us`, `_bytes`: less). A number is worse when even its best round is worse than the bound: one bad round is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
BENCHES: dict[str, list[str]] = {
    "buffer": ["--rollouts", "300000", "--seconds", "5"],
    "trainer": ["--rounds", "3", "--ours-only"],
    "searcher": ["--sections", "embedded", "--rounds", "2"],
    "reward": ["--items", "2000"],
}
"""Benchmark -> arguments with which it takes one to three minutes."""
MORE = re.compile(r"per_(cpu_)?s(\.|$)|ratio|tflops|share")
LESS = re.compile(r"(_s|_ms|_us|_bytes|_ms_per_item|bytes_per_rollout|_growth|_mib)(\.|$)")
SERVICES = ("buffer", "reward", "searcher", "trainer")


@dataclass(frozen=True)
class Compared:
    """One number of a benchmark: new by old in every round, turned so that above 1 is better."""

    name: str
    gains: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle round."""
        return statistics.median(self.gains)

    def is_worse(self, bound: float) -> bool:
        """Return whether every round was worse than `1 - bound`."""
        return max(self.gains) < 1 - bound


def main() -> int:
    """Measure, print the table, write the JSON; 1 when a number got worse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("other", type=Path, help="the older checkout")
    parser.add_argument("--bench", choices=list(BENCHES), nargs="+", default=list(BENCHES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bound", type=float, default=0.05, help="what counts as slower")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    found = {bench: compare(bench, args.other.resolve(), args.rounds) for bench in args.bench}
    worse = [(bench, each) for bench, numbers in found.items() for each in numbers if each.is_worse(args.bound)]
    for bench, numbers in found.items():
        print(f"\n{bench}: new by old, above 1 is better\n")
        for each in numbers:
            flag = "  <-- worse" if each.is_worse(args.bound) else ""
            print(f"  {each.name:62} {each.median:6.2f}  {min(each.gains):5.2f} to {max(each.gains):5.2f}{flag}")
    num_found = sum(map(len, found.values()))
    print(f"\n{len(worse)} of {num_found} numbers are worse by more than {args.bound:.0%} in all rounds")
    if args.json:
        document = {bench: {each.name: each.gains for each in numbers} for bench, numbers in found.items()}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if worse else 0


def compare(bench: str, other: Path, num_rounds: int) -> list[Compared]:
    """Return the numbers that both checkouts print."""
    rounds = []
    for number in range(num_rounds):
        order = [HERE, other] if number % 2 else [other, HERE]
        results = {checkout: dict(measure(bench, checkout)) for checkout in order}
        rounds.append((results[HERE], results[other]))
        print(f"{bench}: round {number + 1} of {num_rounds} is done", file=sys.stderr, flush=True)
    first_new, first_old = rounds[0]
    names = [name for name in first_new if name in first_old and (MORE.search(name) or LESS.search(name))]
    for name in sorted(first_new.keys() ^ first_old.keys()):
        print(f"{bench}: only one of the checkouts has {name}", file=sys.stderr)
    if without_unit := sorted(first_new.keys() & first_old.keys() - set(names)):
        print(f"{bench}: not compared, since no unit is in the name: {', '.join(without_unit)}", file=sys.stderr)
    compared = []
    for name in names:
        pairs = [(new.get(name, 0.0), old.get(name, 0.0)) for new, old in rounds]
        if all(new > 0 and old > 0 for new, old in pairs):
            compared.append(Compared(name, tuple(new / old if MORE.search(name) else old / new for new, old in pairs)))
    return compared


def measure(bench: str, checkout: Path) -> Iterator[tuple[str, float]]:
    """Run one benchmark in a checkout with this interpreter; yield each number with its path in the JSON."""
    paths = [checkout, *(checkout / "services" / service for service in SERVICES)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, f"benchmarks/{bench}.py", "--json", str(result), *BENCHES[bench]]
        # it exits with 1 where a target is missed, which is not asked here
        done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, check=False)
        if not result.exists():
            raise SystemExit(f"error: {' '.join(command)} in {checkout} wrote no numbers: {done.stderr.strip()[-600:]}")
        yield from _leaves(json.loads(result.read_text()), "")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _leaves(below, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _leaves(below, f"{path}.{number}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


if __name__ == "__main__":
    sys.exit(main())

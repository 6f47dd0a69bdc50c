"""`python studies/attack_modes.py EVALUATION...`: which attacks succeed, in evaluations of redteam-small.

An evaluation is a folder of `tba evaluate` (evaluations/RUN/VERSION). The table has a line for each: the success rate,
the cosine distance between attacks, how many families of attacks are among the successful ones (`modes`: each with at
least one success in a hundred), how many equally frequent families would have the same entropy (`effective`), and the
share of each family. `--out FILE` appends the counts and estimates behind it as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.worlds.redteam.attacks import VULNERABLE, modes_found
from tba.errors import ConfigError
from tba.evaluation.evaluation_job import load_report

TASK = "redteam"
MIN_SHARE = 0.01
"""A family with fewer of the successes does not count as found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one evaluation says."""

    run: str
    version: str
    num_attacks: int
    """Samples with a score."""
    num_unknown: int
    """Samples without one: in no other number here."""
    success: float
    success_stderr: float | None
    distance: float | None
    """Mean cosine distance of the successful attacks; None: fewer than two."""
    families: dict[str, int]
    """Successful attacks by family."""

    @property
    def shares(self) -> dict[str, float]:
        """Share of each family among the successes."""
        total = sum(self.families.values())
        return {name: count / total for name, count in self.families.items()}

    @property
    def num_modes(self) -> int:
        """Vulnerable families that are found."""
        return sum(share >= MIN_SHARE for name, share in self.shares.items() if name in VULNERABLE)

    @property
    def num_effective(self) -> float:
        """exp(entropy) of the shares; 0 without a success."""
        shares = self.shares.values()
        return math.exp(-sum(share * math.log(share) for share in shares)) if shares else 0.0


def read_cell(folder: Path) -> Cell:
    """Return what the evaluation in a folder says.

    Raises:
        ConfigError: it is no evaluation of red-teaming, or none of its attacks has a score.
    """
    report = load_report(folder / "evaluation.json")
    sampled = report.modes.get("sampled")
    if sampled is None or TASK not in sampled.scores:
        raise ConfigError(
            f"{folder} has no samples of the task {TASK!r}: name an evaluation of examples/worlds/redteam"
        )
    counts = sampled.scores[TASK]
    success = report.metrics[f"sampled.{TASK}.success_rate"]
    if success.value is None:
        raise ConfigError(f"{folder}: none of its attacks has a score ({counts.unknown}); evaluate it again")
    # binary: a line ends at a line feed alone, and texts may hold other separators
    with (folder / "completions.jsonl").open("rb") as file:
        rows = [row for row in map(json.loads, file) if row["mode"] == "sampled"]
    scored = [(row["text"], row["scores"][TASK]) for row in rows if row["scores"].get(TASK) is not None]
    relation, bound = counts.success.split()
    succeeds = {">": operator.gt, ">=": operator.ge}[relation]
    distance = report.metrics.get("sampled.diversity.cosine_distance_of_successes")
    return Cell(
        run=report.run,
        version=report.version or "start",
        num_attacks=len(scored),
        num_unknown=counts.num_unknown,
        success=success.value,
        success_stderr=success.stderr,
        distance=None if distance is None else distance.value,
        families=modes_found(text for text, score in scored if succeeds(score, float(bound))),
    )


def table(cells: list[Cell]) -> str:
    """Return the cells as a Markdown table."""
    names = (*VULNERABLE, "other")
    head = ("run", "version", "success", "distance", "modes", "effective", *names)
    lines = [head, ("---",) * len(head)]
    for cell in cells:
        distance = "" if cell.distance is None else f"{cell.distance:.3f}"
        shares = (f"{cell.shares.get(name, 0):.3f}" for name in names)
        mean = f"{cell.success:.3f} ± {cell.success_stderr or 0:.3f}"
        lines.append(
            (cell.run, cell.version, mean, distance, str(cell.num_modes), f"{cell.num_effective:.2f}", *shares)
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="EVALUATION", help="folder of `tba evaluate`")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the numbers as JSON lines")
    args = parser.parse_args()
    try:
        cells = [read_cell(folder) for folder in args.folders]
    except (ConfigError, OSError) as error:
        parser.exit(1, f"{error}\n")
    print(table(cells))
    for cell in cells:
        if cell.num_unknown:
            print(f"{cell.run} {cell.version}: {cell.num_unknown} attacks have no score and are left out")
    if args.out is not None:
        with args.out.open("a") as file:
            file.writelines(json.dumps(asdict(cell)) + "\n" for cell in cells)


if __name__ == "__main__":
    main()

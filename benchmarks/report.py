"""What all benchmarks share: a number with its bound, the table of these, and the JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """A number of a table, and the bound that it is held to."""

    title: str
    name: str
    """Of the number."""
    bound: float
    """0: none."""
    at_least: bool = True
    unit: str = ""

    def met(self, value: float) -> bool:
        """Return whether a value keeps the bound."""
        return not self.bound or (value >= self.bound if self.at_least else value <= self.bound)


def judged(numbers: Mapping[str, float], targets: Iterable[Target]) -> tuple[list[str], int]:
    """Return the lines of a table of the targets whose number is there, and how many of these are missed."""
    lines, num_missed = ["| figure | measured | target | met |", "|---|---|---|---|"], 0
    for target in targets:
        if (value := numbers.get(target.name)) is None:
            continue
        bound = f"{'at least' if target.at_least else 'at most'} {target.bound:,g}" if target.bound else "-"
        met = "-" if not target.bound else "yes" if target.met(value) else "NO"
        num_missed += not target.met(value)
        shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
        lines.append(f"| {target.title} | {f'{shown} {target.unit}'.strip()} | {bound} | {met} |")
    return lines, num_missed


def write_document(args: argparse.Namespace, document: Mapping[str, Any]) -> None:
    """Write what was measured to `--json`, with machine and settings; without the flag do nothing."""
    if args.json is None:
        return
    about = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()},
        "settings": {name: str(value) for name, value in vars(args).items() if name != "json"},
    }
    args.json.write_text(json.dumps({**about, **document}, indent=1) + "\n")

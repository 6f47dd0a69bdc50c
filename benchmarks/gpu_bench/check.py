"""What a check is: a function that notes numbers, and compares some of them with a limit."""

from __future__ import annotations

import importlib
import json
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

Kind = Literal["smoke", "bench"]
"""smoke: is it right? bench: how fast, how large?"""
Part = Literal["machine", "trainer", "searcher", "weights", "run"]
Value = float | int | str


class Skipped(Exception):
    """A part that the check needs is missing; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a check is run with."""

    device: Literal["cuda", "cpu"]
    kind: Kind
    folder: Path
    """Empty, for the check's own files."""

    @property
    def quick(self) -> bool:
        """Whether sizes are tiny: on the CPU the checks prove that they run, no more."""
        return self.device == "cpu"

    @property
    def measures(self) -> bool:
        """Whether speed is measured, and not only what is right."""
        return self.kind == "bench"


@dataclass(slots=True)
class Findings:
    """What a check has found so far. Every note goes to the file at once: a deadline or a crash loses nothing."""

    path: Path | None = None
    values: dict[str, Value] = field(default_factory=dict)
    """In order; units are in the names."""
    failures: list[str] = field(default_factory=list)
    """Expectations that did not hold, with number and limit."""

    def note(self, name: str, value: Value) -> None:
        """Keep a number or a word."""
        # four digits are what a report needs; JSON has no NaN
        if isinstance(value, float):
            value = float(f"{value:.4g}") if math.isfinite(value) else str(value)
        self.values[name] = value
        self._write()

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Keep a number that must not be above its limit (nor NaN)."""
        self.note(name, float(value))
        if not value <= limit:
            self.fail(f"{name} is {value:.4g}, above {limit:.4g}")

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Keep a number that must not be below its limit (nor NaN)."""
        self.note(name, float(value))
        if not value >= limit:
            self.fail(f"{name} is {value:.4g}, below {limit:.4g}")

    def fail(self, sentence: str) -> None:
        """Keep an expectation that did not hold."""
        self.failures.append(sentence)
        self._write()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Let a part of the check fail without the others: its error becomes a failure, with a traceback on stderr."""
        try:
            yield
        except Skipped as reason:
            self.note(f"{name}_skipped", str(reason))
        except Exception as error:
            traceback.print_exc()
            self.fail(f"{name}: {type(error).__name__}: {str(error).strip()[:400]}")

    def _write(self) -> None:
        if self.path is not None:
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps({"values": self.values, "failures": self.failures}))
            part.replace(self.path)  # a kill leaves the file before


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question about the product on this device."""

    name: str
    part: Part
    about: str
    """For `--help` and the report."""
    function: str
    """`module.function` in this package, imported in the check's own process; it is called with Bench and Findings."""
    kinds: tuple[Kind, ...] = ("smoke", "bench")
    deadline_s: float = 60.0

    def run(self, bench: Bench, found: Findings) -> None:
        """Run it in this process.

        Raises:
            Skipped: a part that it needs is missing.
        """
        module, _, name = self.function.partition(".")
        getattr(importlib.import_module(f"benchmarks.gpu_bench.{module}"), name)(bench, found)


def synchronize(device: str) -> None:
    """Wait for the kernels that were started."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def seconds_of(call: Callable[[], Any], device: str, *, rounds: int = 5, warm_ups: int = 2) -> float:
    """Return the least seconds of a call: what disturbs it only makes it slower."""
    for _ in range(warm_ups):
        call()
    times = []
    for _ in range(rounds):
        synchronize(device)
        start = perf_counter()
        call()
        synchronize(device)
        times.append(perf_counter() - start)
    return min(times)

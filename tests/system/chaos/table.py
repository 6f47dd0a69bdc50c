"""The survival table: the faults of each place, the runs that survived them, and how long training stood still."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tests.system.chaos.faults import Card


@dataclass(frozen=True)
class Trial:
    """One card that was dealt. Two trials that were dealt together share what was measured.

    `held_s`: from the beginning of the fault until its cause was gone. `pause_s`: the longest time between two
    acknowledged optimizer steps from then until the run had recovered. `next_step_s`: from the end of the fault to the
    next acknowledged step. `recovered_s`: from the end of the fault until steps, heartbeats and pushes of all were
    there again; None: not within the deadline.
    """

    card: Card
    hit: str
    together: bool
    held_s: float
    pause_s: float
    next_step_s: float | None
    recovered_s: float | None


def survival_table(trials: Sequence[Trial]) -> str:
    by_card: dict[Card, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_card[trial.card].append(trial)
    lines = [
        "| fault | where | injected (with another) | recovered | held, s | training paused, s | next step after, s "
        "| all well after, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for card, group in sorted(by_card.items(), key=lambda item: (_order(item[0]), item[0].place, item[0].fault)):
        lines.append(_line(card.fault, card.place, group))
    lines.append(_line("all", "", list(trials)))
    return "\n".join(lines)


def _line(fault: str, place: str, group: Sequence[Trial]) -> str:
    recovered = [trial for trial in group if trial.recovered_s is not None]
    numbers = [
        _pair([trial.held_s for trial in group]),
        _pair([trial.pause_s for trial in group]),
        _pair([trial.next_step_s for trial in group if trial.next_step_s is not None]),
        _pair([trial.recovered_s for trial in recovered if trial.recovered_s is not None]),
    ]
    injected = f"{len(group)} ({sum(trial.together for trial in group)})"
    return f"| {fault} | {place} | {injected} | {len(recovered)} | {' | '.join(numbers)} |"


def _pair(values: Sequence[float]) -> str:
    return f"{median(values):.1f} / {max(values):.1f}" if values else "-"


def _order(card: Card) -> int:
    kinds = ("kill", "SIG", "link", "store")
    return next((at for at, kind in enumerate(kinds) if card.fault.startswith(kind)), len(kinds))

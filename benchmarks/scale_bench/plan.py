"""Who joins, leaves and vanishes when: a timetable from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

What = Literal["join", "leave", "vanish"]
START_SHARE = 0.75
"""Of the searchers that join at the beginning; the others join later."""
FIRST_SHARE = 0.08
"""Of the run, in which those at the beginning join, one after the other: they share a few processes."""


@dataclass(frozen=True)
class Event:
    """At `at_s`, a searcher joins, is told to leave (SIGTERM: drains), or vanishes without a word (SIGKILL)."""

    at_s: float
    what: What
    searcher_id: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of a fleet."""

    num_searchers: int
    """That are there when all have joined; who leaves or vanishes is replaced."""
    duration_s: float
    leave_share: float = 0.1
    vanish_share: float = 0.1
    replace_after_s: float = 2.0
    seed: int = 0

    def events(self) -> list[Event]:
        """In order of time. Leaving and vanishing happen in the middle of the run, each to a searcher of its own."""
        rng, num = random.Random(self.seed), self.num_searchers
        names = [f"searcher-{number:03d}" for number in range(num)]
        num_at_start = max(1, round(START_SHARE * num))
        first_s = FIRST_SHARE * self.duration_s / num_at_start
        events = [Event(first_s * number, "join", name) for number, name in enumerate(names[:num_at_start])]
        events += [Event(rng.uniform(0.1, 0.3) * self.duration_s, "join", name) for name in names[num_at_start:]]
        num_leave, num_vanish = self._num_of(self.leave_share), self._num_of(self.vanish_share)
        for number, name in enumerate(rng.sample(names, num_leave + num_vanish)):
            what: What = "leave" if number < num_leave else "vanish"
            at_s = rng.uniform(0.35, 0.65) * self.duration_s
            events += [Event(at_s, what, name), Event(at_s + self.replace_after_s, "join", f"{name}-again")]
        return sorted(events, key=lambda event: event.at_s)

    def _num_of(self, share: float) -> int:
        """How many searchers a share is: at least one, unless it is 0, and at most half."""
        return min(self.num_searchers // 2, max(1 if share else 0, round(share * self.num_searchers)))

"""A timetable from a seed: it says when each searcher joins, leaves or vanishes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

What = Literal["join", "leave", "vanish"]
START_SHARE = 0.75
"""Share of the searchers that join at the beginning; the others join later."""
FIRST_SHARE = 0.08
"""Share of the run in which the first searchers join, one after the other: they share a few processes."""


@dataclass(frozen=True)
class Event:
    """At `at_s`, a searcher joins, leaves after SIGTERM (it drains), or vanishes after SIGKILL."""

    at_s: float
    what: What
    searcher_id: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of simulated searchers."""

    num_searchers: int
    """Number of searchers once all have joined; a searcher that leaves or vanishes is replaced."""
    duration_s: float
    leave_share: float = 0.1
    vanish_share: float = 0.1
    replace_after_s: float = 2.0
    seed: int = 0

    def events(self) -> list[Event]:
        """Return the events by time. In the middle of the run, each searcher leaves or vanishes at most once."""
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
        """Return the number of searchers in a share: at least one, unless the share is 0, and at most half."""
        return min(self.num_searchers // 2, max(1 if share else 0, round(share * self.num_searchers)))

"""Watch a run: check that every searcher that stands still names its wait."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from tba.api import ComponentInfo, RunInfo
from tba.clients import BufferClient
from tba.errors import ServiceError

LATE_S = 5.0
"""A wait may be this far beyond its deadline when it is looked at: heartbeats come once a second."""
FRESH_S = 3.0
"""A searcher whose last heartbeat is older is not counted as being there."""
GONE = ("ended", "failed")
MAX_STILL = 6
"""So many looks in a row without progress, work or a named wait are one searcher that stands still."""


@dataclass
class Seen:
    """The observations of the searchers."""

    num_looks: int = 0
    num_failed_looks: int = 0
    most_alive: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    """Name -> looks that found a searcher waiting so."""
    overdue: list[str] = field(default_factory=list)
    standing_still: list[str] = field(default_factory=list)
    """Searchers that did nothing and named no wait."""


class Watch(threading.Thread):
    """Looks every `every_s` seconds until `over` is set."""

    def __init__(self, client: BufferClient, *, every_s: float = 1.0) -> None:
        super().__init__(daemon=True, name="watch")
        self._client, self._every_s = client, every_s
        self._still: Counter[str] = Counter()
        self._progress: dict[str, float] = {}
        self.over = threading.Event()
        self.seen = Seen()

    def run(self) -> None:
        """Look, again and again."""
        while not self.over.wait(self._every_s):
            try:
                self.look(self._client.run())
            except ServiceError:
                self.seen.num_failed_looks += 1

    def look(self, info: RunInfo) -> None:
        """One look at all searchers."""
        searchers = [item for item in info.components if item.kind == "searcher" and item.alive]
        waits = {wait.owner: wait for wait in info.waits}
        self.seen.num_looks += 1
        num_here = sum(item.state not in GONE and item.heartbeat_age_s < FRESH_S for item in searchers)
        self.seen.most_alive = max(self.seen.most_alive, num_here)
        for searcher in searchers:
            wait = waits.get(searcher.component_id)
            if wait is not None:
                self.seen.waits[wait.name] += 1
                if wait.deadline_in_s < -LATE_S:
                    self.seen.overdue.append(f"{searcher.component_id}: {wait.name} {-wait.deadline_in_s:.0f} s late")
            self._look_at(searcher, is_waiting=wait is not None)

    def _look_at(self, searcher: ComponentInfo, *, is_waiting: bool) -> None:
        gauges, name = searcher.gauges, searcher.component_id
        made = gauges.get("rollouts_generated", 0.0)
        busy = gauges.get("active_slots", 0.0) + gauges.get("waiting_requests", 0.0) + gauges.get("unpushed", 0.0)
        moved, self._progress[name] = made != self._progress.get(name), made
        if searcher.heartbeat_age_s > FRESH_S:
            return  # its present state is unknown
        if searcher.state not in ("running", "evaluating") or is_waiting or busy or moved:
            self._still[name] = 0
            return
        self._still[name] += 1
        if self._still[name] == MAX_STILL:
            what = {gauge: value for gauge, value in sorted(gauges.items()) if value}
            self.seen.standing_still.append(f"{name} ({searcher.state}, version {searcher.version}, {what})")

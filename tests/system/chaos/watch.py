"""Looks at `GET /v1/run` once a second: no wait may outlive its own deadline, no live component may fall silent."""

from __future__ import annotations

import threading
import time
from collections import Counter

from tba.api import RunInfo
from tba.errors import ServiceError
from tests.system.chaos.deployment import Deployment

POLL_S = 1.0
MARGIN_S = 20.0
"""Time beyond a wait's deadline, before it counts as hung: a waiting process may have been frozen meanwhile."""


class Watch:
    def __init__(self, world: Deployment) -> None:
        self.info: RunInfo | None = None
        """The newest answer."""
        self.info_at_s = 0.0
        self.overdue: dict[str, str] = {}
        """Owner and name of a wait -> how far it was beyond its deadline."""
        self.waits: Counter[str] = Counter()
        """Name -> seconds, roughly, in which a component waited for it."""
        self.num_answers = self.num_silences = 0
        self._world = world
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)

    def alive(self, since_s: float) -> set[str]:
        """Components with a recent heartbeat in an answer from after `since_s`; every trainer is `trainer`."""
        if self.info is None or self.info_at_s < since_s:
            return set()
        alive = [item for item in self.info.components if item.alive]
        return {"trainer" if item.kind == "trainer" else item.component_id for item in alive}

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            asked_s = time.monotonic()
            try:
                self.info = self._world.client.run()
            except ServiceError:  # it is being struck
                self.num_silences += 1
                continue
            self.num_answers += 1
            self.info_at_s = asked_s
            for wait in self.info.waits:
                self.waits[wait.name] += 1
                if wait.deadline_in_s < -MARGIN_S:
                    late = f"{-wait.deadline_in_s:.0f} s late after {wait.for_s:.0f} s"
                    self.overdue[f"{wait.owner} waits for {wait.name}"] = late

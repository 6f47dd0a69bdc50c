"""Where this start of the trainer stands: its step, its clock, its counts. Checkpoints and heartbeats read it."""

from __future__ import annotations

import time

from tba.versions import PolicyVersion
from tba_trainer.guards import GuardState
from tba_trainer.startup import Session


class Progress:
    """Of one lineage, from its parent on.

    Args:
        session: what the lineage started from.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.step = session.parent.step
        """The last step: its batch is acked, and applied or skipped."""
        self.submitted = session.first
        """The version that was handed to the publisher last: the parent of the next one."""
        self.num_rollouts_trained = session.num_rollouts_trained
        self.guards: GuardState = session.guards
        self.settings_revision = 0
        """Of the live settings that the last step was made with."""
        self._started = time.monotonic()
        self._train_s: float | None = None

    @property
    def lineage(self) -> int:
        """This lineage."""
        return self._session.lineage

    @property
    def version(self) -> PolicyVersion:
        """The weights as they are now, under the name that they were or will be announced by."""
        return self._session.first if self.step == self._session.parent.step else self.newest

    @property
    def newest(self) -> PolicyVersion:
        """(lineage, step): what policy ages are measured from."""
        return PolicyVersion(self._session.lineage, self.step)

    @property
    def last_good_step(self) -> int:
        """The last step in which the batch was applied and no condition held that rolls back or fails."""
        return self.step - self.guards.num_since_good

    @property
    def train_s(self) -> float:
        """Seconds of training along the living lineage, waits included, the end (evaluation, export) not."""
        if self._train_s is not None:
            return self._train_s
        return self._session.train_s + time.monotonic() - self._started

    def start_clock(self) -> None:
        """Training begins now."""
        self._started = time.monotonic()

    def stop_clock(self) -> None:
        """Training is over."""
        self._train_s = self.train_s

"""The state of a trainer: its lineage, its progress, and its named waits, which heartbeats report every second.

Session     what a start of the trainer begins with; constant
Progress    step, clock and counts of the lineage; the loop writes it, checkpoints read it
Status      activity, version, named wait and gauges; the loop writes it, the heartbeat thread reads it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tba.clients import BufferClient
from tba.errors import TbaError
from tba.logs import get_logger
from tba.versions import LineageTree, PolicyVersion
from tba.wire import STARTED_AT_S, WAITED_S, Heartbeat, Wait
from tba_trainer.learner.guards import GuardState

HEARTBEAT_INTERVAL_S = 1.0
HUNG_AFTER_S = 3600.0
"""Seconds after which a loop counts as hung: since the deadline of its wait, or its last step, wait or activity."""
ALIVE_FILE_VARIABLE = "TRAINER_ALIVE_FILE"
"""Environment variable with the file that a liveness probe checks. Names with the prefix TBA_ would be recipe keys."""
log = get_logger("heartbeat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One start of the trainer: its lineage, and the state that the lineage begins with."""

    trainer_id: str
    lineage: int
    token: str
    """Fencing token of the lineage."""
    parent: PolicyVersion
    """Version that this lineage started from."""
    first: PolicyVersion
    """First version that this lineage announces: the starting model, or the parent's weights."""
    start: PolicyVersion
    """The run's first weights under their announced name: the starting model, or the fork's version."""
    lineages: LineageTree
    previous: PolicyVersion | None
    """The checkpoint before the parent's; None: there is none."""
    train_s: float
    """Seconds trained before this start, along the active lineage."""
    num_rollouts_trained: int
    guards: GuardState
    """State of the guards at the parent, with the rollbacks of the whole run."""
    announces_start: bool
    """True when the starting model is still to be announced."""
    has_no_checkpoint: bool
    """True when only another run's folders hold this state (a fork): it is checkpointed after the first step."""


class Progress:
    """Step, clock and counts of one lineage. Checkpoints and heartbeats read it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.step = session.parent.step
        """The last step: its batch is acked, and applied or skipped."""
        self.num_rollouts_trained = session.num_rollouts_trained
        self.guards: GuardState = session.guards
        self.settings_revision = 0
        """Revision of the live settings that the last step used."""
        self._started = time.monotonic()
        self._train_s: float | None = None

    @property
    def version(self) -> PolicyVersion:
        """Version under which the current weights were or will be announced."""
        # until the first step these are the parent's weights, which a resume announces under its own name
        return self._session.first if self.step == self._session.parent.step else self.newest

    @property
    def newest(self) -> PolicyVersion:
        """(lineage, step): the version that policy ages are measured from."""
        return PolicyVersion(self._session.lineage, self.step)

    @property
    def last_good_step(self) -> int:
        """The last step whose batch was applied while no condition held that rolls back or fails."""
        return self.step - self.guards.num_since_good

    @property
    def train_s(self) -> float:
        """Seconds of training along the active lineage: with waits, without the final evaluation and export."""
        if self._train_s is not None:
            return self._train_s
        return self._session.train_s + time.monotonic() - self._started

    def start_clock(self) -> None:
        """Begin to count training time."""
        # again, when the loop begins: loading the model and publishing the first version are no training time
        self._started = time.monotonic()

    def stop_clock(self) -> None:
        """Freeze the training time."""
        self._train_s = self.train_s


class Status:
    """The trainer's state as heartbeats report it. The loop writes it, the heartbeat thread reads it."""

    def __init__(self, *, trainer_id: str, run: str, now: Callable[[], float] = time.monotonic) -> None:
        self.trainer_id = trainer_id
        self._run, self._now = run, now
        self._lock = threading.Lock()
        self._state = "starting"
        self._version: PolicyVersion | None = None
        self._gauges: dict[str, float] = {}
        self._wait: tuple[str, float, float] | None = None  # name, since, deadline
        self._waited_s: dict[str, float] = {}
        self._started_at_s = time.time()
        self._moved_s = now()
        """When the loop last reported a step, a wait or an activity."""

    @property
    def is_hung(self) -> bool:
        """True when `HUNG_AFTER_S` has passed since the deadline of the current wait, or else since the last report."""
        with self._lock:
            expected_s = self._moved_s if self._wait is None else self._wait[2]
        return self._now() > expected_s + HUNG_AFTER_S

    def set_state(self, state: str, version: PolicyVersion | None = None) -> None:
        """Set the name of the current activity, for people, and the version that is trained (None: unchanged)."""
        with self._lock:
            self._state, self._moved_s = state, self._now()
            self._version = version or self._version

    def set_step(self, version: PolicyVersion, metrics: Mapping[str, float | None]) -> None:
        """Record a finished step and its metrics."""
        with self._lock:
            self._version, self._moved_s = version, self._now()
            # replaced, not updated: a metric that this step does not have must not show its value of an older step
            self._gauges = {name: value for name, value in metrics.items() if value is not None}
            self._gauges["step"] = float(version.step)

    @contextmanager
    def named_wait(self, name: str, deadline_s: float) -> Iterator[None]:
        """Report a wait with this name and deadline in heartbeats while the context is open."""
        self.begin_wait(name, deadline_s)
        try:  # a wait that ends in an error has been waited all the same
            yield
        finally:
            with self._lock:
                self._end_wait()

    def begin_wait(self, name: str, deadline_s: float) -> None:
        """Begin a wait; a wait in progress ends, and its time counts under its own name."""
        with self._lock:
            self._end_wait()  # each name has its own account: the metric says what the trainer waited for
            self._wait = (name, self._now(), self._now() + deadline_s)

    @property
    def waited_s(self) -> float:
        """Seconds spent in named waits since the start."""
        with self._lock:
            # with the wait in progress: a difference of two readings is then exact, whenever they are taken
            return sum(self._waited_by_name(self._now()).values())

    def beat(self, extra_gauges: Mapping[str, float]) -> Heartbeat:
        """Return the heartbeat as of now."""
        now = self._now()
        with self._lock:
            wait = None
            if self._wait is not None:
                name, since, deadline = self._wait
                wait = Wait(name=name, for_s=now - since, deadline_in_s=max(0.0, deadline - now))
            return Heartbeat(
                component_id=self.trainer_id,
                kind="trainer",
                run=self._run,
                state=self._state,
                version=self._version,
                wait=wait,
                gauges={
                    **self._gauges,
                    **extra_gauges,
                    STARTED_AT_S: self._started_at_s,
                    **{f"{WAITED_S}{name}": waited_s for name, waited_s in self._waited_by_name(now).items()},
                },
            )

    def _waited_by_name(self, now: float) -> dict[str, float]:
        """Return the seconds waited since the start by name, with the wait in progress. The caller holds the lock."""
        if self._wait is None:
            return self._waited_s.copy()
        name, since, _ = self._wait
        return {**self._waited_s, name: self._waited_s.get(name, 0.0) + now - since}

    def _end_wait(self) -> None:
        self._moved_s = self._now()
        self._waited_s = self._waited_by_name(self._moved_s)
        self._wait = None


class Heartbeats:
    """A thread that sends `status.beat()` about every second.

    Args:
        gauges: more gauges, read at every beat.
        alive_file: file that exists from the first beat until `close`, and is touched before every beat unless the loop
            is hung: a liveness probe checks its age.
    """

    def __init__(
        self,
        buffer: BufferClient,
        status: Status,
        gauges: Callable[[], Mapping[str, float]],
        alive_file: Path | None = None,
    ) -> None:
        self._buffer, self._status, self._gauges, self._alive_file = buffer, status, gauges, alive_file
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Send one last beat, end the thread, and delete `alive_file`."""
        self._closed.set()
        self._thread.join(timeout=2 * HEARTBEAT_INTERVAL_S)
        if self._alive_file is not None:
            self._alive_file.unlink(missing_ok=True)

    def _run(self) -> None:
        failing = False
        while True:
            # read before the beat: the last beat, after `close`, tells the final state
            last = self._closed.wait(HEARTBEAT_INTERVAL_S)
            if self._alive_file is not None and not self._status.is_hung:
                try:
                    self._alive_file.touch()
                except OSError as error:  # for the loop to report; the probe then restarts what cannot write
                    log.warning("alive_file_failed", file=str(self._alive_file), error=str(error))
            try:
                self._buffer.heartbeat(self._status.beat(self._gauges()))
                failing = False
            except TbaError as error:  # a missed beat is no reason to stop: the next one says the same
                if not failing:  # one line per outage, not one per second
                    log.warning("heartbeat_failed", error=str(error))
                failing = True
            if last:
                return

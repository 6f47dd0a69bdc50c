"""The trainer's state, version, named wait and gauges, and the thread that reports them to the buffer every second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tba.clients import BufferClient
from tba.errors import TbaError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire import STARTED_AT_S, WAITED_S, Heartbeat, Wait

HEARTBEAT_INTERVAL_S = 1.0
log = get_logger("heartbeat")


class Status:
    """The trainer's state as heartbeats report it. The loop writes it, the heartbeat thread reads it.

    Args:
        trainer_id: the component id of heartbeats.
        now: a monotonic clock in seconds.
    """

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

    def set_state(self, state: str) -> None:
        """Name the current activity, for people."""
        with self._lock:
            self._state = state

    def set_step(self, version: PolicyVersion, metrics: Mapping[str, float | None]) -> None:
        """Record a finished step and its metrics."""
        with self._lock:
            self._version = version
            self._gauges = {name: value for name, value in metrics.items() if value is not None}
            self._gauges["step"] = float(version.step)

    def set_version(self, version: PolicyVersion) -> None:
        """Record the weights that the trainer holds."""
        with self._lock:
            self._version = version

    @contextmanager
    def named_wait(self, name: str, deadline_s: float) -> Iterator[None]:
        """Report the block as a wait with this name, at most `deadline_s` long."""
        self.begin_wait(name, deadline_s)
        try:
            yield
        finally:
            with self._lock:
                self._end_wait()

    def begin_wait(self, name: str, deadline_s: float) -> None:
        """Begin a wait, or continue to wait under another name."""
        with self._lock:
            self._end_wait()
            self._wait = (name, self._now(), self._now() + deadline_s)

    @property
    def waited_s(self) -> float:
        """Seconds spent in named waits since the start."""
        with self._lock:
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
        """Return the seconds waited since the start by name, with the wait in progress. Needs the lock."""
        if self._wait is None:
            return self._waited_s.copy()
        name, since, _ = self._wait
        return {**self._waited_s, name: self._waited_s.get(name, 0.0) + now - since}

    def _end_wait(self) -> None:
        self._waited_s = self._waited_by_name(self._now())
        self._wait = None


class Heartbeats:
    """A thread that sends `status.beat()` about every second.

    Args:
        gauges: more gauges, read at every beat.
    """

    def __init__(self, buffer: BufferClient, status: Status, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._buffer, self._status, self._gauges = buffer, status, gauges
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Send one last beat and end."""
        self._closed.set()
        self._thread.join(timeout=2 * HEARTBEAT_INTERVAL_S)

    def _run(self) -> None:
        failing = False
        while True:
            last = self._closed.wait(HEARTBEAT_INTERVAL_S)
            try:
                self._buffer.heartbeat(self._status.beat(self._gauges()))
                failing = False
            except TbaError as error:
                if not failing:  # one line per outage, not one per second
                    log.warning("heartbeat_failed", error=str(error))
                failing = True
            if last:
                return

"""The connections of a server: how many there may be, and which of them wait without a request under way."""

from __future__ import annotations

import math
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tba.logs import get_logger

MAX_CONNECTIONS = 4096
"""Of one server. A searcher has about four, the trainer two, `tba run` two."""
SPARE_FILES = 256
"""Open files that are left for Redis, the object store, workers and the log."""
C = TypeVar("C", bound=Hashable)
LOG_EVERY_S = 10.0
_closed: Counter[str] = Counter()
_logged: dict[str, tuple[float, int]] = {}
"""Reason -> when it was logged, and how many had been closed for it then."""
log = get_logger("http")


def max_connections() -> int:
    """How many connections a server of this process may hold, once the limit on open files has been raised as far as
    that takes and the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(16, soft - SPARE_FILES))


def count_closed(reason: str, client: object) -> None:
    """One more connection was closed by this process for this reason; a log line per reason every LOG_EVERY_S at most,
    so that a flood of clients is no flood of lines."""
    _closed[reason] += 1
    now_s = time.monotonic()
    last_s, num_then = _logged.get(reason, (-math.inf, 0))
    if now_s - last_s >= LOG_EVERY_S:
        _logged[reason] = (now_s, _closed[reason])
        log.warning("connections_closed", reason=reason, connections=_closed[reason] - num_then, newest_client=client)


class ClosedConnections(Collector):
    """Shows what `count_closed` counted, of all servers of the process."""

    def collect(self) -> Iterator[Metric]:
        """For GET /metrics."""
        family = CounterMetricFamily(
            "tba_connections_closed", "Connections that the service closed on a client", labels=["reason"]
        )
        for reason, num in sorted(_closed.items()):
            family.add_metric([reason], num)
        yield family


class WaitingRoom(Generic[C]):
    """Who is connected to one server. When it is full, the connection that has been without a request for longest makes
    room for a new one: so those who connect and send nothing displace each other, and nobody who works.

    Args:
        max_connections: how many there may be.
    """

    def __init__(self, max_connections: int) -> None:
        self._max = max_connections
        self._all: set[C] = set()
        self._idle: OrderedDict[C, None] = OrderedDict()

    def enter(self, connection: C) -> tuple[bool, C | None]:
        """A new connection, without a request.

        Returns:
            Whether it may stay, and which other one must be closed for it.
        """
        displaced = None
        if len(self._all) >= self._max:
            if not self._idle:
                return False, None
            displaced = next(iter(self._idle))
            self.leave(displaced)
        self._all.add(connection)
        self._idle[connection] = None
        return True, displaced

    def work(self, connection: C) -> None:
        """A request of it is under way."""
        self._idle.pop(connection, None)

    def rest(self, connection: C) -> None:
        """It has no request under way any more."""
        if connection in self._all:
            self._idle[connection] = None

    def leave(self, connection: C) -> None:
        """It is closed."""
        self._all.discard(connection)
        self._idle.pop(connection, None)


_rooms: WeakKeyDictionary[object, WaitingRoom] = WeakKeyDictionary()


def room_of(server: object) -> WaitingRoom:
    """The room of one server, whose connections share it.

    Args:
        server: what is one per server and lives as long.
    """
    if server not in _rooms:
        _rooms[server] = WaitingRoom(max_connections())
    return _rooms[server]

"""Count the seconds that components of the run were alive, by kind.

Every heartbeat adds the time since the one before it, at most HEARTBEAT_TIMEOUT_S. The buffer that owns the
run holds the totals and writes them with each heartbeat, so a repeated or lost write does no harm.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping

from tba.fields import bounded
from tba.wire import Heartbeat
from tba_buffer.storage.context import Context, needed
from tba_buffer.storage.redis_client import redis_errors

HEARTBEAT_TIMEOUT_S = 15.0
"""A component that is silent for longer counts as gone. Searchers and trainers send a heartbeat every second."""


def read_times(context: Context, raw: Mapping[bytes, bytes]) -> dict[str, float]:
    """Parse the hash `component_times`. Return the seconds alive by kind of component."""

    def parse() -> dict[str, float]:
        return {name.decode(): bounded(float(raw[name])) for name in sorted(raw)}

    return needed(context.keys.component_times, "component times", parse)


class ComponentTimes:
    """Counts the seconds that components were alive, per kind.

    Args:
        context: Redis and settings.
        ended: states of a component that has ended; its time stops there.
    """

    def __init__(self, context: Context, ended: Collection[str]) -> None:
        self._context, self._ended = context, ended
        self._heard_at_s: dict[tuple[str, str], float] = {}
        """Unix seconds of the last heartbeat by (kind, id) of the component, without components that have ended."""
        self._seconds: dict[str, float] = {}
        self._has_begun = False
        self._beginning = asyncio.Lock()

    async def begin(self) -> None:
        """Read the totals and the last heartbeats from Redis, at the first call only.

        Raises:
            UnavailableError: Redis did not answer, or its times cannot be read.
        """
        async with self._beginning:
            if self._has_begun:
                return
            context, keys = self._context, self._context.keys
            with redis_errors("read the times of the components"):
                async with context.redis.pipeline(transaction=True) as pipe:
                    pipe.hgetall(keys.component_times)
                    pipe.hgetall(keys.components)
                    raw, components = await pipe.execute()
            self._seconds, self._has_begun = read_times(context, raw), True
            for name, text in components.items():
                self._hear_again(name.decode(errors="replace"), text)

    def _hear_again(self, component_id: str, text: bytes) -> None:
        """Take the time of a component's last heartbeat from its stored JSON; ignore a damaged one."""
        try:
            fields = json.loads(text)
            if fields["state"] not in self._ended:
                self._heard_at_s[fields["kind"], component_id] = float(fields["at_s"])
        except (ValueError, KeyError, TypeError):
            return

    def add(self, beat: Heartbeat) -> dict[bytes, str]:
        """Count a heartbeat. Return the fields of `component_times` to write; {} while this process may not write.

        `begin` must have been called.
        """
        assert self._has_begun
        now_s, key = self._context.clock(), (beat.kind, beat.component_id)
        most_s = HEARTBEAT_TIMEOUT_S
        # the first heartbeat, and the first after an end, begin a time and add none
        passed_s = min(max(0.0, now_s - self._heard_at_s.pop(key, now_s)), most_s)
        if beat.state not in self._ended:
            self._heard_at_s[key] = now_s
        self._seconds[beat.kind] = self._seconds.get(beat.kind, 0.0) + passed_s
        # as with counters: what a restored Redis has is not replaced, nor what the next owner of the run writes
        if self._context.durability.broken is not None or self._context.epoch.refused is not None:
            return {}
        return {beat.kind.encode(): f"{self._seconds[beat.kind]:.3f}"}

    def forget(self, component_ids: Iterable[str]) -> None:
        """Forget components that have been silent for long; what they have added stays."""
        gone = set(component_ids)
        self._heard_at_s = {key: at_s for key, at_s in self._heard_at_s.items() if key[1] not in gone}

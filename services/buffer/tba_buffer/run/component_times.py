"""How long the components of the run have been there, by kind: what it has cost so far is this times the prices.

Every heartbeat adds the time since the one before it, at most `buffer.heartbeat_timeout_s`. The buffer that owns the
run holds the totals and writes them with each heartbeat, so a write that is repeated, or lost, changes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tba.fields import bounded
from tba.wire import Heartbeat
from tba_buffer.storage.context import Context
from tba_buffer.storage.redis_client import redis_errors

SINCE_S, TRAINED_BEFORE = b"since_s", b"trained_before"


@dataclass(frozen=True, slots=True)
class CountedTimes:
    """Seconds by kind of component, since when (Unix seconds), and how many rollouts were trained on before that."""

    seconds: Mapping[str, float]
    since_s: float | None
    trained_before: int


def read_times(context: Context, raw: Mapping[bytes, bytes]) -> CountedTimes | None:
    """Parse the hash of the times; None: nothing is counted, or it is damaged, which is noted."""

    def parse() -> CountedTimes:
        kinds = [name for name in sorted(raw) if name not in (SINCE_S, TRAINED_BEFORE)]
        seconds = {name.decode(): bounded(float(raw[name])) for name in kinds}
        return CountedTimes(seconds, bounded(float(raw[SINCE_S])), int(raw[TRAINED_BEFORE]))

    return context.read_or_note("counter", "component times", parse) if raw else None


class ComponentTimes:
    """Counts how long components have been there.

    Args:
        context: Redis and settings.
        ended: states in which a component ends: it is not there any more afterwards.
    """

    def __init__(self, context: Context, ended: Collection[str]) -> None:
        self._context, self._ended = context, ended
        self._heard_at_s: dict[tuple[str, str], float] = {}
        """Kind and id of a component -> its last heartbeat; without those that have ended."""
        self._seconds: dict[str, float] = {}
        self._began: tuple[float, int] | None = None
        """Since when is counted, and how many rollouts were trained on before; None: not read yet."""
        self._beginning = asyncio.Lock()

    async def begin(self) -> None:
        """Continue from what Redis has, once; where it has nothing, or damaged times, the counting begins now.

        Raises:
            UnavailableError: Redis did not answer.
        """
        async with self._beginning:
            if self._began is not None:
                return
            context, keys = self._context, self._context.keys
            with redis_errors("read the times of the components"):
                async with context.redis.pipeline(transaction=True) as pipe:
                    pipe.hgetall(keys.component_times)
                    pipe.hget(keys.counters, "trained")
                    pipe.hgetall(keys.components)
                    raw, trained, components = await pipe.execute()
            found = read_times(context, raw)
            if found is None or found.since_s is None:
                num_trained = context.parse_counters({b"trained": trained or b"0"}).get("trained", 0)
                self._began = (context.clock(), num_trained)
                return
            self._seconds, self._began = dict(found.seconds), (found.since_s, found.trained_before)
            for name, text in components.items():
                self._hear_again(name.decode(errors="replace"), text)

    def _hear_again(self, component_id: str, text: bytes) -> None:
        """Remember the heartbeat that was stored last. A damaged one is none: reading the components notes it."""
        try:
            fields = json.loads(text)
            if fields["state"] not in self._ended:
                self._heard_at_s[fields["kind"], component_id] = float(fields["at_s"])
        except (ValueError, KeyError, TypeError):
            return

    def add(self, beat: Heartbeat) -> dict[bytes, str]:
        """Count a heartbeat. Return the fields to write with it: none while this process may not write.

        `begin` must have been called.
        """
        assert self._began is not None
        now_s, key = self._context.clock(), (beat.kind, beat.component_id)
        most_s = self._context.recipe.buffer.heartbeat_timeout_s
        # the first heartbeat, and the first after an end, begin a time and add none
        passed_s = min(max(0.0, now_s - self._heard_at_s.pop(key, now_s)), most_s)
        if beat.state not in self._ended:
            self._heard_at_s[key] = now_s
        self._seconds[beat.kind] = self._seconds.get(beat.kind, 0.0) + passed_s
        # as with counters: what a restored Redis has is not replaced, nor what the next owner of the run writes
        if self._context.durability.broken is not None or self._context.epoch.refused is not None:
            return {}
        since_s, trained_before = self._began
        written = {beat.kind.encode(): self._seconds[beat.kind], SINCE_S: since_s}
        return {**{name: f"{value:.3f}" for name, value in written.items()}, TRAINED_BEFORE: str(trained_before)}

    def forget(self, component_ids: Iterable[str]) -> None:
        """Forget components that have been silent for long; what they have added stays."""
        gone = set(component_ids)
        self._heard_at_s = {key: at_s for key, at_s in self._heard_at_s.items() if key[1] not in gone}

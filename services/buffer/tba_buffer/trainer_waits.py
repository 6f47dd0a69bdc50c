"""How long trainers have waited, by the name of the wait: a counter of the run in Redis.

Every heartbeat of a trainer says how long its process has waited so far (gauges `waited_s:<name>`) and when it started
(`started_at_s`). waited.lua counts the differences, so the counter goes on over the death of trainer, buffer and Redis;
only what a killed trainer waited after its last heartbeat is not known.
"""

from __future__ import annotations

from tba.wire import STARTED_AT_S, WAITED_S, Heartbeat
from tba_buffer.context import Context
from tba_buffer.redis_link import redis_errors

MAX_NAMES = 64
MAX_TRAINERS = 64
"""So many are remembered, those that started last: a trainer and its successor overlap, no more."""
OTHER_NAMES = "other"
_TOTAL = b"total:"


class TrainerWaits:
    """Counts and reads.

    Args:
        context: Redis and settings.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    async def count(self, beat: Heartbeat) -> None:
        """Count what a heartbeat says beyond what is counted; the same one again changes nothing.

        Raises:
            UnavailableError: Redis did not answer; the next heartbeat has it all.
        """
        waited = {
            name.removeprefix(WAITED_S): value for name, value in beat.gauges.items() if name.startswith(WAITED_S)
        }
        started_at_s = beat.gauges.get(STARTED_AT_S)
        if started_at_s is None or not waited:
            return
        pairs = (part for name, value in waited.items() for part in (name, f"{max(0.0, value):.6f}"))
        await self._context.scripts.run(
            "waited",
            [self._context.keys.trainer_waits],
            [beat.component_id, f"{started_at_s:.6f}", MAX_NAMES, OTHER_NAMES, MAX_TRAINERS, *pairs],
        )

    async def totals(self) -> dict[str, float]:
        """Name of the wait -> seconds, since the run began.

        Raises:
            UnavailableError: Redis did not answer.
        """
        with redis_errors("read the waits of the trainers"):
            raw = await self._context.redis.hgetall(self._context.keys.trainer_waits)
        found: dict[str, float] = {}
        for field, value in sorted(raw.items()):
            name = field.removeprefix(_TOTAL).decode(errors="replace")
            if field.startswith(_TOTAL):
                waited_s = self._context.read_or_note("counter", f"wait {name}", lambda value=value: float(value))
                found |= {} if waited_s is None else {name: waited_s}
        return found

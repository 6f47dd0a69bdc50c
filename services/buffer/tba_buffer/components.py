"""The components of the run, and who waits for what.

Searchers, trainers and launchers as their last heartbeat in Redis shows them; the services (this one, and the reward
service as a probe finds it) as `services` describes them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tba.api import ComponentInfo, ComponentWait, WaitInfo
from tba.errors import ConflictError
from tba.wire import Heartbeat
from tba_buffer.context import Context
from tba_buffer.redis_link import redis_errors
from tba_buffer.trainer_waits import TrainerWaits

FORGET_AFTER_S = 3600.0


@dataclass(slots=True)
class HeldWait:
    """A long poll that this service holds open; times are those of `time.monotonic`."""

    owner: str
    name: str
    since_s: float
    deadline_s: float
    kind: str = "buffer"
    """Of the owner."""

    def info(self) -> WaitInfo:
        """As GET /v1/run shows it now."""
        now_s = time.monotonic()
        return WaitInfo(
            owner=self.owner,
            name=self.name,
            for_s=now_s - self.since_s,
            deadline_in_s=self.deadline_s - now_s,
            kind=self.kind,
        )


class Components:
    """The components of the run.

    Args:
        context: Redis and settings.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._held: list[HeldWait] = []
        self.trainer_waits = TrainerWaits(context)
        self.services: list[Callable[[], ComponentInfo]] = []
        """Describe the services now."""

    async def beat(self, beat: Heartbeat) -> None:
        """Remember a sign of life.

        Raises:
            ConflictError: it belongs to another run.
            UnavailableError: Redis did not answer.
        """
        if beat.run != self._context.run:
            raise ConflictError(
                f"{beat.component_id} belongs to run {beat.run!r}, this is {self._context.run!r}; "
                "check that its recipe names this run"
            )
        wait = beat.wait
        document = {
            "kind": beat.kind,
            "state": beat.state,
            "version": None if beat.version is None else str(beat.version),
            "wait": None if wait is None else [wait.name, wait.for_s, wait.deadline_in_s],
            "gauges": dict(beat.gauges),
            "at_s": self._context.clock(),
        }
        with redis_errors("store a heartbeat"):
            await self._context.redis.hset(self._context.keys.components, beat.component_id, json.dumps(document))
        if beat.kind == "trainer":
            await self.trainer_waits.count(beat)

    @contextmanager
    def waiting(self, owner: str, name: str, deadline_s: float, *, kind: str = "buffer") -> Iterator[HeldWait]:
        """Show a long poll in GET /v1/run while it is held open, until `deadline_s` (of `time.monotonic`) at most; its
        name may change. `kind`: of the owner."""
        held = HeldWait(owner, name, time.monotonic(), deadline_s, kind)
        self._held.append(held)
        try:
            yield held
        finally:
            self._held.remove(held)

    def held_wait(self) -> ComponentWait | None:
        """The wait of this service itself that began first."""
        own = [held for held in self._held if held.kind == "buffer"]
        if not own:
            return None
        info = min(own, key=lambda held: held.since_s).info()
        return ComponentWait(name=info.name, for_s=info.for_s, deadline_in_s=info.deadline_in_s)

    async def read(self) -> tuple[list[ComponentInfo], list[WaitInfo]]:
        """Components by id, then the services; and the waits of those alive and of this service's long polls. Long
        silent ones go.

        Raises:
            UnavailableError: Redis did not answer.
        """
        key, now = self._context.keys.components, self._context.clock()
        with redis_errors("read the components"):
            raw = await self._context.redis.hgetall(key)
        infos, forgotten = [], []
        waits = [held.info() for held in self._held]
        for component_id, text in sorted(raw.items()):
            fields = json.loads(text)
            age_s = max(0.0, now - fields["at_s"])
            if age_s > FORGET_AFTER_S:
                forgotten.append(component_id)
                continue
            alive = age_s <= self._context.recipe.buffer.heartbeat_timeout_s
            wait = None
            if alive and fields["wait"] is not None:
                name, for_s, left_s = fields["wait"]
                wait = ComponentWait(name=name, for_s=for_s + age_s, deadline_in_s=left_s - age_s)
                waits.append(WaitInfo(owner=component_id.decode(), kind=fields["kind"], **wait.model_dump()))
            infos.append(
                ComponentInfo(
                    component_id=component_id.decode(),
                    kind=fields["kind"],
                    state=fields["state"],
                    version=fields["version"],
                    alive=alive,
                    heartbeat_age_s=age_s,
                    gauges=fields["gauges"],
                    wait=wait,
                )
            )
        if forgotten:
            with redis_errors("forget silent components"):
                await self._context.redis.hdel(key, *forgotten)
        return [*infos, *(describe() for describe in self.services)], waits

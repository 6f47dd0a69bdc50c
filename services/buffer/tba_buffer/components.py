"""The components of the run, and who waits for what.

Searchers, trainers and launchers as their last heartbeat in Redis shows them; the services (this one, and the reward
service as a probe finds it) as `services` describes them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tba.api import ComponentInfo, ComponentWait, WaitInfo
from tba.errors import BusyError, ConflictError, TbaError
from tba.service.auth import ForbiddenError
from tba.wire import Heartbeat
from tba_buffer.component_metrics import ENDED
from tba_buffer.context import Context
from tba_buffer.redis_link import redis_errors
from tba_buffer.trainer_waits import TrainerWaits

FORGET_AFTER_S = 3600.0
MAX_OTHERS = 64
"""Most trainers, and most components of any other kind but searchers, that are remembered."""
REFUSALS = {"busy": "too-many", "conflict": "wrong-run", "forbidden": "wrong-kind"}
"""Slug of the error -> what a refused heartbeat is counted under, where that is another word."""


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


@dataclass(slots=True)
class _Place:
    """One component that is remembered."""

    kind: str
    at_s: float
    has_ended: bool


class Components:
    """The components of the run.

    Args:
        context: Redis and settings.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._held: list[HeldWait] = []
        self._places: dict[str, _Place] | None = None
        """By component id; None: not read yet."""
        self._reading_places = asyncio.Lock()
        self.trainer_waits = TrainerWaits(context)
        self.services: list[Callable[[], ComponentInfo]] = []
        """Describe the services now."""

    async def _check_kind(self, beat: Heartbeat) -> None:
        """An id belongs to the kind that beats with it: a searcher's token must not speak for the trainer."""
        keys, redis, name = self._context.keys, self._context.redis, beat.component_id
        with redis_errors("read a heartbeat"):
            text = await redis.hget(keys.components, name)
            known = text and self._context.read_or_note("component", name, lambda: self._info(name, text))
            if not known or known.kind == beat.kind:
                return
        await self._context.count("foreign:heartbeat")
        raise ForbiddenError(f"{name!r} is a {known.kind}, and not a {beat.kind}; take another id")

    async def beat(self, beat: Heartbeat) -> None:
        """Remember a sign of life.

        Raises:
            ConflictError: it belongs to another run.
            BusyError: as many as are remembered are alive.
            ForbiddenError: the id is that of a component of another kind.
            UnavailableError: Redis did not answer.
        """
        if beat.run != self._context.run:
            raise ConflictError(
                f"{beat.component_id} belongs to run {beat.run!r}, this is {self._context.run!r}; "
                "check that its recipe names this run"
            )
        await self._check_kind(beat)
        wait = beat.wait
        document = {
            "kind": beat.kind,
            "state": beat.state,
            "version": None if beat.version is None else str(beat.version),
            "wait": None if wait is None else [wait.name, wait.for_s, wait.deadline_in_s],
            "gauges": dict(beat.gauges),
            "at_s": self._context.clock(),
        }
        gone = self._take_place(await self._known_places(), beat)
        with redis_errors("store a heartbeat"):
            await self._context.redis.hset(self._context.keys.components, beat.component_id, json.dumps(document))
            if gone is not None:
                await self._context.redis.hdel(self._context.keys.components, gone)
                await self._context.count("components_forgotten:replaced")
        if beat.kind == "trainer":
            await self.trainer_waits.count(beat)

    async def count_refused(self, error: TbaError) -> None:
        """A heartbeat was refused.

        Raises:
            UnavailableError: Redis did not answer.
        """
        await self._context.count(f"heartbeats_refused:{REFUSALS.get(error.slug, error.slug)}")

    async def _known_places(self) -> dict[str, _Place]:
        async with self._reading_places:
            if self._places is None:
                await self.read()
            assert self._places is not None
            return self._places

    def _take_place(self, places: dict[str, _Place], beat: Heartbeat) -> str | None:
        """Remember that a component has a place; answers the id of the one whose place it took, if any."""
        now_s, section = self._context.clock(), self._context.recipe.buffer
        place = _Place(beat.kind, now_s, beat.state in ENDED)
        most = section.max_searchers_shown if beat.kind == "searcher" else MAX_OTHERS
        known, gone = places.get(beat.component_id), None
        if known is None or known.kind != beat.kind:
            rivals = {name: rival for name, rival in places.items() if rival.kind == beat.kind}
            if len(rivals) >= most:
                gone = min(rivals, key=lambda name: (not rivals[name].has_ended, rivals[name].at_s))
                if not rivals[gone].has_ended and now_s - rivals[gone].at_s <= section.heartbeat_timeout_s:
                    raise _no_place(beat.kind, most, section.heartbeat_timeout_s)
                del places[gone]
        places[beat.component_id] = place
        return gone

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
        infos: list[ComponentInfo] = []
        places: dict[str, _Place] = {}
        forgotten: list[bytes] = []
        for component_id, text in sorted(raw.items()):
            name = component_id.decode(errors="replace")
            info = self._context.read_or_note("component", name, lambda name=name, text=text: self._info(name, text))
            if info is None or info.heartbeat_age_s > FORGET_AFTER_S:
                forgotten.append(component_id)
                continue
            places[name] = _Place(info.kind, now - info.heartbeat_age_s, info.state in ENDED)
            infos.append(info)
        self._places = places
        waits = [held.info() for held in self._held]
        waits += [
            WaitInfo(owner=info.component_id, kind=info.kind, **info.wait.model_dump())
            for info in infos
            if info.wait is not None
        ]
        if forgotten:
            with redis_errors("forget silent components"):
                await self._context.redis.hdel(key, *forgotten)
            await self._context.count("components_forgotten:silent", len(forgotten))
        return [*infos, *(describe() for describe in self.services)], waits

    def _info(self, component_id: str, text: bytes) -> ComponentInfo:
        """A component as its last heartbeat showed it."""
        fields: dict[str, Any] = json.loads(text)
        age_s = max(0.0, self._context.clock() - fields["at_s"])
        alive, wait = age_s <= self._context.recipe.buffer.heartbeat_timeout_s, None
        if alive and fields["wait"] is not None:
            name, for_s, left_s = fields["wait"]
            wait = ComponentWait(name=name, for_s=for_s + age_s, deadline_in_s=left_s - age_s)
        return ComponentInfo(
            component_id=component_id,
            kind=fields["kind"],
            state=fields["state"],
            version=fields["version"],
            alive=alive,
            heartbeat_age_s=age_s,
            gauges=fields["gauges"],
            wait=wait,
        )


def _no_place(kind: str, most: int, silent_s: float) -> BusyError:
    remedy = (
        "stop searchers that nobody needs, give those that start again the id they had, or raise "
        "buffer.max_searchers_shown and restart the buffer"
        if kind == "searcher"
        else "stop those that nobody needs"
    )
    return BusyError(
        f"{most} components of kind {kind!r} are alive, which is the most that are remembered; this one may work on, "
        f"but GET /v1/run does not show it: {remedy}",
        retry_after_s=silent_s,
        wait="component-places",
    )

"""The components of the run, and what each of them waits for.

Components      searchers, trainers and launchers from their last heartbeats in Redis; and the services (`services`):
                this one, and the reward service as its probe finds it
TrainerWaits    how long trainers have waited, by the name of the wait: a counter of the run in Redis
absent_trainer  the sentence that people see while no trainer is there
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tba.api import ENDED, ComponentInfo, ComponentWait, RunState, WaitInfo
from tba.errors import BusyError, ConflictError, ForbiddenError
from tba.wire import STARTED_AT_S, WAITED_S, Heartbeat
from tba_buffer.run.component_times import HEARTBEAT_TIMEOUT_S, ComponentTimes
from tba_buffer.storage.context import Context, needed
from tba_buffer.storage.redis_client import redis_errors

MAX_NAMES = 64
MAX_TRAINERS = 64
"""How many of the newest trainers are remembered with their waits; only a trainer and its successor overlap."""
OTHER_NAMES = "other"
_TOTAL = b"total:"
ABSENT_AFTER_S = 60.0
"""After this time without a trainer GET /v1/run says so. A trainer sends heartbeats once it has its model."""
OVER: tuple[RunState, ...] = ("done", "failed")
_LOOK = "look at the trainer's log, on Kubernetes at its Job and pods"
FORGET_AFTER_S = 3600.0
MAX_SEARCHERS_SHOWN = 1024
"""Most searchers that are remembered by their heartbeats. A further one replaces one that has ended or is silent. If
all are alive, its heartbeats are refused (429, wait `component-slots`), and it works without being shown."""
MAX_OTHERS = 64
"""Most components of each other kind that are remembered."""


@dataclass(slots=True)
class HeldWait:
    """A wait of this service, or of a request that it holds open; times are those of `time.monotonic`."""

    owner: str
    name: str
    since_s: float
    deadline_s: float
    kind: str = "buffer"
    """Kind of the owner."""

    def info(self) -> WaitInfo:
        """Return the wait as GET /v1/run shows it now."""
        now_s = time.monotonic()
        return WaitInfo(
            owner=self.owner,
            name=self.name,
            for_s=now_s - self.since_s,
            deadline_in_s=self.deadline_s - now_s,
            kind=self.kind,
        )


@dataclass(slots=True)
class _Known:
    """A component that is remembered."""

    kind: str
    at_s: float
    has_ended: bool


class Components:
    """The components of the run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_view = context.recipe.buffer.read_only is not None
        self._held: list[HeldWait] = []
        self._known: dict[str, _Known] | None = None
        """By component id; None: not read yet."""
        self._reading_known = asyncio.Lock()
        self.trainer_waits = TrainerWaits(context)
        self.times = ComponentTimes(context, ENDED)
        self.services: list[Callable[[], ComponentInfo]] = []
        """Functions that return the current state of one service each."""

    async def beat(self, beat: Heartbeat) -> None:
        """Store a heartbeat, and count the component's time and, of a trainer, its waits.

        Raises:
            ConflictError: the heartbeat names another run.
            BusyError: as many components of this kind as can be remembered are alive.
            ForbiddenError: a component of another kind has the id.
        """
        if beat.run != self._context.run:
            raise ConflictError(
                f"{beat.component_id} belongs to run {beat.run!r}, this is {self._context.run!r}; "
                "check that its recipe names this run"
            )
        key, name, wait = self._context.keys.components, beat.component_id, beat.wait
        with redis_errors("read a heartbeat"):
            text = await self._context.redis.hget(key, name)
        stored = text and needed(key, name, lambda: self._info(name, text))
        # before anything is stored under this id: a searcher's token must not speak for the trainer
        if stored and stored.kind != beat.kind:
            await self._context.count("foreign:heartbeat")
            raise ForbiddenError(f"{name!r} is a {stored.kind}, not a {beat.kind}; use another id")
        document = {
            "kind": beat.kind,
            "state": beat.state,
            "version": None if beat.version is None else str(beat.version),
            "wait": None if wait is None else [wait.name, wait.for_s, wait.deadline_in_s],
            "gauges": dict(beat.gauges),
            "at_s": self._context.clock(),
        }
        await self.times.begin()
        # after a start, many heartbeats come at once: one read serves them all
        async with self._reading_known:
            if self._known is None:
                await self.read()
        assert self._known is not None
        gone = self._remember(self._known, beat)
        times = self.times.add(beat)
        with redis_errors("store a heartbeat"):
            async with self._context.redis.pipeline(transaction=True) as pipe:
                pipe.hset(key, name, json.dumps(document))
                if times:
                    pipe.hset(self._context.keys.component_times, mapping=times)
                await pipe.execute()
            if gone is not None:
                self.times.forget([gone])
                await self._context.redis.hdel(key, gone)
        # of trainers only: an autoscaler reads how long they have waited
        if beat.kind == "trainer":
            await self.trainer_waits.count(beat)

    def _remember(self, known: dict[str, _Known], beat: Heartbeat) -> str | None:
        """Remember the component of a heartbeat. Return the id of the component that it replaces, if any."""
        now_s = self._context.clock()
        most = MAX_SEARCHERS_SHOWN if beat.kind == "searcher" else MAX_OTHERS
        before, gone = known.get(beat.component_id), None
        if before is None or before.kind != beat.kind:
            rivals = {name: rival for name, rival in known.items() if rival.kind == beat.kind}
            # the oldest is forgotten, those that ended first; one that is alive is never forgotten for another
            if len(rivals) >= most:
                gone = min(rivals, key=lambda name: (not rivals[name].has_ended, rivals[name].at_s))
                if not rivals[gone].has_ended and now_s - rivals[gone].at_s <= HEARTBEAT_TIMEOUT_S:
                    remedy = "give restarted searchers their old id" if beat.kind == "searcher" else "stop others"
                    raise BusyError(
                        f"{most} components of kind {beat.kind!r} are alive, which is the limit; this one may "
                        f"continue, but GET /v1/run does not show it: {remedy}",
                        retry_after_s=HEARTBEAT_TIMEOUT_S,
                        wait="component-slots",
                    )
                del known[gone]
        known[beat.component_id] = _Known(beat.kind, now_s, beat.state in ENDED)
        return gone

    @contextmanager
    def waiting(self, owner: str, name: str, deadline_s: float, *, kind: str = "buffer") -> Iterator[HeldWait]:
        """Show a wait in GET /v1/run during the caller's `with` block.

        Args:
            owner: the id of the component that waits.
            name: the name of the wait; the caller may change it in the HeldWait.
            deadline_s: when the wait ends at the latest (`time.monotonic`).
            kind: the kind of the owner.
        """
        held = HeldWait(owner, name, time.monotonic(), deadline_s, kind)
        self._held.append(held)
        try:
            yield held
        finally:
            self._held.remove(held)

    def held_wait(self) -> ComponentWait | None:
        """Return the oldest wait of this service itself, or None."""
        own = [held for held in self._held if held.kind == "buffer"]
        if not own:
            return None
        info = min(own, key=lambda held: held.since_s).info()
        return ComponentWait(name=info.name, for_s=info.for_s, deadline_in_s=info.deadline_in_s)

    async def read(self) -> tuple[list[ComponentInfo], list[WaitInfo]]:
        """Return the components (ordered by id, services last), and the waits of this service and of live components.

        Components that have been silent for FORGET_AFTER_S are deleted from Redis. A read-only buffer deletes none: it
        shows the components that were alive at the end of the run as silent.
        """
        key, now = self._context.keys.components, self._context.clock()
        with redis_errors("read the components"):
            raw = await self._context.redis.hgetall(key)
        infos: list[ComponentInfo] = []
        remembered: dict[str, _Known] = {}
        forgotten: list[bytes] = []
        for component_id, text in sorted(raw.items()):
            name = component_id.decode(errors="replace")
            info = needed(key, name, lambda name=name, text=text: self._info(name, text))
            if info.heartbeat_age_s > FORGET_AFTER_S and not self._is_view:
                forgotten.append(component_id)
                continue
            remembered[name] = _Known(info.kind, now - info.heartbeat_age_s, info.state in ENDED)
            infos.append(info)
        self._known = remembered
        waits = [held.info() for held in self._held]
        waits += [
            WaitInfo(owner=info.component_id, kind=info.kind, **info.wait.model_dump())
            for info in infos
            if info.wait is not None
        ]
        if forgotten:
            self.times.forget(name.decode(errors="replace") for name in forgotten)
            with redis_errors("forget silent components"):
                await self._context.redis.hdel(key, *forgotten)
        return [*infos, *(describe() for describe in self.services)], waits

    def _info(self, component_id: str, text: bytes) -> ComponentInfo:
        """Return a component from the stored JSON of its last heartbeat."""
        fields: dict[str, Any] = json.loads(text)
        age_s = max(0.0, self._context.clock() - fields["at_s"])
        # nothing of a run that is over is alive, also when its files are younger than the timeout
        alive, wait = not self._is_view and age_s <= HEARTBEAT_TIMEOUT_S, None
        # the heartbeat is some time old: the wait has lasted on since
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


class TrainerWaits:
    """Counts how long trainers have waited.

    Every heartbeat of a trainer says how long its process has waited so far (gauges `waited_s:<name>`) and when it
    started (`started_at_s`). count_waits.lua counts the differences, so the counter survives the death of trainer,
    buffer and Redis. Only the waits of a killed trainer after its last heartbeat are unknown.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    async def count(self, beat: Heartbeat) -> None:
        """Add the waits since a trainer's last counted heartbeat to the totals. A repeated heartbeat adds nothing.

        Raises:
            UnavailableError: Redis did not answer; the next heartbeat makes up for it.
        """
        waited = {
            name.removeprefix(WAITED_S): value for name, value in beat.gauges.items() if name.startswith(WAITED_S)
        }
        started_at_s = beat.gauges.get(STARTED_AT_S)
        if started_at_s is None or not waited:
            return
        await self._context.scripts.run(
            "count_waits",
            component_id=beat.component_id,
            started_s=started_at_s,
            waited={name: max(0.0, round(value, 6)) for name, value in waited.items()},
            max_names=MAX_NAMES,
            other=OTHER_NAMES,
            max_trainers=MAX_TRAINERS,
        )

    async def totals(self) -> dict[str, float]:
        """Return the seconds that trainers have waited since the run began, by the name of the wait."""
        with redis_errors("read the waits of the trainers"):
            raw = await self._context.redis.hgetall(self._context.keys.trainer_waits)
        found: dict[str, float] = {}
        for field, value in sorted(raw.items()):
            name = field.removeprefix(_TOTAL).decode(errors="replace")
            if field.startswith(_TOTAL):
                key = self._context.keys.trainer_waits
                found[name] = needed(key, name, lambda value=value: float(value))
        return found


def absent_trainer(
    state: RunState, step: int, components: Sequence[ComponentInfo], *, had_trainer: bool, watched_s: float
) -> str | None:
    """Return a sentence while the run could continue and no trainer has been heard of for ABSENT_AFTER_S; else None.

    When a trainer has failed so often that nobody starts it again (a Job at its backoffLimit), the state of the run
    stays, since the next trainer continues it. Searchers generate until flow control stops them.

    Args:
        step: the last acked step.
        had_trainer: whether the run ever had a trainer.
        watched_s: seconds since this buffer began to receive heartbeats.
    """
    # a trainer that waited for this buffer is heard of in a moment
    if state in OVER or watched_s <= ABSENT_AFTER_S:
        return None
    trainers = [item for item in components if item.kind == "trainer"]
    if trainers:
        last = min(trainers, key=lambda item: item.heartbeat_age_s)
        if last.heartbeat_age_s <= ABSENT_AFTER_S:
            return None
        age_s = last.heartbeat_age_s
        return f"no trainer: {last.component_id} was last heard from {age_s:.0f} s ago, step {step}; {_LOOK}"
    if had_trainer:
        return f"no trainer: none was heard from for {FORGET_AFTER_S / 3600:g} h, step {step}; {_LOOK}"
    return f"no trainer: none has come since the buffer started {watched_s:.0f} s ago; {_LOOK}"

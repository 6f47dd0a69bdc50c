"""The number of searchers: requests to change it, and the task that sees to it every `scaling.reconcile_s`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from tba.api import ComponentInfo, RunState, ScaleRequest, ScalingInfo, SearchersInfo
from tba.api.scaling import SearcherSource
from tba.errors import ConfigError, ConflictError, UnavailableError
from tba.logs import get_logger
from tba_buffer.components import Components
from tba_buffer.context import Context
from tba_buffer.run_state import RunControl, RunFields
from tba_buffer.scaling.deployment import Deployment, ScalingFailure
from tba_buffer.scaling.keeper import Keeper
from tba_buffer.scaling.wishes import Wish, Wishes

SETTLE_S = 3.0
"""How long the answer to a change waits for what the Kubernetes API says to it."""
STOP_TIMEOUT_S = 5.0
OVER: tuple[RunState, ...] = ("done", "failed")
RELEASED: tuple[int, SearcherSource] = (0, "run-over")
ENDED = ("ended", "failed")
"""States of searchers that send no more heartbeats."""
NO_BACKEND = (
    'nothing of tba starts searchers here (scaling.backend = "none"): start or stop searcher processes by other means, '
    "any number may come and go (Compose: docker compose up --scale; Kubernetes: kubectl scale, or an autoscaler); or "
    'set scaling.backend = "kubernetes" and restart the buffer'
)
log = get_logger("scaling")


class Scaling:
    """How many searchers there should be, and, on Kubernetes, the task that sees to it.

    Args:
        context: Redis and settings.
        run: the state of the run.
        components: which searchers are alive.

    Raises:
        ConfigError: the Kubernetes API cannot be used from here.
    """

    def __init__(self, context: Context, *, run: RunControl, components: Components) -> None:
        self._context, self._run, self._components = context, run, components
        self._section = context.recipe.scaling
        self._wishes = Wishes(context)
        self._keeper: Keeper | None = None
        if self._section.backend == "kubernetes":
            self._keeper = Keeper(context, Deployment(context.recipe))
        self._problem: ScalingFailure | None = None
        self._reached = 0
        """The newest revision that is known to have been reached."""
        self._lock = asyncio.Lock()
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to see to it."""
        if self._section.backend != "none":
            self._task = asyncio.create_task(self._see_to_it(), name="scaling")

    async def stop(self) -> None:
        """End; a call to the Kubernetes API that is under way is not waited for."""
        self._ending.set()  # not cancel: a command that redis-py has begun may swallow the cancellation
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        if self._keeper is not None:
            self._keeper.deployment.close()

    async def change(self, request: ScaleRequest) -> ScalingInfo:
        """Want another number of searchers.

        Returns:
            The searchers as they are now; of the changes, the one that this request made.

        Raises:
            ConfigError: more than `scaling.max_searchers`.
            ConflictError: nothing of tba starts searchers here, or the run is offline.
            SupersededError: this buffer process does not own the run.
            UnavailableError: Redis did not answer.
        """
        self._check(request.num_searchers)
        revision = await self._wishes.change(request)
        if self._keeper is not None:  # what the API says to it belongs into the answer
            await asyncio.wait({asyncio.create_task(self._round(), name="scale now")}, timeout=SETTLE_S)
        return await self.info(after=revision - 1, limit=1)

    async def info(self, *, after: int = 0, limit: int | None = None) -> ScalingInfo:
        """The searchers, and the changes after a revision, oldest first.

        Raises:
            UnavailableError: Redis did not answer.
        """
        wish, fields = await self._wishes.read(), await self._run.read()
        components, _ = await self._components.read()
        await self._note_reached(wish, fields, components)  # whoever sees that they are there finds it in the audit
        changes, more = await (
            self._wishes.changes(after=after) if limit is None else self._wishes.changes(after=after, limit=limit)
        )
        return ScalingInfo(searchers=self._shown(wish, fields.state, components), changes=changes, next=more)

    async def searchers(self, state: RunState, components: Sequence[ComponentInfo]) -> SearchersInfo:
        """The searchers, as GET /v1/run shows them.

        Raises:
            UnavailableError: Redis did not answer.
        """
        return self._shown(await self._wishes.read(), state, components)

    async def wanted(self) -> int | None:
        """How many searchers there should be; None: not known here.

        Raises:
            UnavailableError: Redis did not answer.
        """
        wish, fields = await self._wishes.read(), await self._run.read()
        return self._target(wish, fields.state)[0]

    def _check(self, num: int | None) -> None:
        if self._section.backend == "none":
            raise ConflictError(NO_BACKEND)
        if self._context.recipe.is_offline:
            raise ConflictError(
                "the run is offline (searcher.num_searchers = 0): it only trains on what it began with; begin another "
                "run with searchers, from a snapshot of this one (`tba buffer save`, then `tba run --buffer`)"
            )
        if num is not None and num > self._section.max_searchers:
            raise ConfigError(
                f"num_searchers is {num}, above scaling.max_searchers {self._section.max_searchers}; ask for fewer, or "
                "raise that setting and restart the buffer"
            )

    def _target(self, wish: Wish, state: RunState) -> tuple[int | None, SearcherSource | None]:
        """How many there should be, and who says so."""
        if self._section.backend == "none":
            return None, None
        if self._keeper is not None and self._section.release_when_over and state in OVER:
            return RELEASED
        if wish.num is not None:
            return min(wish.num, self._section.max_searchers), "operator"  # the most may have been lowered since
        if self._keeper is not None:
            own = self._section.num_searchers
            return (self._keeper.own, "deployment") if own is None else (own, "recipe")
        return self._context.recipe.searcher.num_searchers, "recipe"

    def _shown(self, wish: Wish, state: RunState, components: Sequence[ComponentInfo]) -> SearchersInfo:
        wanted, source = self._target(wish, state)
        return SearchersInfo(
            revision=wish.revision,
            wanted=wanted,
            source=source,
            alive=num_alive(components),
            backend=self._section.backend,
            note=self._note(wish, state),
        )

    def _note(self, wish: Wish, state: RunState) -> str | None:
        if self._problem is not None:
            return str(self._problem)
        most = self._section.max_searchers
        if self._section.backend != "none" and wish.num is not None and wish.num > most and state not in OVER:
            return f"{wish.num} were asked for when scaling.max_searchers was higher; it is {most} now"
        if self._keeper is None:
            return None
        if self._section.release_when_over and state in OVER:
            return (
                f"the run {'is done' if state == 'done' else 'has failed'}: {self._keeper.deployment.where} is held at "
                "0 replicas (scaling.release_when_over); a trainer that goes on with the run brings its searchers back"
            )
        return self._keeper.note

    async def _see_to_it(self) -> None:
        while not self._ending.is_set():
            await self._round()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), self._section.reconcile_s)

    async def _round(self) -> None:
        """Look once; never raises, since it would end the task."""
        async with self._lock:
            if self._context.replica.refused is not None or self._ending.is_set():
                return  # a newer buffer process sees to it
            try:
                await self._advance()
            except UnavailableError as error:
                log.warning("redis_unavailable", detail=str(error))
            except Exception:  # a defect must show in the log, and must not end the task
                log.exception("scaling_failed")

    async def _advance(self) -> None:
        wish, fields = await self._wishes.read(), await self._run.read()
        wanted, source = self._target(wish, fields.state)
        if self._keeper is not None:
            try:
                target = None if source == "deployment" else wanted
                await self._keeper.keep(
                    target, why=f"revision {wish.revision}" if source == "operator" else str(source)
                )
            except ScalingFailure as failure:
                await self._failed(failure)
                return
            if self._problem is not None:
                log.info("scaling_works_again")
                self._problem = None
        components, _ = await self._components.read()
        await self._note_reached(wish, fields, components)

    async def _failed(self, failure: ScalingFailure) -> None:
        if self._problem is None or str(self._problem) != str(failure):
            log.warning("scaling_fails", reason=failure.reason, detail=str(failure))
        self._problem = failure
        await self._context.count(f"scaling_failures:{failure.reason}")

    async def _note_reached(self, wish: Wish, fields: RunFields, components: Sequence[ComponentInfo]) -> None:
        """The audit says at which step the searchers that were asked for were there."""
        if wish.revision == self._reached or fields.state in OVER:
            return
        if num_alive(components) == self._target(wish, fields.state)[0]:
            await self._wishes.reach(wish.revision, lineage=fields.lineage, step=fields.step)
            self._reached = wish.revision


def num_alive(components: Sequence[ComponentInfo]) -> int:
    """Searchers that send heartbeats and have not said that they end."""
    return sum(item.kind == "searcher" and item.alive and item.state not in ENDED for item in components)

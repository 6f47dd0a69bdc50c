"""Change and show the number of searchers; on Kubernetes, set the replicas to it every RECONCILE_S.

Redis has the number that an operator asked for, with a line of the audit for every change. Without Kubernetes,
`tba run` reads the number with the state of the run, and starts and stops searchers (tba_cli/local/).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tba.api import MAX_CHANGES_PER_PAGE, ComponentInfo, RunState, ScaleAudit, ScaleRequest, ScalingInfo, SearchersInfo
from tba.api.run import SearcherSource
from tba.concurrency import in_thread
from tba.errors import ConfigError, ConflictError, UnavailableError
from tba.logs import get_logger
from tba_buffer.run.components import Components
from tba_buffer.run.kubernetes import Deployment, ScalingFailure
from tba_buffer.run.state import RunStateReader
from tba_buffer.storage.context import Context, needed, parse_number, read_lines
from tba_buffer.storage.redis_client import redis_errors

RECONCILE_S = 5.0
"""How often the replicas are compared with the desired number, and set again if something else has changed them."""
SETTLE_S = 3.0
"""How long the answer to a change waits for the Kubernetes API."""
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


@dataclass(frozen=True, slots=True)
class DesiredSearchers:
    """The last request; revision 0: there was none. `num` None: as the recipe or the chart says."""

    revision: int
    num: int | None


class Scaling:
    """The desired number of searchers and, on Kubernetes, the task that sets the replicas to it.

    Args:
        context: Redis and settings.
        run_state: reads the state of the run.
        components: tell which searchers are alive.

    Raises:
        ConfigError: the Kubernetes API cannot be used from here.
    """

    def __init__(self, context: Context, *, run_state: RunStateReader, components: Components) -> None:
        self._context, self._run_state, self._components = context, run_state, components
        self._section, self._server = context.recipe.scaling, context.recipe.shared_server
        self._most = self._section.max_searchers if self._server is None else 1
        self._deployment = Deployment(context.recipe) if self._section.backend == "kubernetes" else None
        self._problem: ScalingFailure | None = None
        self._lock = asyncio.Lock()
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that sets the replicas; on Kubernetes only."""
        if self._deployment is not None:
            self._task = asyncio.create_task(self._reconcile_periodically(), name="scaling")

    async def stop(self) -> None:
        """Stop the task, waiting at most STOP_TIMEOUT_S for its call to the Kubernetes API."""
        self._ending.set()  # not cancel: a command that redis-py has begun may swallow the cancellation
        if self._task is not None:
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT_S)
        if self._deployment is not None:
            self._deployment.close()

    async def change(self, request: ScaleRequest) -> ScalingInfo:
        """Store another desired number of searchers; on Kubernetes, wait up to SETTLE_S until the replicas are set.

        Returns:
            The searchers now, and only the change that this request made.

        Raises:
            ConfigError: more than `scaling.max_searchers`, or more than one that share a server.
            ConflictError: nothing of tba starts searchers here, or the run is offline.
            SupersededError: this buffer process does not own the run.
        """
        num = request.num_searchers
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
        if num is not None and num > self._most:
            raise ConfigError(
                f"num_searchers is {num}, and all would load weights into the server {self._server} (searcher.engine = "
                '"openai"), which one searcher updates; ask for 1, and start others yourself, each with a server of '
                "its own (TBA_SEARCHER__OPENAI__URL)"
            )
        revision = await self.record(request)
        if self._deployment is not None:  # the reply tells the answer of the API, if it comes soon
            await asyncio.wait({asyncio.create_task(self._round(), name="scale now")}, timeout=SETTLE_S)
        return await self.info(after=revision - 1, limit=1)

    async def record(self, request: ScaleRequest) -> int:
        """Store a request and return its revision. A request id that was stored before changes nothing.

        Raises:
            SupersededError: this buffer process does not own the run.
        """
        reply = await self._context.scripts.run(
            "scale",
            request_id=request.request_id,
            now_s=self._context.clock(),
            num_searchers=request.num_searchers,
            reason=request.reason,
        )
        return int(reply[1])

    async def info(self, *, after: int = 0, limit: int = MAX_CHANGES_PER_PAGE) -> ScalingInfo:
        """Return the searchers now, and at most `limit` changes after the revision `after`, oldest first."""
        fields = await self._run_state.read_fields()
        components, _ = await self._components.read()
        searchers = await self.searchers(fields.state, components)
        key = self._context.keys.scaling_changes
        changes, more = await read_lines(self._context, key, ScaleAudit, after=after, limit=limit)
        return ScalingInfo(searchers=searchers, changes=changes, next=more)

    async def searchers(self, state: RunState, components: Sequence[ComponentInfo]) -> SearchersInfo:
        """Return the searchers, as GET /v1/run shows them."""
        desired = await self._read()
        num, source = self._target(desired, state)
        return SearchersInfo(
            revision=desired.revision,
            desired=num,
            source=source,
            # those that send heartbeats and have not reported that they end
            alive=sum(item.kind == "searcher" and item.alive and item.state not in ENDED for item in components),
            backend=self._section.backend,
            note=self._note(desired, state),
        )

    async def desired(self, state: RunState) -> int | None:
        """Return the desired number of searchers; None: not known here."""
        return self._target(await self._read(), state)[0]

    async def _read(self) -> DesiredSearchers:
        """Read the last request from Redis."""
        key = self._context.keys.scaling
        with redis_errors("read how many searchers are desired"):
            revision, num = await self._context.redis.hmget(key, "revision", "wanted")
        return DesiredSearchers(
            needed(key, "revision", lambda: parse_number(revision)),
            None if num is None else needed(key, "wanted", lambda: parse_number(num)),
        )

    def _target(self, desired: DesiredSearchers, state: RunState) -> tuple[int | None, SearcherSource | None]:
        """Return the desired number, and its source."""
        if self._section.backend == "none":
            return None, None
        if self._is_released(state):
            return RELEASED
        if desired.num is not None:
            # the limit may have been lowered since the request
            return min(desired.num, self._most), "operator"
        if self._deployment is not None and self._section.num_searchers is not None:
            return self._section.num_searchers, "recipe"
        return self._context.recipe.searcher.num_searchers, "recipe"

    def _is_released(self, state: RunState) -> bool:
        return self._deployment is not None and self._section.scale_down_on_run_end and state in OVER

    def _note(self, desired: DesiredSearchers, state: RunState) -> str | None:
        if self._problem is not None:
            return str(self._problem)
        asked = 0 if self._section.backend == "none" or state in OVER else desired.num or 0
        if asked > self._most:
            if self._server is not None:
                return f"{asked} were asked for, and the server {self._server} is for one searcher"
            return f"{asked} were asked for when scaling.max_searchers was higher; it is {self._most} now"
        if self._deployment is None:
            return None
        if self._is_released(state):
            ending, where = "is done" if state == "done" else "has failed", self._deployment.where
            return (
                f"the run {ending}: {where} is held at 0 replicas "
                "(scaling.scale_down_on_run_end); a trainer that continues the run brings its searchers back"
            )
        return None

    async def _reconcile_periodically(self) -> None:
        while not self._ending.is_set():
            await self._round()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), RECONCILE_S)

    async def _round(self) -> None:
        """Reconcile once. Never raises, since that would end the task."""
        async with self._lock:
            if self._context.epoch.refused is not None or self._ending.is_set():
                return  # a newer buffer process reconciles
            try:
                await self._advance()
            except UnavailableError as error:
                log.warning("redis_unavailable", detail=str(error))
            except Exception:  # a defect must show in the log, and must not end the task
                log.exception("scaling_failed")

    async def _advance(self) -> None:
        desired, fields = await self._read(), await self._run_state.read_fields()
        num, source = self._target(desired, fields.state)
        deployment = self._deployment
        if deployment is None or num is None:
            return
        try:
            found = await in_thread(deployment.replicas)
            if found != num:
                await in_thread(lambda: deployment.set_replicas(num))
                why = f"revision {desired.revision}" if source == "operator" else str(source)
                log.info("replicas_set", deployment=deployment.name, old=found, new=num, why=why)
        except ScalingFailure as failure:  # the next round tries again
            if str(self._problem) != str(failure):  # logged once, not with every round
                log.warning("scaling_fails", reason=failure.reason, detail=str(failure))
            self._problem = failure
            await self._context.count(f"scaling_failures:{failure.reason}")
            return
        if self._problem is not None:
            log.info("scaling_works_again")
            self._problem = None

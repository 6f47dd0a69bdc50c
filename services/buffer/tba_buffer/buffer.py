"""The buffer: all parts, wired together, started and kept level.

start    check Redis and its promise -> own the run -> prompts, lineages -> index from the log -> bounds -> ready
upkeep   every UPKEEP_S: check Redis' promise again (it may have been restarted with another) and that no newer process
         owns the run, level the index, evict what has become too old, write a new base of the log when it is due,
         sample the counters for the rates. While the promise is not kept, pushes are refused and the service is not
         ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from tba.api import ComponentInfo, RunInfo, Stats
from tba.config import Recipe
from tba.errors import UnavailableError
from tba.logs import get_logger
from tba.redis_access import redis_access
from tba_buffer import replica
from tba_buffer.acks import Acks
from tba_buffer.admission import Admission
from tba_buffer.base import BaseWriter
from tba_buffer.components import Components
from tba_buffer.context import Context
from tba_buffer.draws import Draws
from tba_buffer.evals import Evals
from tba_buffer.event_changes import Look
from tba_buffer.events import Events
from tba_buffer.evictor import Evictor
from tba_buffer.glance import Glances
from tba_buffer.keys import Keys
from tba_buffer.leases import Leases
from tba_buffer.lineage import Lineages
from tba_buffer.metrics import Metrics
from tba_buffer.promise import Promise
from tba_buffer.prompts import Catalog
from tba_buffer.redis_link import refused_writes
from tba_buffer.rescore import Rescoring
from tba_buffer.reward_link import RewardLink
from tba_buffer.reward_probe import RewardProbe
from tba_buffer.rollout_views import RolloutViews
from tba_buffer.rollouts import Rollouts
from tba_buffer.run_note import absent_trainer
from tba_buffer.run_state import RunControl
from tba_buffer.samples import Samples
from tba_buffer.scaling import Scaling
from tba_buffer.scorer import Scorer
from tba_buffer.scoring import Scoring
from tba_buffer.scripts import Scripts
from tba_buffer.settings import Settings, read_live
from tba_buffer.snapshots import Snapshots
from tba_buffer.stats import StatsReader
from tba_buffer.view import IndexView

UPKEEP_S = 1.0
STOP_TIMEOUT_S = 5.0
SETTINGS_FOLLOWED = 20
"""So many of the newest changes of live settings are looked at for where they take effect."""
log = get_logger("buffer")


class Buffer:
    """All parts of the buffer service.

    Args:
        recipe: the run.
        registry: for metrics.
        clock: Unix seconds; deadlines of leases and batches are told by it.
    """

    def __init__(self, recipe: Recipe, registry: CollectorRegistry, *, clock: Callable[[], float] = time.time) -> None:
        promise = Promise(redis_access(recipe), recipe.buffer.appendfsync)
        self.context = Context(
            recipe=recipe,
            redis=promise.redis,
            promise=promise,
            keys=Keys(recipe.run.name),
            scripts=Scripts(promise),
            clock=clock,
        )
        self.view = IndexView(self.context)
        self.catalog = Catalog(self.context)
        self.lineages = Lineages(self.context)
        self.view.on_rebuilt = self._reread
        promise.on_restarted = self.view.verify
        self.run = RunControl(self.context)
        self.components = Components(self.context)
        self.scaling = Scaling(self.context, run=self.run, components=self.components)
        self.evals = Evals(self.context, self.catalog)
        self.evictor = Evictor(self.context, self.view, self.lineages, self.run)
        self.base = BaseWriter(self.context, min_tail=recipe.buffer.max_tail_events)
        self.admission = Admission(recipe)
        self.rollouts = Rollouts(self.context, self.catalog, self.lineages, self.evictor)
        reward = RewardLink(self.context, self.components)
        scoring = Scoring(self.context, catalog=self.catalog, view=self.view, link=reward, evictor=self.evictor)
        self.rescoring = Rescoring(self.context, catalog=self.catalog, view=self.view, scoring=scoring, link=reward)
        self.scorer = Scorer(self.context, view=self.view, scoring=scoring, rescoring=self.rescoring, link=reward)
        self.settings = Settings(self.context, self.lineages)
        glances = Glances(self.context, self.view, self.settings)
        self.leases = Leases(self.context, catalog=self.catalog, evals=self.evals, glances=glances)
        self.draws = Draws(self.context, catalog=self.catalog, glances=glances, components=self.components)
        self.acks = Acks(self.context, self.evictor)
        self.samples = Samples(self.context, glances)
        self.stats_reader = StatsReader(self.context, catalog=self.catalog, view=self.view, lineages=self.lineages)
        self.rollout_views = RolloutViews(
            self.context, catalog=self.catalog, view=self.view, lineages=self.lineages, run=self.run
        )
        self.snapshots = Snapshots(
            self.context,
            view=self.view,
            catalog=self.catalog,
            lineages=self.lineages,
            evictor=self.evictor,
            components=self.components,
        )
        self.reward_probe = RewardProbe(recipe)
        self.components.services += [self._component, self.reward_probe.info]
        self.metrics = Metrics(
            registry,
            stats=self.stats_reader,
            components=self.components,
            catalog=self.catalog,
            run=self.run,
            searchers_wanted=self.scaling.wanted,
            promise_problem=lambda: self.context.promise.problem,
        )
        self.events = Events(self._look, registry)
        self._upkeep: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._began_s = time.monotonic()
        self._not_ready: str | None = "starting: reading the log from Redis"

    async def start(self) -> None:
        """Read everything from Redis and begin the upkeep; once, however often it is called.

        Raises:
            ConfigError: Redis cannot be reached, or could lose what it acknowledges.
            UnavailableError: Redis went away meanwhile, or what it has is not a whole log.
        """
        if self._upkeep is not None:
            return
        await replica.take(self.context)
        await self.catalog.load()
        await self.lineages.load()
        await self.settings.load()
        index = await self.view.level()
        await self.context.promise.until_written_anew()
        await self.evictor.enforce()
        log.info("index_built", num_rollouts=index.num_live, log_position=index.position)
        self._not_ready, self._began_s = None, time.monotonic()
        self._upkeep = asyncio.create_task(self._keep_up(), name="upkeep")
        await self.snapshots.start()
        self.scorer.start()
        self.scaling.start()
        self.reward_probe.start()

    async def stop(self) -> None:
        """End the upkeep and close the connections."""
        self._ending.set()  # not cancel: a command that redis-py has begun may swallow the cancellation
        await self.events.stop()
        await self.reward_probe.stop()
        await self.scorer.stop()
        await self.scaling.stop()
        await self.snapshots.stop()
        if self._upkeep is not None:
            await asyncio.wait([self._upkeep], timeout=STOP_TIMEOUT_S)
        await self.context.promise.aclose()

    async def ready(self) -> str | None:
        """None when requests can be served, else a sentence why not."""
        if self._not_ready is not None:
            return self._not_ready
        if self._upkeep is not None and self._upkeep.done() and not self._ending.is_set():
            return f"the upkeep has failed ({self._upkeep.exception()!r}); restart the buffer"
        try:
            await self.context.redis.ping()
        except RedisError as error:
            return refused_writes(error) or f"Redis does not answer ({type(error).__name__})"
        return self.rollouts.refuse_reason or self.view.problem

    async def stats(self) -> Stats:
        """Counts of the run.

        Raises:
            UnavailableError: Redis did not answer.
        """
        return await self.stats_reader.read()

    async def run_info(self) -> RunInfo:
        """The run, its components, waits and evaluations.

        Raises:
            UnavailableError: Redis did not answer.
        """
        fields = await self.run.read()
        components, waits = await self.components.read()
        evals, best = await self.evals.all_and_best()
        note = absent_trainer(
            fields.state,
            fields.step,
            components,
            had_trainer=fields.lineage > 0,
            watched_s=time.monotonic() - self._began_s,
        )
        return RunInfo(
            run=self.context.run,
            state=fields.state,
            state_reason=fields.reason,
            note=note,
            last_change=fields.change,
            step=fields.step,
            lineage=fields.lineage,
            parents={lineage: str(parent) for lineage, parent in self.lineages.tree.parents.items()},
            latest_version=fields.latest_version,
            checkpoint=fields.checkpoint,
            checkpoint_key=fields.checkpoint_key,
            num_rollbacks=fields.num_rollbacks,
            components=components,
            waits=waits,
            evals=evals,
            best=best,
            origin=await self.snapshots.origin(),
            searchers=await self.scaling.searchers(fields.state, components),
        )

    async def _look(self) -> Look:
        info = await self.run_info()
        newest = await self.settings.info(after=max(0, self.settings.revision - SETTINGS_FOLLOWED))
        return Look(info, newest.changes)

    def _component(self) -> ComponentInfo:
        """This service itself."""
        problem = self._not_ready or self.rollouts.refuse_reason or self.view.problem
        state = "starting" if self._not_ready else "refusing" if problem else "serving"
        if self.snapshots.is_saving and problem is None:
            state = "saving"
        return ComponentInfo(
            component_id="buffer",
            kind="buffer",
            state=state,
            version=None,
            alive=True,
            heartbeat_age_s=0.0,
            gauges={},
            wait=self.components.held_wait(),
            note=problem,
        )

    async def _reread(self) -> None:
        """Redis is not what it was (restored from an older file): what is known beside the index is read again."""
        await self.catalog.reload()
        await self.lineages.load()
        await self.settings.load()

    async def _tend(self) -> None:
        await replica.check(self.context)
        await self.evictor.enforce()
        if not self.snapshots.is_saving:
            await self.base.keep_up(self.view.index)
        await self.stats_reader.sample()

    async def _keep_up(self) -> None:
        problem = None
        while not self._ending.is_set():
            try:
                await self.context.promise.check()
                if self.rollouts.refuse_reason != problem:
                    problem = self.rollouts.refuse_reason
                    log.warning("pushes_refused" if problem else "pushes_taken", problem=problem)
                if self.context.promise.broken is None:
                    await self._tend()
            except (RedisError, UnavailableError) as error:
                log.warning("redis_unavailable", error=str(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), UPKEEP_S)


def check_redis(recipe: Recipe) -> None:
    """Before anything is served: Redis answers and promises to keep what it acknowledges, and the run's live settings
    go with the recipe.

    Raises:
        ConfigError: it does not, or they do not.
    """

    async def check() -> None:
        promise = Promise(redis_access(recipe), recipe.buffer.appendfsync)
        try:
            await promise.check_at_start()
            await read_live(promise.redis, Keys(recipe.run.name), recipe)
        finally:
            await promise.aclose()

    asyncio.run(check())

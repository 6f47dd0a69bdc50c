"""The buffer: all parts, wired together, started and kept level.

start    check Redis and its promise -> own the run -> prompts, lineages -> index from the log -> bounds -> ready
upkeep   every UPKEEP_S: check Redis' promise again (it may have been restarted with another), that it has what was
         acknowledged (loss.py) and that no newer process owns the run; level the index, evict what has become too old,
         write a new base of the log when it is due, sample the counters for the rates. While the promise is not kept,
         pushes are refused and the service is not ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from tba.api import ComponentInfo, RunInfo, Stats
from tba.api.run import AuditRole
from tba.config import Recipe
from tba.errors import SupersededError, UnavailableError
from tba.logs import get_logger
from tba.redis_access import redis_access
from tba.wire.ids import new_id
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
from tba_buffer.loss import BY_THE_RECIPE, Losses, Replica
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
from tba_buffer.unreadable import DAMAGE, Unreadable
from tba_buffer.view import IndexView, NotWholeError

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
        keys, owner, unreadable = Keys(recipe.run.name), Replica(), Unreadable()
        losses = Losses(promise.redis, keys, owner, unreadable, clock=clock)
        self.context = Context(
            recipe=recipe,
            redis=promise.redis,
            promise=promise,
            keys=keys,
            scripts=Scripts(promise, keys, losses),
            losses=losses,
            replica=owner,
            clock=clock,
            unreadable=unreadable,
        )
        self.view = IndexView(self.context)
        self.catalog = Catalog(self.context)
        self.lineages = Lineages(self.context)
        self.view.on_rebuilt = self._reread
        promise.on_checked, promise.on_restarted = self._lost, self._damaged
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
        self.glances = glances = Glances(self.context, self.view, self.settings)
        self.leases = Leases(self.context, catalog=self.catalog, evals=self.evals, glances=glances)
        self.draws = Draws(
            self.context, catalog=self.catalog, glances=glances, components=self.components, scoring=scoring
        )
        self.acks = Acks(self.context, self.evictor)
        self.samples = Samples(self.context, glances, scoring)
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
        self.reward_probe = RewardProbe(recipe, on_broken=self.run.fail_for_reward)
        self.components.services += [self._component, self.reward_probe.info]
        self.metrics = Metrics(
            registry,
            stats=self.stats_reader,
            components=self.components,
            catalog=self.catalog,
            run=self.run,
            searchers_wanted=self.scaling.wanted,
            promise_problem=lambda: self.context.promise.problem,
            loss=lambda: self.loss,
        )
        self.events = Events(self._look, registry)
        self._upkeep: asyncio.Task[None] | None = None
        self._upkeep_problem: str | None = None
        self._is_stale = False
        """What was read is of a Redis that had lost data, and has not been read anew."""
        self._accepting = asyncio.Lock()
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
        await self.evictor.enforce()
        log.info("index_built", num_rollouts=index.num_live, log_position=index.position)
        await self.context.promise.check()  # who is told that it is ready is not refused a moment later
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
        return self._problem

    @property
    def _problem(self) -> str | None:
        """Why requests cannot be served by a buffer that has started, and Redis answers."""
        problem = self.rollouts.refuse_reason or self.view.problem or self.context.unreadable.problem
        return problem or self._upkeep_problem

    async def stats(self) -> Stats:
        """Counts of the run.

        Raises:
            UnavailableError: Redis did not answer.
        """
        return await self.stats_reader.read()

    async def accept_loss(self, role: AuditRole, reason: str | None) -> None:
        """Go on with what Redis has, without what it has lost of what was acknowledged; nothing when nothing is lost.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis did not answer, or what it has is not a whole log.
        """
        async with self._accepting:  # of two at once, the second finds nothing to accept
            await self.context.promise.check()
            if self.loss is not None:
                await self._accept(role, reason)
                await self.context.promise.check()
                self.context.changed.notify()

    async def hear(self, claim: str) -> None:
        """A trainer says what it was told last, perhaps by an earlier start of the buffer.

        Raises:
            UnavailableError: Redis did not answer.
        """
        if await self.context.losses.claim(claim):
            await self.context.promise.check()

    @property
    def loss(self) -> str | None:
        """What Redis has lost of what was acknowledged, while nobody has accepted it."""
        return self.context.losses.problem or self.context.promise.damaged

    async def _accept(self, role: AuditRole, reason: str | None) -> None:
        context, loss, num_lost = self.context, self.loss, self.context.losses.num_lost
        await self.view.reread()
        request_id = new_id("request")
        reply = await context.scripts.accept_loss(*context.losses.accept_args(role, reason, request_id))
        if reply == replica.SUPERSEDED:
            raise SupersededError("accepting a loss was refused: a newer buffer process owns the run")
        context.losses.accepted(int(reply), request_id)
        context.promise.accept_damage()
        log.warning("loss_accepted", num_lost=num_lost, loss=loss, role=role, reason=reason)

    async def _lost(self) -> str | None:
        """What Redis has lost, each time that its promise is checked."""
        losses = self.context.losses
        before, problem = losses.problem, await losses.check()
        if problem is not None:
            if before is None:
                log.error("redis_has_lost_data", num_lost=losses.num_lost, problem=problem)
            return await self._accept_as_agreed(problem)
        self._is_stale |= before is not None
        if self._is_stale:  # it is all there again: what was read of the copy that it was not in is forgotten
            await self.view.reread()
            self._is_stale = False
        return None

    async def _damaged(self) -> str | None:
        """What is wrong with the log of a Redis that was started again."""
        problem = await self.view.verify()
        return None if problem is None else await self._accept_as_agreed(problem)

    async def _accept_as_agreed(self, problem: str) -> str | None:
        if self.context.recipe.buffer.appendfsync == "always":
            return problem
        try:
            await self._accept("recipe", f"{BY_THE_RECIPE}; {problem}")
        except NotWholeError as error:
            return str(error)
        return None

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
            loss=self.loss,
            num_lost_changes=fields.num_lost_changes,
            last_change=fields.change,
            step=fields.step,
            lineage=fields.lineage,
            parents={lineage: str(parent) for lineage, parent in self.lineages.tree.parents.items()},
            latest_version=fields.latest_version,
            checkpoint=fields.checkpoint,
            checkpoint_key=fields.checkpoint_key,
            constants=self.context.recipe.constants,
            num_rollbacks=fields.num_rollbacks,
            components=components,
            waits=waits,
            evals=evals,
            best=best,
            origin=await self.snapshots.origin(),
            searchers=await self.scaling.searchers(fields.state, components),
            unreadable=await self.context.unreadable.info(self.context.redis, self.context.keys),
        )

    async def _look(self) -> Look:
        info = await self.run_info()
        newest = await self.settings.info(after=max(0, self.settings.revision - SETTINGS_FOLLOWED))
        return Look(info, newest.changes)

    def _component(self) -> ComponentInfo:
        """This service itself."""
        problem = self._not_ready or self._problem
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
        self.scorer.forget_positions()

    async def _tend(self) -> None:
        await replica.check(self.context)
        await self.evictor.enforce()
        if not self.snapshots.is_saving:
            await self.base.keep_up(self.view.index)
        await self.stats_reader.sample()
        await self.glances.read()  # what leases and draws cannot do without: /readyz says why they are refused

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
                    self._upkeep_problem = None
            except DAMAGE as error:  # it goes on once Redis is restored
                failure = f"the upkeep has failed ({error!r}), and is tried again; the log has more"
                if failure != self._upkeep_problem:  # a traceback once, not every second
                    log.exception("upkeep_failed")
                self._upkeep_problem = failure
            except (RedisError, UnavailableError) as error:
                log.warning("redis_unavailable", error=str(error))
                if self.context.promise.broken is None:  # Redis is well, and something in it cannot be read
                    self._upkeep_problem = str(error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), UPKEEP_S)


def check_redis(recipe: Recipe) -> None:
    """Before anything is served: Redis answers and promises to keep what it acknowledges, the run is stored in the
    format of this release, and its live settings go with the recipe.

    Raises:
        ConfigError: it does not, or they do not.
    """

    async def check() -> None:
        promise = Promise(redis_access(recipe), recipe.buffer.appendfsync)
        try:
            await promise.check_at_start()
            await replica.check_format(promise.redis, Keys(recipe.run.name))
            await read_live(promise.redis, Keys(recipe.run.name), recipe)
        finally:
            await promise.aclose()

    asyncio.run(check())

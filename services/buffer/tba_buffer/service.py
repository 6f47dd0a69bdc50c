"""The buffer: its parts, how they are wired, its start and its upkeep.

start    check Redis -> own the run -> load prompts, lineages, settings -> build the index -> evict -> ready
upkeep   every UPKEEP_S: check that Redis is still durable (a restart may have changed its settings), that it has every
         acknowledged change, and that no newer process owns the run. Then catch the index up, evict, compact the log
         if it is long enough, and sample the counters for the rates. While Redis is not durable, pushes are refused
         and the service is not ready.

A read-only buffer (`buffer.read_only`) reads everything once. It does not own the run, and has no upkeep and no
workers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import cache

from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from tba.api import ComponentInfo, RunInfo
from tba.cgroups import core_limits
from tba.config import Recipe
from tba.config.redis import redis_access
from tba.errors import UnavailableError
from tba.logs import get_logger
from tba.server import not_ready
from tba.store import open_store
from tba_buffer.eviction.evictor import Evictor
from tba_buffer.index.log_follower import Compactor, IndexView
from tba_buffer.monitoring.curves import CurvesReader
from tba_buffer.monitoring.metrics import Metrics
from tba_buffer.monitoring.stats import StatsReader
from tba_buffer.monitoring.summary import CURVE_NAMES, NUM_POINTS, summarise
from tba_buffer.monitoring.weight_versions import WeightVersionReader
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.prompts.evaluations import Evaluations
from tba_buffer.prompts.leases import Leases
from tba_buffer.rollouts.failures import FailureReader
from tba_buffer.rollouts.parquet import RolloutExports
from tba_buffer.rollouts.prompt_queries import PromptReader
from tba_buffer.rollouts.push import PushAdmission, RolloutWriter
from tba_buffer.rollouts.queries import RolloutReader
from tba_buffer.rollouts.token_texts import TokenTexts
from tba_buffer.rollouts.trained_steps import TrainedSteps
from tba_buffer.run.accept_loss import LossRecovery
from tba_buffer.run.components import Components, absent_trainer
from tba_buffer.run.control import RunControl
from tba_buffer.run.lineage import Lineages
from tba_buffer.run.rollback import Rollbacks
from tba_buffer.run.scaling import Scaling
from tba_buffer.run.settings import Settings, read_settings
from tba_buffer.run.state import RunStateReader
from tba_buffer.sampling.draw import BatchDrawer
from tba_buffer.sampling.ledger import BatchLedger
from tba_buffer.scoring.rescore import RescoreJobs
from tba_buffer.scoring.reward_service import RewardConnection, RewardProbe
from tba_buffer.scoring.rollout_scorer import RolloutScorer
from tba_buffer.scoring.worker import ScoringWorker
from tba_buffer.snapshots.jobs import SnapshotJobs
from tba_buffer.storage.buffer_epoch import check_format
from tba_buffer.storage.context import DAMAGE_ERRORS, Context
from tba_buffer.storage.durability import DurabilityCheck
from tba_buffer.storage.keys import Keys
from tba_buffer.storage.redis_client import refused_writes

UPKEEP_S = 1.0
STOP_TIMEOUT_S = 5.0
log = get_logger("buffer")


class Buffer:
    """The buffer service without HTTP.

    Args:
        recipe: the settings of the run.
        registry: receives the metrics.
        clock: returns Unix seconds; the deadlines of leases and batches are set and checked with it.
    """

    def __init__(self, recipe: Recipe, registry: CollectorRegistry, *, clock: Callable[[], float] = time.time) -> None:
        self.context = context = Context.connect(recipe, clock=clock)
        self.view = view = IndexView(context)
        view.on_rebuilt = self._reread
        self.compactor = Compactor(context, min_events=recipe.buffer.max_log_events_since_checkpoint)
        self.recovery = LossRecovery(context, view)
        self._view_of = recipe.buffer.read_only
        store = cache(lambda: open_store(recipe.store))
        # who takes part and what is allowed, prompts, and the work that searchers lease
        self.lineages, self.components = Lineages(context), Components(context)
        self.settings = Settings(context)
        self.run_state = RunStateReader(context, view, self.settings)
        self.control = RunControl(context, self.run_state)
        self.rollbacks = Rollbacks(context, self.lineages, store)
        self.scaling = Scaling(context, run_state=self.run_state, components=self.components)
        self.catalog = catalog = Catalog(context)
        self.evaluations = Evaluations(context, catalog, self.lineages)
        self.leases = Leases(context, catalog=catalog, evaluations=self.evaluations, run_state=self.run_state)
        # rollouts from push to eviction; saved and loaded buffers
        self.evictor = evictor = Evictor(context, view, self.lineages, self.run_state)
        self.admission = PushAdmission(recipe)
        self.writer = RolloutWriter(context, catalog, self.lineages, evictor)
        self.reader = RolloutReader(
            context,
            catalog=catalog,
            view=view,
            lineages=self.lineages,
            run_state=self.run_state,
            trained_steps=TrainedSteps(context, self.lineages),
            token_texts=TokenTexts(context),
        )
        self.prompt_reader = PromptReader(catalog, view)
        self.exports = RolloutExports(self.reader, catalog)
        self.snapshots = SnapshotJobs(
            context, view=view, catalog=catalog, lineages=self.lineages, evictor=evictor, components=self.components
        )
        # rewards of stored rollouts; batches, drawn and acknowledged
        reward = RewardConnection(context, self.components)
        self.scorer = scorer = RolloutScorer(context, catalog=catalog, view=view, reward=reward, evictor=evictor)
        self.rescore_jobs = RescoreJobs(context, catalog=catalog, view=view, scorer=scorer, reward=reward)
        self.scoring_worker = ScoringWorker(
            context, view=view, scorer=scorer, rescore_jobs=self.rescore_jobs, reward=reward
        )
        self.reward_probe = RewardProbe(recipe, on_broken=self.control.fail_for_reward)
        failures = FailureReader(context, view)
        self.drawer = BatchDrawer(
            context, catalog=catalog, run_state=self.run_state, components=self.components, failures=failures
        )
        self.ledger = BatchLedger(context, self.lineages, evictor, scorer)
        # a view has no reward service
        self.components.services += [self._component, *([] if self._view_of else [self.reward_probe.info])]
        self.stats = StatsReader(context, catalog=catalog, view=view, failures=failures)
        self.weight_versions = WeightVersionReader(store, context.run)
        self.curves = CurvesReader(context, self.lineages)
        self.metrics = Metrics(
            registry,
            stats=self.stats,
            components=self.components,
            catalog=catalog,
            run_state=self.run_state,
            searchers_desired=self.scaling.desired,
            durability_problem=lambda: context.durability.problem,
            loss=lambda: self.recovery.loss,
        )
        self._upkeep: asyncio.Task[None] | None = None
        self._upkeep_problem: str | None = None
        self._ending = asyncio.Event()
        self._began_s = time.monotonic()
        self._not_ready: str | None = "starting: reading the log from Redis"

    async def start(self) -> None:
        """Take the run, read everything from Redis, evict, and start the background tasks. Further calls do nothing.

        Raises:
            ConfigError: the run is stored in another format, or its live settings contradict the recipe.
            UnavailableError: Redis went away meanwhile, or a part of its log is missing.
        """
        if self._not_ready is None:
            return
        # own the run first: an older process that is still alive cannot change what is read now
        epoch = self.context.epoch
        await (epoch.take(self.context.clock()) if self._view_of is None else epoch.look())
        await self.context.losses.begin()
        await self.catalog.load()
        await self.lineages.load()
        await self.settings.load()
        index = await self.view.catch_up()
        if self._view_of is None:
            await self.evictor.enforce()
        log.info("index_built", num_rollouts=index.num_live, log_position=index.position)
        await self.context.durability.check()  # a service that says it is ready must not refuse a moment later
        self._not_ready, self._began_s = None, time.monotonic()
        if self._view_of is not None:
            return
        self._upkeep = asyncio.create_task(self._keep_up(), name="upkeep")
        # last: these tasks change the run, and need everything above
        await self.snapshots.start()
        self.scoring_worker.start()
        self.scaling.start()
        self.reward_probe.start()

    async def stop(self) -> None:
        """Stop the background tasks and close the connections to Redis."""
        self._ending.set()  # no cancel: a command that redis-py has begun may swallow the cancellation
        await self.reward_probe.stop()
        await self.scoring_worker.stop()
        await self.scaling.stop()
        await self.snapshots.stop()
        if self._upkeep is not None:
            await asyncio.wait([self._upkeep], timeout=STOP_TIMEOUT_S)
        await self.context.durability.aclose()

    async def ready(self) -> str | None:
        """Return None when requests can be served, else a sentence why not."""
        if self._not_ready is not None:
            return self._not_ready
        if self._upkeep is not None and self._upkeep.done() and not self._ending.is_set():
            return f"the background upkeep has failed ({self._upkeep.exception()!r}); restart the buffer"
        try:
            # asked now: the last check of the upkeep may be a second old
            await self.context.redis.ping()
        except RedisError as error:
            return refused_writes(error) or f"Redis does not answer ({type(error).__name__})"
        return self._problem

    @property
    def _problem(self) -> str | None:
        """Why requests cannot be served, although the buffer has started and Redis answers."""
        if self._view_of is not None:  # it writes nothing, and what is damaged or lost is there to be looked at
            return None
        problem = self.writer.refuse_reason or self.view.problem
        return problem or self._upkeep_problem

    async def run_info(self, *, with_summary: bool = False) -> RunInfo:
        """Return state, components, waits and evaluations of the run; `with_summary` adds a summary in sentences."""
        fields = await self.run_state.read_fields()
        components, waits = await self.components.read()
        evals, best = await self.evaluations.all_and_best()
        note = self._view_of or absent_trainer(
            fields.state,
            fields.step,
            components,
            had_trainer=fields.lineage > 0,
            watched_s=time.monotonic() - self._began_s,
        )
        info = RunInfo(
            run=self.context.run,
            state=fields.state,
            state_reason=fields.reason,
            note=note,
            read_only=self._view_of is not None,
            loss=self.recovery.loss,
            num_lost_changes=fields.num_lost_changes,
            last_change=fields.change,
            step=fields.step,
            num_steps=self.context.recipe.trainer.num_steps,
            max_policy_age_steps=self.context.recipe.buffer.max_policy_age_steps,
            lineage=fields.lineage,
            parents={lineage: str(parent) for lineage, parent in self.lineages.tree.parents.items()},
            latest_version=fields.latest_version,
            sampling_version=fields.sampling_version,
            checkpoint=fields.checkpoint,
            checkpoint_key=fields.checkpoint_key,
            constants=self.context.recipe.constants,
            num_rollbacks=fields.num_rollbacks,
            rollback=fields.rollback,
            components=components,
            waits=waits,
            evals=evals,
            best=best,
            origin=await self.snapshots.origin(),
            searchers=await self.scaling.searchers(fields.state, components),
        )
        if not with_summary:
            return info
        # at other temperatures than the policy's the effective sample size says nothing of old data
        hidden = {"ess"} if self.context.recipe.samples_at_other_temperatures else set[str]()
        names = ",".join(name for name in CURVE_NAMES if name not in hidden)
        curves = await self.curves.read(names=names, max_points=NUM_POINTS)
        said = summarise(info, await self.stats.read(), curves, self.context.recipe)
        return info.model_copy(update={"summary": said})

    def _component(self) -> ComponentInfo:
        """Return this service itself as a component."""
        problem = self._not_ready or self._problem
        state = (
            "starting" if self._not_ready else "refusing" if problem else "read-only" if self._view_of else "serving"
        )
        # a problem is more urgent to see than a save
        if self.snapshots.is_saving and problem is None:
            state = "saving"
        return ComponentInfo(
            component_id="buffer",
            kind="buffer",
            state=state,
            version=None,
            alive=True,
            heartbeat_age_s=0.0,
            gauges=idle_cores(self.context.recipe),
            wait=self.components.held_wait(),
            note=problem,
        )

    async def _reread(self) -> None:
        """Read prompts, lineages and settings again, and forget log positions, after Redis has lost log entries."""
        await self.catalog.reload()
        await self.lineages.load()
        await self.settings.load()
        # what is kept by log position: after a loss, Redis gives positions to other rollouts
        self.scorer.forget_positions()
        self.rescore_jobs.forget()

    async def _keep_up(self) -> None:
        problem = None
        while not self._ending.is_set():
            try:
                await self.context.durability.check()
                if self.writer.refuse_reason != problem:
                    problem = self.writer.refuse_reason
                    log.warning("pushes_refused" if problem else "pushes_taken", problem=problem)
                if self.context.durability.broken is None:
                    await self.context.epoch.check()
                    await self.evictor.enforce()
                    # a save reads the log behind a position, which compaction would cut
                    if not self.snapshots.is_saving:
                        await self.compactor.keep_up(self.view.index)
                    await self.stats.sample()
                    await self.run_state.read()  # raises what would refuse leases and draws, so that /readyz says so
                    self._upkeep_problem = None
            except DAMAGE_ERRORS as error:  # a damaged value: the upkeep continues once Redis is restored
                failure = f"the background upkeep has failed ({error!r}), and is tried again; the log says why"
                if failure != self._upkeep_problem:  # one traceback, not one per second
                    log.exception("upkeep_failed")
                self._upkeep_problem = failure
            except (RedisError, UnavailableError) as error:
                log.warning("redis_unavailable", error=str(error))
                if self.context.durability.broken is None:  # Redis is well, so something in it cannot be read
                    self._upkeep_problem = str(error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), UPKEEP_S)


def check_redis(recipe: Recipe) -> None:
    """Wait for Redis, then check its durability and the run's storage format and live settings, before any serving.

    Raises:
        ConfigError: Redis could not be reached in time or could lose data, the run is stored in another format, or its
            live settings contradict the recipe.
    """

    async def check() -> None:
        section = recipe.buffer
        durability = DurabilityCheck(redis_access(recipe), bool(section.read_only))
        waiting = not_ready(section.host, section.port, tls=recipe.tls, reason=lambda: durability.late or "starting")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(durability.aclose)
            await durability.check_at_start(on_late=lambda: stack.enter_async_context(waiting))
            await check_format(durability.redis, Keys(recipe.run.name))
            await read_settings(durability.redis, Keys(recipe.run.name), recipe)

    # connections belong to their event loop: these end with it, and the service makes its own
    asyncio.run(check())


def idle_cores(recipe: Recipe) -> dict[str, float]:
    """Return, as a gauge, how many cores of this machine are idle; none, if more searchers would not run on these."""
    section = recipe.searcher
    if recipe.scaling.backend != "local" or (section.engine, section.device) != ("embedded", "cpu"):
        return {}
    return {"idle_cores": max(0.0, min([len(os.sched_getaffinity(0)), *core_limits()]) - os.getloadavg()[0])}

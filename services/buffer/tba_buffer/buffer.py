"""The buffer: all parts, wired together, started and kept level.

start    check Redis and its promise -> prompts, lineages -> index from the log -> ready
upkeep   every UPKEEP_S: check Redis' promise again (it may have been restarted with another), level the index,
         set the gauges. While the promise is not kept, pushes are refused and the service is not ready.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from prometheus_client import CollectorRegistry
from redis.exceptions import RedisError

from tba.api import RunInfo, Stats
from tba.config import Recipe
from tba.errors import ConfigError, UnavailableError
from tba.logs import get_logger
from tba_buffer.batches import Batches
from tba_buffer.components import Components
from tba_buffer.context import Context
from tba_buffer.evals import Evals
from tba_buffer.keys import Keys
from tba_buffer.leases import Leases
from tba_buffer.lineage import Lineages
from tba_buffer.metrics import Metrics
from tba_buffer.prompts import Catalog
from tba_buffer.redis_link import check_at_start, connect, promise_problem
from tba_buffer.rollouts import Rollouts
from tba_buffer.run_state import RunControl
from tba_buffer.scripts import Scripts
from tba_buffer.stats import read_stats
from tba_buffer.view import IndexView

UPKEEP_S = 1.0
STOP_TIMEOUT_S = 5.0
log = get_logger("buffer")


class Buffer:
    """All parts of the buffer service.

    Args:
        recipe: the run.
        registry: for metrics.

    Raises:
        ConfigError: settings that could never work together.
    """

    def __init__(self, recipe: Recipe, registry: CollectorRegistry) -> None:
        if recipe.sampling.min_size_to_sample > recipe.buffer.max_rollouts:
            raise ConfigError(
                f"sampling.min_size_to_sample {recipe.sampling.min_size_to_sample} is above buffer.max_rollouts "
                f"{recipe.buffer.max_rollouts}: no batch could ever be drawn"
            )
        redis = connect(recipe.buffer.redis_url)
        self.context = Context(recipe=recipe, redis=redis, keys=Keys(recipe.run.name), scripts=Scripts(redis))
        self.metrics = Metrics(registry)
        self.view = IndexView(self.context)
        self.catalog = Catalog(self.context)
        self.lineages = Lineages(self.context)
        self.run = RunControl(self.context)
        self.components = Components(self.context)
        self.evals = Evals(self.context, self.catalog)
        self.rollouts = Rollouts(self.context, self.catalog, self.lineages)
        self.leases = Leases(self.context, catalog=self.catalog, evals=self.evals, run=self.run, view=self.view)
        self.batches = Batches(
            self.context, catalog=self.catalog, run=self.run, view=self.view, components=self.components
        )
        self._upkeep: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._not_ready: str | None = "starting: reading the log from Redis"

    async def start(self) -> None:
        """Read everything from Redis and begin the upkeep.

        Raises:
            ConfigError: Redis cannot be reached, or could lose what it acknowledges.
            UnavailableError: Redis went away meanwhile.
        """
        await self.catalog.load()
        await self.lineages.load()
        index = await self.view.level()
        log.info("index_built", num_rollouts=index.num_live, log_position=index.position)
        self._not_ready = None
        self._upkeep = asyncio.create_task(self._keep_up(), name="upkeep")

    async def stop(self) -> None:
        """End the upkeep and close the connections."""
        self._ending.set()  # not cancel: a command that redis-py has begun may swallow the cancellation
        if self._upkeep is not None:
            await asyncio.wait([self._upkeep], timeout=STOP_TIMEOUT_S)
        await self.context.redis.aclose()

    async def ready(self) -> str | None:
        """None when requests can be served, else a sentence why not."""
        if self._not_ready is not None:
            return self._not_ready
        try:
            await self.context.redis.ping()
        except RedisError as error:
            return f"Redis does not answer ({type(error).__name__})"
        return self.rollouts.refuse_reason

    async def stats(self) -> Stats:
        """Counts of the run.

        Raises:
            UnavailableError: Redis did not answer.
        """
        return await read_stats(self.context, self.catalog, self.view)

    async def run_info(self) -> RunInfo:
        """The run, its components, waits and evaluations.

        Raises:
            UnavailableError: Redis did not answer.
        """
        fields = await self.run.read()
        components, waits = await self.components.read()
        return RunInfo(
            run=self.context.run,
            state=fields.state,
            state_reason=fields.reason,
            step=fields.step,
            lineage=fields.lineage,
            parents={lineage: str(parent) for lineage, parent in self.lineages.tree.parents.items()},
            latest_version=fields.latest_version,
            checkpoint=fields.checkpoint,
            checkpoint_key=fields.checkpoint_key,
            components=components,
            waits=waits,
            evals=await self.evals.all(),
        )

    async def _keep_up(self) -> None:
        while not self._ending.is_set():
            try:
                problem = await promise_problem(self.context.redis)
                if problem != self.rollouts.refuse_reason:
                    log.warning("redis_promise", problem=problem)
                self.rollouts.refuse_reason = problem
                fields = await self.run.read()
                self.metrics.level(await self.stats(), fields.latest_version)
            except (RedisError, UnavailableError) as error:
                log.warning("redis_unavailable", error=str(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), UPKEEP_S)


def check_redis(recipe: Recipe) -> None:
    """Before anything is served: Redis answers and promises to keep what it acknowledges.

    Raises:
        ConfigError: it does not.
    """

    async def check() -> None:
        redis = connect(recipe.buffer.redis_url)
        try:
            await check_at_start(redis, recipe.buffer.redis_url)
        finally:
            await redis.aclose()

    asyncio.run(check())

"""Start of a searcher: first version, engine, loop; and its end on SIGTERM, or when the run is over, unless it is to
wait for a trainer that goes on with the run."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tba.api import LeaseReply, LeaseRequest, LeaseReturn
from tba.clients import BufferClient, RewardClient
from tba.config import Recipe
from tba.errors import ConfigError, DigestError, MalformedError, ObjectNotFoundError, StoreUnavailableError, TbaError
from tba.logs import get_logger
from tba.model_folder import check_embedding_model
from tba.store import open_store
from tba.threads import in_thread
from tba.tokens import client_token
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba_searcher.delivery import Delivery
from tba_searcher.diversity import Embedder
from tba_searcher.engines.base import EngineCheckError, ReferenceRefusedError
from tba_searcher.engines.factory import build_engine
from tba_searcher.evaluating import Measures
from tba_searcher.loop import BEAT_S, TICK_S, SearcherLoop
from tba_searcher.pulling import Pulled, PulledVersions, refusal
from tba_searcher.seeds import engine_seed, new_searcher_id
from tba_searcher.status import Status
from tba_searcher.text import open_codec
from tba_searcher.visits import Backlog
from tba_searcher.waits import Waits, patiently

if TYPE_CHECKING:
    from tba_searcher.reference import StartingModel

CLIENT_RETRY_S = 1.0
CLIENT_TIMEOUT_S = 15.0
IDLE_S = 2.0
"""How often an idle searcher asks whether the run goes on."""
OVER = ("done", "failed")
REWARD_SLACK_S = 5.0
"""Beyond the deadline that the reward service has for a request: it is the one that gives up."""
T = TypeVar("T")
log = get_logger("service")


def run_searcher(recipe: Recipe) -> None:
    """Run one searcher until the run is over or it is told to stop.

    Raises:
        TbaError: it cannot start, or a service stayed away beyond its deadline.
    """
    if recipe.searcher.engine != "simulated" or recipe.searchers_hold_start:
        prepare_torch(recipe)
    check_embedding_model(recipe.eval.embedding_model)
    with tempfile.TemporaryDirectory(prefix="tba-searcher-", ignore_cleanup_errors=True) as folder:
        asyncio.run(_run_until_told(recipe, Path(folder)))


async def _run_until_told(recipe: Recipe, folder: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    searcher_id = os.environ.get("TBA_SEARCHER_ID") or new_searcher_id()
    await Searcher(recipe, folder, searcher_id=searcher_id, links=Links.to_services(recipe), stop=stop).run()


def prepare_torch(recipe: Recipe) -> None:
    """Threads of torch, and its device.

    Raises:
        ConfigError: the device cannot be used.
    """
    import torch

    torch.set_num_threads(recipe.searcher.torch_num_threads)
    check_device(recipe.searcher.device)


def check_device(device: str) -> None:
    """Try the engine's device before anything is asked of other services.

    Raises:
        ConfigError: torch has no such device, or this build of torch or this machine cannot use it.
    """
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"searcher.device {device!r} cannot be used: {first_line}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The clients of one searcher."""

    buffer: BufferClient
    """Retries for a moment only; waiting is done by the searcher, under a name."""
    beats: BufferClient
    """Another client of the buffer, so that neither a heartbeat nor a renewal waits behind a retry."""
    reward: RewardClient

    @classmethod
    def to_services(cls, recipe: Recipe) -> Links:
        """To the services that the recipe names.

        Raises:
            ConfigError: the tokens file cannot be used.
        """
        token, ca_file = client_token(recipe.auth.tokens_file, "searcher"), recipe.tls.ca_file
        patience = {"retry_s": CLIENT_RETRY_S, "timeout_s": CLIENT_TIMEOUT_S}
        return cls(
            buffer=BufferClient(recipe.buffer_url, token=token, ca_file=ca_file, **patience),
            beats=BufferClient(recipe.buffer_url, token=token, ca_file=ca_file, retry_s=0, timeout_s=5),
            reward=RewardClient(
                recipe.reward_url,
                token=token,
                ca_file=ca_file,
                retry_s=CLIENT_RETRY_S,
                timeout_s=recipe.reward.request_deadline_s + REWARD_SLACK_S,
            ),
        )


class Searcher:
    """One searcher from its start to its end; a process has one of its own, a simulated fleet many in one event loop.

    Args:
        folder: weights are pulled into it.
        stop: set when it is told to drain and end.
        tick_s: of its loop.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        searcher_id: str,
        links: Links,
        stop: asyncio.Event,
        tick_s: float = TICK_S,
    ) -> None:
        self._recipe, self._stop, self._tick_s = recipe, stop, tick_s
        self._waits = Waits()
        self._status = Status(searcher_id=searcher_id, run=recipe.run.name, waits=self._waits)
        self._buffer, self._beats, self._reward = links.buffer, links.beats, links.reward
        self._versions, self._num_starts = WeightVersions(open_store(recipe.store), recipe.run.name), 1
        self._folder = folder / "start-1"
        self._pulled = PulledVersions(self._versions, self._folder)
        self._is_looking = False
        """A lease is asked for or given back."""

    @property
    def status(self) -> Status:
        """What it does now."""
        return self._status

    async def run(self) -> None:
        """Start, run, stop; where `searcher.when_over` is "wait", again as often as the run goes on after its end.

        Raises:
            TbaError: it cannot start, or a service stayed away beyond its deadline.
        """
        log.info("searcher starts", searcher_id=self._status.searcher_id, buffer=self._recipe.buffer_url)
        while True:
            loop = await self._unless_stopped(self._start())
            if loop is not None:
                await loop.run()
            if self._stop.is_set() or self._recipe.searcher.when_over == "exit":
                break
            loop = None  # the model goes with it
            self._let_go()
            log.info("searcher is idle", searcher_id=self._status.searcher_id)
            await self._unless_stopped(self._until_the_run_goes_on())
            if self._stop.is_set():
                break
            log.info("the run goes on", searcher_id=self._status.searcher_id)
            self._status.begin_anew("starting")
        log.info("searcher ends", searcher_id=self._status.searcher_id)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, with heartbeats meanwhile; None when the searcher is told to stop before."""
        task = asyncio.create_task(work)
        beats, stop = asyncio.create_task(self._beat_while_starting()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                return await task
            await self._until_looked(task)
            if task.done() and (error := task.exception()) is not None:
                log.warning("stopped while it started or was idle", detail=str(error))
            return task.result() if task.done() and task.exception() is None else None
        finally:
            for other in (task, beats, stop):
                other.cancel()

    async def _until_looked(self, task: asyncio.Task[Any]) -> None:
        """A lease that is granted while the searcher is told to stop goes back first; within `searcher.drain_s`."""
        until = time.monotonic() + self._recipe.searcher.drain_s
        while self._is_looking and not task.done():
            if time.monotonic() > until:
                log.warning("lease request not answered; what it was granted expires", detail="the drain is over")
                return
            await asyncio.sleep(self._tick_s)

    def _let_go(self) -> None:
        """Nothing of the run that is over is kept: neither weights nor files, only which versions are damaged."""
        self._status.begin_anew("idle")
        before, old = self._pulled, self._folder
        self._num_starts += 1
        # a folder of its own: a pull that was given up may still write into the old one
        self._folder = old.with_name(f"start-{self._num_starts}")
        self._pulled = PulledVersions(self._versions, self._folder)
        self._pulled.inherit(before)
        shutil.rmtree(old, ignore_errors=True)
        gc.collect()

    async def _start(self) -> SearcherLoop | None:
        """Wait for the first version that passes its checks; None when the run is over before."""
        while True:
            version = await self._first_version()
            if version is None:
                return None
            try:
                pulled, folder = await in_thread(lambda version=version: self._pulled.fetch_all(version))
                self._waits.end("pulling")
                return await in_thread(lambda pulled=pulled, folder=folder: self._build(pulled, folder))
            except (DigestError, MalformedError, EngineCheckError) as error:
                self._waits.end("pulling")
                refused = START if isinstance(error, ReferenceRefusedError) else version
                retry_in_s = self._pulled.refuse(refused)
                self._status.counts["refused_versions"] += 1
                log.error("version refused", version=str(refused), reason=str(error), retry_in_s=retry_in_s)
            except (StoreUnavailableError, ObjectNotFoundError) as error:
                if self._waits.begin("pulling", "object-store", self._recipe.searcher.retry_s) <= 0:
                    raise
                log.warning("version not pulled", version=str(version), detail=str(error))
                await asyncio.sleep(1.0)

    async def _first_version(self) -> PolicyVersion | None:
        """The newest version, once neither it nor the reference is refused; None when the run is over."""
        retry_s, num_retries = self._recipe.searcher.retry_s, None
        while True:
            reply = await self._look()
            if num_retries is not None and reply.num_version_retries > num_retries:
                self._pulled.try_again()
            num_retries = reply.num_version_retries
            if reply.run_state in OVER:
                log.info("run is over", run_state=reply.run_state)
                return None
            version = None if reply.latest_version is None else PolicyVersion.parse(reply.latest_version)
            needed = {version, START} if self._recipe.searchers_hold_start else {version}
            if version is not None and not needed & self._pulled.refused:
                self._waits.end("start")
                return version
            if self._waits.begin("start", "no-version", retry_s) <= 0:
                log.warning("wait renewed", wait="no-version", deadline_s=retry_s)
                self._waits.end("start")
            await asyncio.sleep(max(reply.retry_after_s, 0.2))

    async def _look(self) -> LeaseReply:
        """Newest version and state of the run, as a lease reply names them; leases that come along are given back."""
        request = LeaseRequest(searcher_id=self._status.searcher_id, max_leases=1)
        self._is_looking = True
        try:
            reply = await self._ask(lambda: self._buffer.lease(request))
            if reply.leases:
                lease_ids = [lease.lease_id for lease in reply.leases]
                back = LeaseReturn(searcher_id=self._status.searcher_id, lease_ids=lease_ids)
                await self._ask(lambda: self._buffer.return_leases(back))
        finally:
            self._is_looking = False
        return reply

    async def _until_the_run_goes_on(self) -> None:
        """Wait, without a model, for a trainer that goes on with the run."""
        while True:
            reply = await self._look()
            if reply.run_state not in OVER:
                self._waits.end("start")
                return
            # the buffer is well, so the wait is renewed at its deadline; for days, perhaps, so that is not logged
            if self._waits.begin("start", f"run-{reply.run_state}", self._recipe.searcher.retry_s) <= 0:
                self._waits.end("start")
            await asyncio.sleep(IDLE_S)

    async def _ask(self, call: Callable[[], T]) -> T:
        return await patiently(
            call,
            waits=self._waits,
            owner="leasing",
            service="buffer",
            deadline_s=self._recipe.searcher.retry_s,
            ends=self._stop.is_set,
        )

    def _build(self, pulled: Pulled, folder: Path) -> SearcherLoop:
        """Engine and loop around one version (blocking: loads the model)."""
        recipe, settings = self._recipe, self._recipe.searcher
        reference = self._reference()
        seed = engine_seed(recipe.run.seed, self._status.searcher_id)
        log.info("engine starts", engine=settings.engine, version=str(pulled.version))
        engine = build_engine(recipe, folder, pulled.version, pulled.manifest, seed=seed)
        if (refused := refusal(engine, pulled.manifest)) is not None:
            engine.close()  # the next version's engine needs the memory
            raise refused
        codec = open_codec(recipe, folder)
        eos_ids = tuple(sorted({*engine.default_eos_ids, *codec.eos_ids}))
        log.info("engine ready", version=str(pulled.version), eos_ids=eos_ids, num_slots=settings.num_slots)
        self._status.counts["weight_loads"] += 1
        self._status.version, self._status.state = pulled.version, "running"
        embedder = None if recipe.eval.embedding_model is None else Embedder(recipe.eval.embedding_model)
        carried = recipe.objective.reference_placement == "searcher"
        delivery = Delivery(
            recipe,
            buffer=self._buffer,
            reward=self._reward,
            codec=codec,
            measures=Measures(
                reference_sums=reference.sums_of_prompt if reference and recipe.eval.kl_to_reference else None,
                embedder=embedder,
            ),
            reference=reference if carried else None,
            status=self._status,
        )
        return SearcherLoop(
            recipe,
            engine=engine,
            current=pulled,
            pulled=self._pulled,
            codec=codec,
            backlog=Backlog(settings, run_seed=recipe.run.seed, eos_ids=eos_ids),
            buffer=self._buffer,
            beats=self._beats,
            delivery=delivery,
            status=self._status,
            stop=self._stop,
            tick_s=self._tick_s,
        )

    def _reference(self) -> StartingModel | None:
        """The starting model, where rollouts or evaluations need its log-probs."""
        recipe = self._recipe
        if not recipe.searchers_hold_start:
            return None
        from tba_searcher.reference import load_starting_model

        reference = load_starting_model(
            self._versions,
            self._folder,
            asked_by=recipe.why_searchers_hold_start,
            temperature=recipe.model.policy_temperature,
            device=recipe.searcher.device,
            trust_remote_code=recipe.model.trust_remote_code,
        )
        log.info("reference ready", version=str(START))
        return reference

    async def _beat_while_starting(self) -> None:
        while True:
            try:
                beat = self._status.beat()
                await in_thread(lambda beat=beat: self._beats.heartbeat(beat))
                self._status.note_beat(None)
            except TbaError as error:
                self._status.note_beat(error)
            await asyncio.sleep(BEAT_S)

"""Runs a searcher: get a first version, start the engine, run the loop; then exit, or wait for a resumed run."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import importlib
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tba.api import LeaseReply, LeaseRequest, LeaseReturn
from tba.clients import BufferClient, RewardClient
from tba.clients.service_client import START_WAIT_S
from tba.concurrency import in_thread
from tba.config import Recipe
from tba.errors import ConfigError, DigestError, MalformedError, ObjectNotFoundError, StoreUnavailableError
from tba.logs import get_logger
from tba.model_folders import check_embedding_model
from tba.store import open_store
from tba.temporary_folders import temporary_folder
from tba.tokens import client_token
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion, NodeCache, WeightVersions
from tba_searcher.engines.engine import EngineCheckError, ReferenceRefusedError
from tba_searcher.engines.factory import build_engine
from tba_searcher.engines.tokenizer import TextCodec, open_codec
from tba_searcher.engines.weight_check import verification_error
from tba_searcher.episodes.runner import EpisodeRunner
from tba_searcher.generation.delivery import Delivery
from tba_searcher.generation.evaluation_results import Embedder
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.generation.version_pulls import WeightLoader
from tba_searcher.generation.visits import WorkQueue
from tba_searcher.loop import LEASES_EXPIRE, TICK_S, SearcherLoop
from tba_searcher.waits import RETRY_S, WaitRegistry, retry_until

CLIENT_RETRY_S = 1.0
CLIENT_TIMEOUT_S = 15.0
IDLE_S = 2.0
"""How often an idle searcher asks whether the run has resumed."""
RUN_OVER = ("done", "failed")
REWARD_SLACK_S = 5.0
"""Added to the deadline of the reward service, so that the service gives up first and its answer has the reason."""
T = TypeVar("T")
log = get_logger("service")


def run_searcher(recipe: Recipe) -> None:
    """Run one searcher until the run is over, or SIGTERM or SIGINT."""
    if recipe.searcher.engine != "simulated" or recipe.searchers_hold_start:
        check_device(recipe.searcher.device)
    check_embedding_model(recipe.eval.embedding_model)
    # a killed searcher leaves gigabytes, which the next one on this machine deletes
    with temporary_folder("tba-searcher-") as folder:
        asyncio.run(_run_until_told(recipe, folder))


async def _run_until_told(recipe: Recipe, folder: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    new_id = f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(3)}"
    searcher_id = os.environ.get("TBA_SEARCHER_ID") or new_id
    await Searcher(recipe, folder, searcher_id=searcher_id, clients=Clients.from_recipe(recipe), stop=stop).run()


def check_device(device: str) -> None:
    """Raise ConfigError if torch cannot use the device; called before any request to another service."""
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"searcher.device {device!r} cannot be used: {first_line}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The clients of one searcher."""

    buffer: BufferClient
    """Retries only briefly; the searcher itself retries longer, with a named wait."""
    heartbeats: BufferClient
    """Another client of the buffer, so that heartbeats and renewals never wait behind a retry."""
    reward: RewardClient

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Clients:
        """Make clients of the services that the recipe names."""
        token, ca_file = client_token(recipe.auth.tokens_file, "searcher"), recipe.tls.ca_file
        timeouts = {"retry_s": CLIENT_RETRY_S, "timeout_s": CLIENT_TIMEOUT_S}
        return cls(
            buffer=BufferClient(recipe.buffer_url, token=token, ca_file=ca_file, **timeouts),
            heartbeats=BufferClient(recipe.buffer_url, token=token, ca_file=ca_file, retry_s=0, timeout_s=5),
            reward=RewardClient(
                recipe.reward_url,
                token=token,
                ca_file=ca_file,
                retry_s=CLIENT_RETRY_S,
                timeout_s=recipe.reward.request_deadline_s + REWARD_SLACK_S,
            ),
        )


class Searcher:
    """One searcher from start to end: one per process, except in benchmarks that run many in one event loop.

    Args:
        folder: where weights are downloaded to.
        stop: when set, the searcher drains and ends.
        tick_s: see `SearcherLoop`.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        searcher_id: str,
        clients: Clients,
        stop: asyncio.Event,
        tick_s: float = TICK_S,
    ) -> None:
        self._recipe, self._stop, self._tick_s = recipe, stop, tick_s
        self._waits = WaitRegistry()
        self.status = SearcherStatus(searcher_id=searcher_id, run=recipe.run.name, waits=self._waits)
        self._buffer, self._heartbeats, self._reward = clients.buffer, clients.heartbeats, clients.reward
        place = recipe.store.cache_folder
        cache = None
        if place is not None:
            cache = NodeCache(Path(place), max_bytes=recipe.store.cache_bytes, on_wait=self._note_cache_wait)
        self._versions = WeightVersions(open_store(recipe.store), recipe.run.name, cache=cache)
        self._start_wait_s = START_WAIT_S
        """How long to wait for the buffer's first answer; 0 after it."""
        self._num_starts = 1
        self._folder = folder / "start-1"
        self._loader = WeightLoader(self._versions, self._folder, counts=self.status.counts)
        self._is_asking = False
        """A request for the run's state is in progress: it may be granted a lease, which must be returned."""

    def _note_cache_wait(self, deadline_s: float | None) -> None:
        """Begin the wait for another searcher of this machine that is making the version; None ends the wait."""
        if deadline_s is None:
            self._waits.end("cache")
        else:
            self._waits.begin("cache", "weight-cache", deadline_s)

    async def run(self) -> None:
        """Start, run, stop; with `searcher.on_run_end` = "wait", start again each time the run is resumed.

        Raises:
            TbaError: it cannot start, or a service stayed away beyond its deadline.
        """
        log.info("searcher starts", searcher_id=self.status.searcher_id, buffer=self._recipe.buffer_url)
        while True:
            loop = await self._run_unless_stopped(self._start())
            if loop is not None:
                # the modules of torch and transformers stay: to search them for cycles takes 0.15 s each time
                gc.freeze()
                await loop.run()
            if self._stop.is_set() or self._recipe.searcher.on_run_end == "exit":
                break
            loop = None  # the last reference to the model
            self.status.reset("idle")
            old_folder, refusals = self._folder, self._loader.refusals
            self._num_starts += 1
            # a new folder: an abandoned download may still write into the old one
            self._folder = old_folder.with_name(f"start-{self._num_starts}")
            counts = self.status.counts
            self._loader = WeightLoader(self._versions, self._folder, counts=counts, refusals=refusals)
            shutil.rmtree(old_folder, ignore_errors=True)
            gc.unfreeze()
            gc.collect()  # reference cycles would keep the model's memory
            log.info("searcher is idle", searcher_id=self.status.searcher_id)
            await self._run_unless_stopped(self._until_run_resumes())
            if self._stop.is_set():
                break
            log.info("run resumed", searcher_id=self.status.searcher_id)
            self.status.reset("starting")
        log.info("searcher ends", searcher_id=self.status.searcher_id)

    async def _run_unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Await `work` while sending heartbeats, and return its result; None if the searcher is stopped first."""
        task = asyncio.create_task(work)
        heartbeats = asyncio.create_task(self.status.send_forever(self._heartbeats))
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if not self._stop.is_set():
                return await task
            # a call in a thread cannot be cancelled: the buffer may grant its lease after the stop, which must go back
            until = time.monotonic() + self._recipe.searcher.drain_s
            while self._is_asking and not task.done():
                if time.monotonic() > until:
                    log.warning(LEASES_EXPIRE, detail="the drain is over")
                    break
                await asyncio.sleep(self._tick_s)
            if task.done() and (error := task.exception()) is not None:
                log.warning("stopped while it started or was idle", detail=str(error))
            return task.result() if task.done() and task.exception() is None else None
        finally:
            for other in (task, heartbeats, stop):
                other.cancel()

    async def _start(self) -> SearcherLoop | None:
        """Wait for a version that passes its checks and return a loop with it; None if the run is over first."""
        # while the trainer still starts: imported after its first version, it would delay the first batch by seconds
        if self._recipe.searcher.engine == "embedded":  # vLLM's environment depends on the model, and the rest is light
            await in_thread(lambda: importlib.import_module("tba_searcher.engines.torch.engine"))
        while True:
            version = await self._first_version()
            if version is None:
                return None
            try:
                weights, folder = await in_thread(lambda version=version: self._loader.download_model(version))
                self._waits.end("pulling")
                loop = await in_thread(lambda weights=weights, folder=folder: self._build(weights, folder))
                if loop.episodes is not None:
                    await loop.episodes.start()
                return loop
            except (DigestError, MalformedError, EngineCheckError) as error:
                self._waits.end("pulling")
                self._loader.refuse(START if isinstance(error, ReferenceRefusedError) else version, error)
            except (StoreUnavailableError, ObjectNotFoundError) as error:
                if self._waits.begin("pulling", "object-store", RETRY_S) <= 0:
                    raise
                log.warning("version not pulled", version=str(version), detail=str(error))
                await asyncio.sleep(1.0)

    async def _first_version(self) -> PolicyVersion | None:
        """Return the newest version once neither it nor its reference is refused; None if the run is over first."""
        while True:
            reply = await self._ask_state()
            if reply.run_state in RUN_OVER:
                log.info("run is over", run_state=reply.run_state)
                return None
            version = None if reply.latest_version is None else PolicyVersion.parse(reply.latest_version)
            # a reference that is refused makes the version useless as well
            needed = {version, START} if self._recipe.searchers_hold_start else {version}
            if version is not None and not needed & self._loader.refused:
                self._waits.end("start")
                return version
            self._waits.renew("start", "no-version")
            # a buffer that answers at once must not be asked without a pause
            await asyncio.sleep(max(reply.retry_after_s, 0.2))

    async def _ask_state(self) -> LeaseReply:
        """Return a lease reply with the newest version and the run's state; give its leases back at once."""
        request = LeaseRequest(searcher_id=self.status.searcher_id, max_leases=1)
        self._is_asking = True
        try:
            reply = await self._ask(lambda: self._buffer.lease(request))
            # the searcher has no engine yet, and another one could sample them now
            if reply.leases:
                lease_ids = [lease.lease_id for lease in reply.leases]
                back = LeaseReturn(searcher_id=self.status.searcher_id, lease_ids=lease_ids)
                await self._ask(lambda: self._buffer.return_leases(back))
        finally:
            self._is_asking = False
        return reply

    async def _until_run_resumes(self) -> None:
        """Wait, without a model, for a trainer that resumes the run."""
        while True:
            reply = await self._ask_state()
            if reply.run_state not in RUN_OVER:
                self._waits.end("start")
                return
            # the buffer is well, so the wait is renewed at its deadline; not logged, as it may last for days
            if self._waits.begin("start", f"run-{reply.run_state}", RETRY_S) <= 0:
                self._waits.end("start")
            await asyncio.sleep(IDLE_S)

    async def _ask(self, call: Callable[[], T]) -> T:
        reply = await retry_until(
            call,
            waits=self._waits,
            owner="leasing",
            service="buffer",
            deadline_s=max(RETRY_S, self._start_wait_s),
            should_stop=self._stop.is_set,
        )
        self._start_wait_s = 0.0
        return reply

    def _build(self, weights: LocalVersion, folder: Path) -> SearcherLoop:
        """Load and check one version, and build the engine and the loop with it. Blocks while the model loads."""
        recipe, settings = self._recipe, self._recipe.searcher
        reference = None
        if recipe.searchers_hold_start:
            from tba_searcher.engines.torch.reference_logprobs import load_starting_model

            reference = load_starting_model(
                self._versions,
                self._folder,
                held=[each for each in (weights, weights.base) if each is not None],
                temperature=recipe.model.policy_temperature,
                device=settings.device,
                trust_remote_code=recipe.model.trust_remote_code,
            )
            log.info("reference ready", version=str(START))
        seed = engine_seed(recipe.run.seed, self.status.searcher_id)
        log.info("engine starts", engine=settings.engine, version=str(weights.version))
        engine = build_engine(recipe, folder, weights.version, weights.manifest, seed=seed)
        # the same checks as for every later version: a first version may be damaged too
        if (error := verification_error(engine, weights.manifest)) is not None:
            engine.close()  # the engine of the next version needs the memory
            raise error
        codec = open_codec(recipe, folder)
        # the model and its tokenizer may name different ones, and each of them ends a response
        eos_ids = tuple(sorted({*engine.default_eos_ids, *codec.eos_ids}))
        log.info("engine ready", version=str(weights.version), eos_ids=eos_ids, num_slots=settings.num_slots)
        self.status.counts["weight_loads"] += 1
        self.status.state = "running"
        delivery = Delivery(
            recipe,
            buffer=self._buffer,
            reward=self._reward,
            codec=codec,
            embedder=None if recipe.eval.embedding_model is None else Embedder(recipe.eval.embedding_model),
            reference=reference,
            status=self.status,
        )
        episodes = None
        if recipe.environments:
            assert isinstance(codec, TextCodec)
            episodes = EpisodeRunner(recipe, codec=codec, counts=self.status.counts, waits=self._waits)
        return SearcherLoop(
            recipe,
            engine=engine,
            current=weights,
            loader=self._loader,
            codec=codec,
            queue=WorkQueue(settings, run_seed=recipe.run.seed, eos_ids=eos_ids, episodes=episodes),
            buffer=self._buffer,
            heartbeats=self._heartbeats,
            delivery=delivery,
            status=self.status,
            stop=self._stop,
            tick_s=self._tick_s,
        )


def engine_seed(run_seed: int, searcher_id: str) -> int:
    """Return a seed in [0, 2^63) from the run's seed, the searcher's id and 16 fresh random bytes: it never repeats."""
    # random bytes: two searchers, or one started twice, must never sample the same completions
    digest = hashlib.sha256(f"{run_seed}|{searcher_id}|".encode() + os.urandom(16)).digest()
    return int.from_bytes(digest[:8], "big") >> 1

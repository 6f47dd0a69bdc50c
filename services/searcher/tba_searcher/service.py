"""Start of a searcher: first version, engine, loop; and its end on SIGTERM or when the run is over."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from tba.api import LeaseRequest, LeaseReturn
from tba.clients import BufferClient, RewardClient
from tba.config import Recipe
from tba.errors import ConfigError, DigestError, MalformedError, ObjectNotFoundError, StoreUnavailableError, TbaError
from tba.logs import get_logger
from tba.model_folder import check_embedding_model
from tba.store import open_store
from tba.threads import in_thread
from tba.tokens import role_token
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba_searcher.delivery import Delivery
from tba_searcher.diversity import Embedder
from tba_searcher.engines.embedded import EmbeddedEngine, EmbeddedSettings
from tba_searcher.evaluating import Measures
from tba_searcher.loop import BEAT_S, SearcherLoop
from tba_searcher.pulling import Pulled, PulledVersions, check_loaded
from tba_searcher.reference import StartingModel, load_starting_model
from tba_searcher.seeds import engine_seed, new_searcher_id
from tba_searcher.status import Status
from tba_searcher.text import TextCodec
from tba_searcher.visits import Backlog
from tba_searcher.waits import Waits, patiently

CLIENT_RETRY_S = 1.0
CLIENT_TIMEOUT_S = 15.0
T = TypeVar("T")
log = get_logger("service")


def run_searcher(recipe: Recipe) -> None:
    """Run one searcher until the run is over or it is told to stop.

    Raises:
        TbaError: it cannot start, or a service stayed away beyond its deadline.
    """
    torch.set_num_threads(recipe.searcher.torch_num_threads)
    check_device(recipe.searcher.device)
    check_embedding_model(recipe.eval.embedding_model)
    with tempfile.TemporaryDirectory(prefix="tba-searcher-", ignore_cleanup_errors=True) as folder:
        asyncio.run(_Service(recipe, Path(folder)).run())


def check_device(device: str) -> None:
    """Try the engine's device before anything is asked of other services.

    Raises:
        ConfigError: torch has no such device, or this build of torch or this machine cannot use it.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"searcher.device {device!r} cannot be used: {first_line}") from None


class _Service:
    """The parts of one searcher process."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        token = role_token(recipe.auth.tokens_file, "searcher")
        self._recipe = recipe
        self._stop = asyncio.Event()
        self._waits = Waits()
        searcher_id = os.environ.get("TBA_SEARCHER_ID") or new_searcher_id()
        self._status = Status(searcher_id=searcher_id, run=recipe.run.name, waits=self._waits)
        patience = {"retry_s": CLIENT_RETRY_S, "timeout_s": CLIENT_TIMEOUT_S}
        self._buffer = BufferClient(recipe.buffer_url, token=token, **patience)
        self._beats = BufferClient(recipe.buffer_url, token=token, retry_s=0, timeout_s=5)
        self._reward = RewardClient(recipe.reward_url, token=token, **patience)
        self._versions, self._folder = WeightVersions(open_store(recipe.store), recipe.run.name), folder
        self._pulled = PulledVersions(self._versions, folder)

    async def run(self) -> None:
        """Start, run, stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        log.info("searcher starts", searcher_id=self._status.searcher_id, buffer=self._recipe.buffer_url)
        start = asyncio.create_task(self._start())
        beats, stop = asyncio.create_task(self._beat_while_starting()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
            loop = await start if start.done() else None
        finally:
            for task in (start, beats, stop):
                task.cancel()
        if loop is not None:
            await loop.run()
        log.info("searcher ends", searcher_id=self._status.searcher_id)

    async def _start(self) -> SearcherLoop | None:
        """Wait for the first version that passes its checks; None when the run is over before."""
        while True:
            version = await self._first_version()
            if version is None:
                return None
            try:
                pulled, folder = await in_thread(lambda version=version: self._pulled.fetch_all(version))
                return await asyncio.to_thread(self._build, pulled, folder)
            except (DigestError, MalformedError) as error:
                self._pulled.refused.add(version)
                self._status.counts["refused_versions"] += 1
                log.error("version refused", version=str(version), reason=str(error))
            except (StoreUnavailableError, ObjectNotFoundError) as error:
                if self._waits.begin("start", "object-store", self._recipe.searcher.retry_s) <= 0:
                    raise
                log.warning("version not pulled", version=str(version), detail=str(error))
                await asyncio.sleep(1.0)

    async def _first_version(self) -> PolicyVersion | None:
        """The newest version as a lease reply names it; leases that come along are given back at once."""
        retry_s = self._recipe.searcher.retry_s
        while True:
            request = LeaseRequest(searcher_id=self._status.searcher_id, max_leases=1)
            reply = await self._ask(lambda request=request: self._buffer.lease(request))
            if reply.leases:
                back = LeaseReturn(
                    searcher_id=self._status.searcher_id, lease_ids=[lease.lease_id for lease in reply.leases]
                )
                await self._ask(lambda back=back: self._buffer.return_leases(back))
            if reply.run_state in ("done", "failed"):
                log.info("run is over", run_state=reply.run_state)
                return None
            version = None if reply.latest_version is None else PolicyVersion.parse(reply.latest_version)
            if version is not None and version not in self._pulled.refused:
                self._waits.end("start")
                return version
            if self._waits.begin("start", "no-version", retry_s) <= 0:
                log.warning("wait renewed", wait="no-version", deadline_s=retry_s)
                self._waits.end("start")
            await asyncio.sleep(max(reply.retry_after_s, 0.2))

    async def _ask(self, call: Callable[[], T]) -> T:
        return await patiently(
            call, waits=self._waits, owner="leasing", service="buffer", deadline_s=self._recipe.searcher.retry_s
        )

    def _build(self, pulled: Pulled, folder: Path) -> SearcherLoop:
        """Engine and loop around one version (blocking: loads the model)."""
        recipe, settings = self._recipe, self._recipe.searcher
        reference = self._reference()
        engine = EmbeddedEngine(
            folder,
            pulled.version,
            EmbeddedSettings(
                num_slots=settings.num_slots,
                max_prompt_tokens=settings.max_prompt_tokens,
                max_response_tokens=settings.max_response_tokens,
                seed=engine_seed(recipe.run.seed, self._status.searcher_id),
                dtype=pulled.manifest.dtype,
                device=settings.device,
                trust_remote_code=recipe.model.trust_remote_code,
            ),
        )
        check_loaded(engine, pulled.manifest)
        codec = TextCodec(folder, trust_remote_code=recipe.model.trust_remote_code)
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
            backlog=Backlog(max_response_tokens=settings.max_response_tokens, eos_ids=eos_ids),
            buffer=self._buffer,
            beats=self._beats,
            delivery=delivery,
            status=self._status,
            stop=self._stop,
        )

    def _reference(self) -> StartingModel | None:
        """The starting model, where rollouts or evaluations need its log-probs."""
        recipe = self._recipe
        if not recipe.searchers_hold_start:
            return None
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
            except TbaError as error:
                log.debug("heartbeat lost", detail=str(error))
            await asyncio.sleep(BEAT_S)

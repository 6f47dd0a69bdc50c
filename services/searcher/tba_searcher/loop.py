"""The searcher's loop: one event loop, one engine, one crossing point between them (`_engine_task` -> crossing.py).

      buffer                                                                        object store
        | leases                                                                         | versions
   _lease_task --> Backlog --requests--> _engine_task <--newest / pinned version-- _pull_task
                                             | in the engine's thread: swap, submit, steps
                                             v completions
                                          Backlog --complete visits--> Delivery.score_forever --> push_forever
                                                                           | reward service         | buffer
   _beat_task: every second state, version, oldest wait and gauges to the buffer
   Leases.renew_forever: a third into each lease, new deadlines for the visits that are here

 task            waits for                       name of the wait            deadline, and what happens at it
 start           a version that can be used      no-version, object-store    none announced: asks on, renewed; store
                                                                             away: retry_s, then the searcher ends
 _lease_task     room for more visits            (none: the engine is busy)  -
                 rollouts to be pushed           unpushed-rollouts           retry_s, renewed and logged
                 an empty reply of the buffer    as the reply names it       retry_s, renewed and logged
                 a buffer that is away           buffer-unreachable          retry_s, then the searcher ends
 _engine_task    requests or a version           (that of _lease_task)       wakes every 50 ms
                 a turn of over 5 s              engine-turn                 engine_timeout_s, then the engine is dead
 _pull_task      a version to pull               (none)                      -
                 a store that is away            object-store                retry_s, renewed: the old version is used
 scoring, pushing                                see delivery.py; renewing: leases.py
 drain           active rows, scores, pushes,    (state draining)            drain_s in all: until 0.7 of it active rows
                 the answer to a lease request                               until 0.85 scores, then they go unscored
                                                                             (pending), until 0.95 pushes and that
                                                                             answer; then all leases return

Weights change only between two steps. Evaluations pin a version: training visits are not begun while another version
is pinned, active rows finish first, then the pinned version is loaded; when no evaluation is left, the newest one is.

An engine that dies takes nothing with it but what it was decoding: as in a drain, finished rollouts are delivered and
leases returned, then the searcher ends with the reason.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tba.api import MAX_REFUSED_VERSIONS, LeaseReply, LeaseRequest, PushReply
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import BusyError, ObjectNotFoundError, ServiceError, StoreUnavailableError, TbaError, UnavailableError
from tba.logs import get_logger
from tba.threads import in_thread
from tba.versions import PolicyVersion
from tba_searcher.crossing import EngineThread, Turn
from tba_searcher.delivery import Delivery
from tba_searcher.engines.base import Completion, Engine, EngineDiedError, EngineError, Request
from tba_searcher.leases import Leases
from tba_searcher.pulling import Pulled, PulledVersions
from tba_searcher.status import Status
from tba_searcher.text import Codec
from tba_searcher.visits import Backlog, Visit
from tba_searcher.waits import patiently

TICK_S = 0.05
BEAT_S = 1.0
BEAT_TIMEOUT_S = 5.0
MAX_LEASES = 256
PULL_ATTEMPTS = 3
"""Damaged bytes may be a damaged transfer; after this many the version is refused."""
log = get_logger("loop")


class SearcherLoop:
    """Runs until the run is over or `stop` is set and the drain is done.

    Args:
        current: the version that the engine holds.
        buffer: retries for a moment only; waiting is done here, under a name.
        beats: another client, so that neither a heartbeat nor a renewal waits behind a retry.
        stop: set on SIGTERM.
        tick_s: how often tasks that wait for something of this process look again.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        engine: Engine,
        current: Pulled,
        pulled: PulledVersions,
        codec: Codec,
        backlog: Backlog,
        buffer: BufferClient,
        beats: BufferClient,
        delivery: Delivery,
        status: Status,
        stop: asyncio.Event,
        tick_s: float = TICK_S,
    ) -> None:
        self._recipe, self._engine, self._current, self._pulled = recipe, engine, current, pulled
        self._codec, self._backlog, self._buffer, self._beats = codec, backlog, buffer, beats
        self._delivery, self._status, self._stop, self._tick_s = delivery, status, stop, tick_s
        self._leases = Leases(buffer=buffer, renewals=beats, backlog=backlog, delivery=delivery, status=status)
        self._thread = EngineThread(status.waits, timeout_s=recipe.searcher.engine_timeout_s)
        self._died: EngineDiedError | None = None
        self._newest = current.version
        self._over = asyncio.Event()
        self._work = asyncio.Event()
        self._aborts: list[str] = []
        self._num_retries: int | None = None
        """As the last lease reply had it."""
        self._is_turning = False
        self._is_asking = False
        """A request for leases is under way, or what it brought has not been looked at yet."""
        self._too_long: set[str] = set()
        """Ids of prompts that were refused, so that each is logged once."""
        pulled.add(current)
        delivery.on_reply = self.heard

    async def run(self) -> None:
        """Run all tasks; returns when the run is over or the searcher is drained.

        Raises:
            EngineDiedError: the engine cannot go on; what was finished is delivered.
            TbaError: the first error that no task could wait out.
        """
        names = ("_lease_task", "_engine_task", "_pull_task", "_beat_task")
        tasks = [asyncio.create_task(getattr(self, name)(), name=name) for name in names]
        jobs = (self._delivery.score_forever, self._delivery.push_forever, self._leases.renew_forever)
        tasks += [asyncio.create_task(job()) for job in jobs]
        over, stop = asyncio.create_task(self._over.wait()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([*tasks, over, stop], return_when=asyncio.FIRST_COMPLETED)
            _raise_first_error(tasks)
            if not self._over.is_set():
                await self._drain(tasks)
        finally:
            for task in (*tasks, over, stop):
                task.cancel()
            await asyncio.gather(*tasks, over, stop, return_exceptions=True)
            await self._thread.close(self._engine)
        self._status.state = "ended" if self._died is None else "failed"
        await self._beat()
        if self._died is not None:
            raise self._died

    @property
    def _is_ending(self) -> bool:
        return self._stop.is_set() or self._died is not None

    @property
    def _is_busy(self) -> bool:
        """Whether the engine has something to decode, or its last turn has not been looked at yet."""
        return self._died is None and (self._is_turning or self._engine.num_active + self._engine.num_waiting > 0)

    def heard(self, reply: LeaseReply | PushReply) -> None:
        """Every reply of the buffer tells the newest version and the state of the run."""
        if reply.latest_version is not None:
            self._newest = PolicyVersion.parse(reply.latest_version)
        if reply.run_state in ("done", "failed") and not self._over.is_set():
            log.info("run is over", run_state=reply.run_state)
            self._over.set()

    def _heed_operator(self, reply: LeaseReply) -> None:
        """Try refused versions again when an operator has said so since the last reply."""
        if self._num_retries is not None and reply.num_version_retries > self._num_retries:
            again = [str(version) for version in self._pulled.try_again()]
            log.info("refused versions are tried again", versions=again)
        self._num_retries = reply.num_version_retries

    async def _lease_task(self) -> None:
        """Keep three rounds of slots in sight: one being decoded, one in the engine's queue, one here.

        After a reply with evaluations the next request asks for many at once, so that a version is pinned once and
        not again for every few units; training visits that come along beyond what was wanted are returned.
        """
        settings, waits, found_evals = self._recipe.searcher, self._status.waits, False
        while not self._is_ending:
            in_sight = self._backlog.num_unsubmitted + self._engine.num_active + self._engine.num_waiting
            want = math.ceil((3 * settings.num_slots - in_sight) / self._recipe.sampling.rollouts_per_visit)
            if self._status.num_unpushed >= settings.max_unpushed_rollouts:
                self._wait_on("unpushed-rollouts")
                await asyncio.sleep(self._tick_s)
                continue
            most = max(want, settings.num_slots if found_evals else 0)
            if most <= 0:
                waits.end("leases")
                await self._pause(self._tick_s)
                continue
            request = LeaseRequest(
                searcher_id=self._status.searcher_id,
                max_leases=min(most, MAX_LEASES),
                version=str(self._engine.version),
                refused_versions=[str(version) for version in sorted(self._pulled.refused)[-MAX_REFUSED_VERSIONS:]],
            )
            self._is_asking = True
            try:
                reply = await self._ask(request)
                self.heard(reply)
                self._heed_operator(reply)
                found_evals = any(lease.kind != "train" for lease in reply.leases)
                num_kept = await self._accept(reply, max_train=max(want, 0))
            except (BusyError, UnavailableError) as error:  # only while it ends: else they are waited out
                log.warning("lease request not answered; what it was granted expires", detail=str(error))
                return
            finally:
                self._is_asking = False
            if num_kept:
                waits.end("leases")
                self._work.set()
            else:
                if self._backlog.num_unsubmitted + self._engine.num_active == 0:
                    self._wait_on(reply.wait or "leases")
                await self._pause(max(reply.retry_after_s, self._tick_s))

    async def _ask(self, request: LeaseRequest) -> LeaseReply:
        """Ask for leases; when the searcher ends, the call under way is the last."""
        return await patiently(
            lambda: self._buffer.lease(request),
            waits=self._status.waits,
            owner="leasing",
            service="buffer",
            deadline_s=self._recipe.searcher.retry_s,
            ends=lambda: self._is_ending,
        )

    def _wait_on(self, name: str) -> None:
        """The lease task goes on waiting for `name`; the owner is well, so the wait is renewed at its deadline."""
        if self._status.waits.begin("leases", name, self._recipe.searcher.retry_s) <= 0:
            log.warning("wait renewed", wait=name, deadline_s=self._recipe.searcher.retry_s)
            self._status.waits.end("leases")

    async def _accept(self, reply: LeaseReply, *, max_train: int) -> int:
        """Queue evaluations and at most `max_train` visits, return the others, refuse those whose prompts are too long.

        How many it kept.
        """
        longest, too_long = self._recipe.searcher.max_prompt_tokens, []
        returned = [lease.lease_id for lease in reply.leases if lease.kind == "train"][max_train:]
        for lease in reply.leases:
            if lease.lease_id in returned:
                continue
            visit = Visit(
                lease=lease,
                prompt_tokens=self._codec.encode_prompt(lease.prompt.text),
                pinned=None if lease.version is None or lease.kind == "train" else PolicyVersion.parse(lease.version),
            )
            num_tokens = len(visit.prompt_tokens)
            if 1 <= num_tokens <= longest:
                self._backlog.add(visit)
                continue
            self._status.counts["refused_prompts"] += 1
            prompt_id = lease.prompt.prompt_id
            if prompt_id not in self._too_long:
                self._too_long.add(prompt_id)
                log.error("prompt refused", prompt_id=prompt_id, num_tokens=num_tokens, limit_tokens=longest)
            if visit.pinned is None:
                too_long.append(lease.lease_id)
            else:
                self._delivery.put_unknown(visit)
        await self._leases.give_back(returned, refused=too_long)
        return len(reply.leases) - len(returned) - len(too_long)

    async def _engine_task(self) -> None:
        """Decide between steps what the engine does next; cross into its thread; hand out what comes back."""
        while self._died is None:
            turn = Turn(self._next_swap(), self._next_requests(), self._aborts)
            self._aborts = []
            if turn.swap_to is None and not turn.requests and not self._is_busy:
                await self._pause(self._tick_s)
                continue
            self._is_turning = True
            result = await self._thread.turn(self._engine, turn, self._current)
            if result.died is not None:
                log.error("engine died", reason=str(result.died))
                self._died = result.died
            elif turn.swap_to is not None:
                self._swapped(turn.swap_to, result.swap_refused, result.swap_s)
            for completion in result.completions:
                self._collect(completion)
            self._is_turning = False
            await self._reject(result.rejected)
            self._status.num_active, self._status.num_waiting = self._engine.num_active, self._engine.num_waiting
            self._status.num_queued = self._backlog.num_unsubmitted
            if self._status.state in ("running", "evaluating"):
                self._status.state = "running" if self._backlog.pinned_version is None else "evaluating"

    async def _reject(self, rejected: Sequence[tuple[Request, EngineError]]) -> None:
        """Refuse the visits of requests that this engine cannot honour; what else runs of them is forgotten."""
        for request, error in rejected:
            visit = self._backlog.visit_of(request.request_id)
            if visit is None:
                continue
            self._status.counts["refused_prompts"] += 1
            log.error("prompt refused", prompt_id=visit.lease.prompt.prompt_id, reason=str(error))
            self._aborts += visit.request_ids()
            self._backlog.drop([visit])
            if visit.pinned is None:
                await self._leases.give_back([], refused=[visit.lease.lease_id])
            else:
                self._delivery.put_unknown(visit)

    def _pin(self) -> PolicyVersion | None:
        """The version that evaluations want next, once it is here."""
        pinned = self._backlog.pinned_version
        return None if self._pulled.get(pinned) is None else pinned

    def _next_swap(self) -> Pulled | None:
        pinned = self._pin()
        wanted = self._pulled.get(self._newest if pinned is None else pinned)
        if wanted is None or wanted.version == self._engine.version or self._is_ending:
            return None
        if pinned is not None and self._is_busy:
            return None  # training rows finish first
        return wanted

    def _next_requests(self) -> list[Request]:
        """One round of slots, and one ahead, so that slots never run dry and prompts are computed in groups."""
        room = 2 * self._engine.num_slots - self._engine.num_active - self._engine.num_waiting
        if room <= 0 or self._is_ending:
            return []
        pinned, requests = self._pin(), []
        if pinned is not None:
            if pinned == self._engine.version:
                requests = self._backlog.take(room, pinned=pinned)
            if not pinned == self._engine.version == self._newest:
                return requests  # training visits are not begun with a version that is old on purpose
        if len(requests) < room and self._status.num_unpushed < self._recipe.searcher.max_unpushed_rollouts:
            requests += self._backlog.take(room - len(requests), pinned=None)
        return requests

    def _swapped(self, new: Pulled, refused: TbaError | None, swap_s: float) -> None:
        self._status.weight_load_s = swap_s
        if refused is None:
            self._current = new
            self._pulled.accepted(new.version)
            self._status.version = new.version
            self._status.counts["weight_loads"] += 1
            log.info("weights loaded", version=str(new.version), pause_s=round(swap_s, 4))
        else:
            self._refuse(new.version, refused)
        self._pulled.keep_only({self._current.version, self._newest, *self._backlog.pinned_versions()})

    def _refuse(self, version: PolicyVersion, reason: TbaError) -> None:
        retry_in_s = self._pulled.refuse(version)
        self._status.counts["refused_versions"] += 1
        log.error("version refused", version=str(version), reason=str(reason), retry_in_s=retry_in_s)

    def _collect(self, completion: Completion) -> None:
        self._status.counts["rollouts_generated"] += 1
        self._status.counts["generated_tokens"] += len(completion.response_tokens)
        visit = self._backlog.finish(completion)
        if visit is None:
            return
        if visit.pinned is None:
            self._status.num_unpushed += len(visit.completions)
        self._delivery.put(visit)

    async def _pull_task(self) -> None:
        """Pull pinned versions first, then the newest; return the leases of evaluations that cannot be done."""
        attempts: Counter[PolicyVersion] = Counter()
        while True:
            refused = self._pulled.refused
            pinned = [v for v in self._backlog.pinned_versions() if self._pulled.get(v) is None]
            lost = [v for v in self._backlog.open_visits() if v.pinned in refused]
            if lost:
                await self._give_up(lost)
            wanted = next((v for v in (*pinned, self._newest) if v not in refused), None)
            if wanted is None or self._pulled.get(wanted) is not None:
                self._status.waits.end("pulling")
                await asyncio.sleep(self._tick_s)
                continue
            try:
                self._pulled.add(await in_thread(lambda wanted=wanted: self._pulled.fetch(wanted)))
            except (StoreUnavailableError, ObjectNotFoundError) as error:
                if wanted in pinned and isinstance(error, ObjectNotFoundError):
                    self._refuse(wanted, error)
                elif self._status.waits.begin("pulling", "object-store", self._recipe.searcher.retry_s) <= 0:
                    log.warning("wait renewed", wait="object-store", detail=str(error))
                    self._status.waits.end("pulling")
                await asyncio.sleep(1.0)
            except TbaError as error:
                attempts[wanted] += 1
                log.warning("version not pulled", version=str(wanted), attempt=attempts[wanted], detail=str(error))
                if attempts[wanted] == PULL_ATTEMPTS:
                    del attempts[wanted]
                    self._refuse(wanted, error)
            else:
                self._status.waits.end("pulling")
                self._work.set()

    async def _beat_task(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        self._status.version = self._engine.version
        beat = self._status.beat()
        try:
            async with asyncio.timeout(BEAT_TIMEOUT_S):  # not wait_for, which can swallow a cancellation (gh-86296)
                await in_thread(lambda: self._beats.heartbeat(beat))
            self._status.note_beat(None)
        except (ServiceError, TimeoutError) as error:
            self._status.note_beat(error)

    async def _drain(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Finish active rows, deliver, return the leases that are not complete, also those that come only now."""
        self._status.state = "draining"
        drain_s = self._recipe.searcher.drain_s
        begin = time.monotonic()
        log.info("draining", drain_s=drain_s, num_active=self._engine.num_active)
        left = await self._give_up([visit for visit in self._backlog.open_visits() if not visit.num_submitted])
        await self._until(lambda: not self._is_busy, begin + 0.7 * drain_s, tasks)
        self._aborts = [request_id for visit in self._backlog.open_visits() for request_id in visit.request_ids()]
        # what the turn under way still finishes is delivered too
        await self._until(lambda: not self._is_busy, begin + 0.8 * drain_s, tasks)
        cut_short = self._backlog.open_visits()
        self._backlog.drop(cut_short)
        for visit in cut_short:
            if visit.completions and visit.pinned is None:
                self._status.num_unpushed += len(visit.completions)
                self._delivery.put(visit)
        await self._until(self._is_settled, begin + 0.85 * drain_s, tasks)
        unfinished = self._delivery.hurry()
        await self._until(self._is_settled, begin + 0.95 * drain_s, tasks)
        if self._is_asking:
            log.warning("lease request not answered; what it was granted expires", detail="the drain is over")
        await self._give_up([*cut_short, *unfinished, *self._backlog.open_visits()], also=left)
        log.info("drained", num_returned=len(cut_short), num_unpushed=self._status.num_unpushed)

    def _is_settled(self) -> bool:
        """Nothing is on its way between this searcher and the services."""
        return self._delivery.idle and not self._is_asking and not self._leases.num_returning

    async def _until(self, done: Callable[[], bool], end: float, tasks: Sequence[asyncio.Task[None]]) -> None:
        while not done() and time.monotonic() < end:
            await asyncio.sleep(self._tick_s)
            _raise_first_error(tasks)

    async def _give_up(self, visits: Sequence[Visit], *, also: Sequence[str] = ()) -> list[str]:
        """Forget visits and return their leases, and `also`; those that could not be returned."""
        self._backlog.drop(visits)
        return await self._leases.give_back([*also, *(visit.lease.lease_id for visit in visits)])

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past new work."""
        self._work.clear()
        try:
            async with asyncio.timeout(seconds):  # as in `_beat`
                await self._work.wait()
        except TimeoutError:
            return


def _raise_first_error(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error

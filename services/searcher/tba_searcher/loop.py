"""The searcher's loop: one event loop, and one engine in its own thread; only `_engine_task` connects the two.

      buffer                                                                        object store
        | leases                                                                         | versions
   _lease_task --> WorkQueue --requests--> _engine_task <--newest / pinned version-- VersionPulls
                                               | EngineThread: swap, submit, decode
                                               v completions
                                           WorkQueue --complete visits--> Delivery.score_forever --> push_forever
                                                                              | reward service         | buffer
   SearcherStatus.send_forever: state, version, oldest wait and gauges to the buffer, every second
   LeaseManager.renew_forever: renews the leases of all visits here, after a third of a lease

 The states of a visit: generation/visits.py. The waits, with their names and deadlines:

 task            waits for                       name of the wait            deadline, and what happens at it
 start           a version that can be used      no-version, object-store    none announced: asks again, renewed; store
                                                                             away: RETRY_S, then the searcher ends
 _lease_task     room for more visits            (none: the engine is busy)  -
                 rollouts to be pushed           unpushed-rollouts           RETRY_S, renewed and logged
                 leases, at the buffer           (none: it is soon answered) ROUND_WAIT_S, IDLE_WAIT_S
                 an empty reply of the buffer    as the reply names it       RETRY_S, renewed and logged
                 a buffer that is away           buffer-unreachable          RETRY_S, then the searcher ends
 _engine_task    requests or a version           (that of _lease_task)       wakes every 50 ms
                 a step of over 5 s              engine-step                 ENGINE_TIMEOUT_S, then the engine is dead
 VersionPulls    a version to pull               (none)                      -
                 a store that is away or slow    object-store                RETRY_S, renewed: the old version is used
                 vLLM to prepare weights         weight-staging (logged)     ENGINE_TIMEOUT_S, then the pause reads them
                 another searcher of the machine weight-cache                600 s, then it makes the version itself
 episodes        an environment that answers     environment-failing         RETRY_S, renewed and logged
 scoring, pushing                                see delivery.py
 drain           active requests, scores,        (state draining)            drain_s in all: until 0.7 of it active
                 pushes, the answer to a                                     requests, until 0.85 scores (the rest goes
                 lease request                                               unscored), until 0.95 pushes and that
                                                                             answer; then all leases are returned

Weights change only between two decode steps. With `sampling.alternate` training visits wait until the newest version is
loaded. An evaluation pins a version. While another version is pinned, no training visits begin: active requests finish,
then the pinned version is loaded. After the last evaluation the newest version is loaded again.

If the engine dies, only the rollouts that it was decoding are lost. As in a drain, finished rollouts are delivered and
leases returned; then the searcher ends with the reason.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tba.api import MAX_REFUSED_VERSIONS, LeaseReply, LeaseRequest, PushReply
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import BusyError, UnavailableError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.weights import LocalVersion
from tba_searcher.conversations.chat import RenderError
from tba_searcher.engines.engine import ENGINE_TIMEOUT_S, Engine, EngineDiedError, Request
from tba_searcher.engines.tokenizer import Codec
from tba_searcher.episodes.conversation import PlayedEpisode
from tba_searcher.generation.delivery import NUM_ALONE, Delivery
from tba_searcher.generation.engine_thread import EngineStep, EngineThread
from tba_searcher.generation.status import SearcherStatus
from tba_searcher.generation.version_pulls import VersionPulls, WeightLoader
from tba_searcher.generation.visits import LeaseManager, Visit, WorkQueue, num_round_visits
from tba_searcher.waits import RETRY_S, retry_until, sleep_until

TICK_S = 0.05
LEASES_EXPIRE = "lease request not answered; leases that it was granted expire"
MAX_LEASES = 256
ROUND_WAIT_S = 0.25
"""While the engine decodes: how long a lease request waits at the buffer for a whole round of slots. Visits of one
reply are decoded, scored and pushed together."""
MAX_UNPUSHED_ROLLOUTS = 2048
"""No new training rollouts begin while so many finished ones wait for scores or the buffer: eight full pushes."""
IDLE_WAIT_S = 1.0
"""While the engine is idle: how long a lease request waits at the buffer for any lease."""
log = get_logger("loop")


class SearcherLoop:
    """Leases, samples and delivers visits until the run is over, or until `stop` is set and the drain is done.

    Args:
        current: the version that the engine holds.
        buffer: a client that retries only briefly; the loop itself retries longer, with a named wait.
        heartbeats: another client, so that heartbeats and renewals never wait behind a retry.
        stop: the caller sets it on SIGTERM.
        tick_s: how often tasks poll for something in this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        engine: Engine,
        current: LocalVersion,
        loader: WeightLoader,
        codec: Codec,
        queue: WorkQueue,
        buffer: BufferClient,
        heartbeats: BufferClient,
        delivery: Delivery,
        status: SearcherStatus,
        stop: asyncio.Event,
        tick_s: float = TICK_S,
    ) -> None:
        self._recipe, self._engine, self._current, self._loader = recipe, engine, current, loader
        self._codec, self._queue, self._buffer, self._heartbeats = codec, queue, buffer, heartbeats
        self._delivery, self._status, self._stop, self._tick_s = delivery, status, stop, tick_s
        self._leases = LeaseManager(
            buffer=buffer, renewals=heartbeats, queue=queue, delivering=lambda: delivery.lease_ids, status=status
        )
        self._thread = EngineThread(status.waits, timeout_s=ENGINE_TIMEOUT_S)
        self._engine_error: EngineDiedError | None = None
        self._run_is_over = asyncio.Event()
        self._has_work, self._has_news = asyncio.Event(), asyncio.Event()
        self._newest = current.version
        self._pulls = VersionPulls(
            engine=engine,
            loader=loader,
            queue=queue,
            newest=lambda: self._newest,
            status=status,
            return_visits=self._return_visits,
            has_news=self._has_news,
            has_work=self._has_work,
            tick_s=tick_s,
        )
        self._aborts: list[str] = []
        """Ids of the requests that the next step aborts."""
        self._num_round_visits = num_round_visits(recipe)
        self._num_prefilled = engine.num_prefilled_tokens
        self._is_stepping = False
        self._is_leasing = False
        """A request for leases is in progress, or its reply has not been handled yet."""
        self._refused_prompt_ids: set[str] = set()
        """Ids of prompts with too many tokens or none, or messages that cannot be rendered; each is logged once."""
        self.episodes = queue.episodes
        if self.episodes is not None:
            self.episodes.on_played, self.episodes.on_turn = self._on_played, self._has_work.set
            self.episodes.on_abandoned = lambda request_id: self._aborts.append(request_id)
        delivery.on_short = self._return_short
        loader.add(current)
        status.version = current.version
        delivery.on_reply = self.on_reply

    async def run(self) -> None:
        """Run all tasks; return when the run is over or the searcher is drained.

        Raises:
            EngineDiedError: the engine cannot continue; finished rollouts are delivered.
            TbaError: a task failed.
        """
        jobs = [
            self._lease_task(),
            self._engine_task(),
            self._status.send_forever(self._heartbeats),
            self._delivery.score_forever(),
            *(self._delivery.score_alone_forever() for _ in range(NUM_ALONE)),
            self._delivery.push_forever(),
            self._leases.renew_forever(),
            self._pulls.pull_forever(),
        ]
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(job) for job in jobs]
        over, stop = asyncio.create_task(self._run_is_over.wait()), asyncio.create_task(self._stop.wait())
        try:
            # the engine task ends by itself when the engine dies: a drain follows, as after SIGTERM
            await asyncio.wait([*tasks, over, stop], return_when=asyncio.FIRST_COMPLETED)
            _raise_first_error(tasks)
            if not self._run_is_over.is_set():
                await self._drain(tasks)
        finally:
            for task in (*tasks, over, stop):
                task.cancel()
            await asyncio.gather(*tasks, over, stop, return_exceptions=True)
            if self.episodes is not None:
                await self.episodes.close()
            await self._thread.close(self._engine)
        self._status.state = "ended" if self._engine_error is None else "failed"
        await self._status.send(self._heartbeats)
        if self._engine_error is not None:
            raise self._engine_error

    @property
    def _is_ending(self) -> bool:
        return self._stop.is_set() or self._engine_error is not None

    @property
    def _is_busy(self) -> bool:
        """Whether the engine has something to decode, or the result of its last step has not been handled yet."""
        return self._engine_error is None and (
            self._is_stepping or self._engine.num_active + self._engine.num_waiting > 0
        )

    @property
    def _is_playing(self) -> bool:
        """Whether an episode is open that the engine can still go on with."""
        return self._engine_error is None and self.episodes is not None and self.episodes.num_open > 0

    def _on_played(self, lease_id: str, played: PlayedEpisode) -> None:
        """Add an episode that has ended to its visit."""
        visit = self._queue.visit_of(f"{lease_id}/")
        if visit is not None and self._queue.add_outcome(visit, played) is not None:
            self._delivery.put(visit)

    async def _return_short(self, visit: Visit) -> None:
        """Return the lease of a visit of which episodes are missing; refuse it if no attempt can play them."""
        lease_id, prompt_id = visit.lease.lease_id, visit.lease.prompt.prompt_id
        hopeless = [each.failure for each in visit.completions if isinstance(each, PlayedEpisode) and each.is_hopeless]
        if not hopeless:
            await self._leases.return_leases([lease_id])
            return
        self._status.counts["refused_prompts"] += 1
        if prompt_id not in self._refused_prompt_ids:
            self._refused_prompt_ids.add(prompt_id)
            log.error("prompt refused", prompt_id=prompt_id, reason=hopeless[0])
        await self._leases.return_leases([], refused=[lease_id])

    def on_reply(self, reply: LeaseReply | PushReply) -> None:
        """Note the newest version and the end of the run from a reply of the buffer."""
        if reply.latest_version is not None:
            newest = PolicyVersion.parse(reply.latest_version)
            if newest != self._newest:
                self._newest = newest
                self._has_news.set()
        # replies of pushes and leases may both say it; the run ends once
        if reply.run_state in ("done", "failed") and not self._run_is_over.is_set():
            log.info("run is over", run_state=reply.run_state)
            self._run_is_over.set()

    async def _lease_task(self) -> None:
        """Lease visits to hold rollouts for 3 x `num_slots`: decoding, waiting in the engine, and in the work queue."""
        settings, waits, found_evals = self._recipe.searcher, self._status.waits, False
        while not self._is_ending:
            num_held = self._queue.num_unsubmitted + self._engine.num_active + self._engine.num_waiting
            num_wanted = math.ceil((3 * settings.num_slots - num_held) / self._recipe.sampling.rollouts_per_visit)
            # generation must not run ahead of scoring and pushing without limit
            if self._status.num_unpushed >= MAX_UNPUSHED_ROLLOUTS:
                waits.renew("leases", "unpushed-rollouts")
                await asyncio.sleep(self._tick_s)
                continue
            # After a reply with evaluations ask for many at once, so that a version is pinned once and not again for
            # every few leases. Training visits beyond `num_wanted` are returned.
            max_leases = max(num_wanted, settings.num_slots if found_evals else 0)
            if max_leases <= 0:
                waits.end("leases")
                await sleep_until(self._has_work, self._tick_s)
                continue
            known, asked_s = self._newest, time.monotonic()
            request = LeaseRequest(
                searcher_id=self._status.searcher_id,
                max_leases=min(max_leases, MAX_LEASES),
                min_leases=min(self._num_round_visits, max_leases, MAX_LEASES) if num_held else 1,
                # a drain waits for the answer
                wait_s=ROUND_WAIT_S if num_held else min(IDLE_WAIT_S, settings.drain_s / 4),
                known_version=str(known),
                version=str(self._engine.version),
                refused_versions=[str(version) for version in sorted(self._loader.refused)[-MAX_REFUSED_VERSIONS:]],
            )
            self._is_leasing = True
            try:
                reply = await retry_until(
                    lambda request=request: self._buffer.lease(request),
                    waits=waits,
                    owner="leasing",
                    service="buffer",
                    deadline_s=RETRY_S,
                    should_stop=lambda: self._is_ending,  # then the call in progress is the last
                )
                if self._is_ending:  # it may have waited for long, and another searcher is to have them
                    await self._leases.return_leases([lease.lease_id for lease in reply.leases])
                    return
                self.on_reply(reply)
                found_evals = any(lease.kind != "train" for lease in reply.leases)
                num_kept = await self._enqueue(reply, max_train=max(num_wanted, 0))
            except (BusyError, UnavailableError) as error:  # raised only during shutdown; else retried
                log.warning(LEASES_EXPIRE, detail=str(error))
                return
            finally:
                self._is_leasing = False
            if num_kept:
                waits.end("leases")
                self._has_work.set()
                # less than a round, and no wait at the buffer: it holds too many others
                pause_s = asked_s + request.wait_s - time.monotonic()
                if len(reply.leases) < request.min_leases and self._newest == known and not found_evals:
                    await asyncio.sleep(max(pause_s, 0.0))
            else:
                if self._queue.num_unsubmitted + self._engine.num_active == 0:
                    waits.renew("leases", reply.wait or "leases")
                # a reply that only tells of a new version came early: the next may come as early
                if self._newest == known or reply.retry_after_s > self._tick_s:
                    await sleep_until(self._has_work, max(reply.retry_after_s, self._tick_s))

    async def _enqueue(self, reply: LeaseReply, *, max_train: int) -> int:
        """Queue evaluations and at most `max_train` training visits; return or refuse the other leases.

        Returns:
            How many leases are kept.
        """
        limit_tokens, too_long = self._recipe.searcher.max_prompt_tokens, []
        returned = [lease.lease_id for lease in reply.leases if lease.kind == "train"][max_train:]
        for lease in reply.leases:
            if lease.lease_id in returned:
                continue
            reason, is_played = None, self.episodes is not None and self.episodes.plays(lease.prompt.task)
            try:
                # an episode has its prompt when its environment is reset
                tokens = () if is_played else self._codec.prompt_tokens(lease.prompt)
            except RenderError as error:
                tokens, reason = (), str(error)
            visit = Visit(
                lease=lease,
                prompt_tokens=tokens,
                pinned=None if lease.version is None or lease.kind == "train" else PolicyVersion.parse(lease.version),
            )
            num_tokens = len(visit.prompt_tokens)
            if is_played or 1 <= num_tokens <= limit_tokens:
                self._queue.add(visit)
                continue
            self._status.counts["refused_prompts"] += 1
            prompt_id = lease.prompt.prompt_id
            if prompt_id not in self._refused_prompt_ids:
                self._refused_prompt_ids.add(prompt_id)
                log.error(
                    "prompt refused",
                    prompt_id=prompt_id,
                    num_tokens=num_tokens,
                    limit_tokens=limit_tokens,
                    reason=reason,
                )
            if visit.pinned is None:
                too_long.append(lease.lease_id)
            else:  # an evaluation needs a result for every prompt, or it never ends
                self._delivery.put_failed(visit)
        await self._leases.return_leases(returned, refused=too_long)
        return len(reply.leases) - len(returned) - len(too_long)

    async def _engine_task(self) -> None:
        """Choose the engine's next step, run it in the engine's thread, and handle the result; repeat."""
        while self._engine_error is None:
            pinned = self._available_pin()
            target = self._loader.get(self._newest if pinned is None else pinned)
            if target is not None and (target.version == self._engine.version or self._is_ending):
                target = None
            elif pinned is not None and self._is_busy:
                target = None  # training rollouts finish first
            returns_early = self.episodes is not None and self.episodes.num_open > 0
            step = EngineStep(target, self._next_requests(), self._aborts, returns_early)
            self._aborts = []
            if step.swap_to is None and not step.requests and not self._is_busy:
                await sleep_until(self._has_work, self._tick_s)
                continue
            self._is_stepping = True
            result = await self._thread.run(self._engine, step, self._current)
            if result.died is not None:
                log.error("engine died", reason=str(result.died))
                self._engine_error = result.died
            elif (new := step.swap_to) is not None:
                self._status.weight_load_s = result.swap_s
                if result.swap_error is None:
                    self._current = new
                    self._loader.accept(new.version)
                    self._status.version = new.version
                    self._status.counts["weight_loads"] += 1
                    log.info("weights loaded", version=str(new.version), pause_s=round(result.swap_s, 4))
                else:
                    self._loader.refuse(new.version, result.swap_error)
                self._loader.keep_only({self._current.version, self._newest, *self._queue.pinned_versions()})
            for completion in result.completions:
                self._status.counts["generated_tokens"] += len(completion.response_tokens)
                if (visit := self._queue.add_completion(completion)) is not None:
                    self._delivery.put(visit)
            self._is_stepping = False
            for request, error in result.rejected:  # this engine cannot honour it: its visit is refused
                if self.episodes is not None and self.episodes.refuse(request.request_id, str(error)):
                    continue
                if (visit := self._queue.visit_of(request.request_id)) is None:
                    continue
                self._status.counts["refused_prompts"] += 1
                log.error("prompt refused", prompt_id=visit.lease.prompt.prompt_id, reason=str(error))
                self._aborts += self._queue.drop([visit])
                if visit.pinned is None:
                    await self._leases.return_leases([], refused=[visit.lease.lease_id])
                else:
                    self._delivery.put_failed(visit)
            self._status.counts["prefilled_tokens"] += self._engine.num_prefilled_tokens - self._num_prefilled
            self._num_prefilled = self._engine.num_prefilled_tokens
            self._status.num_active, self._status.num_waiting = self._engine.num_active, self._engine.num_waiting
            self._status.num_queued = self._queue.num_unsubmitted
            if self._status.state in ("running", "evaluating"):
                self._status.state = "running" if self._queue.pinned_version is None else "evaluating"

    def _available_pin(self) -> PolicyVersion | None:
        """Return the version that the oldest evaluation pins; None if there is none, or it is not on this machine."""
        pinned = self._queue.pinned_version
        return None if self._loader.get(pinned) is None else pinned

    def _next_requests(self) -> list[Request]:
        """Return requests up to 2 x `num_slots` in the engine, so that no slot is idle and prefills come in groups."""
        room = 2 * self._engine.num_slots - self._engine.num_active - self._engine.num_waiting
        if room <= 0 or self._is_ending:  # a drain lets open episodes end
            if room <= 0 or self.episodes is None or self._engine_error is not None:
                return []
            turns = self.episodes.take_turns(room, pinned=self._engine.version)
            return turns + self.episodes.take_turns(room - len(turns), pinned=None)
        pinned, requests = self._available_pin(), []
        if pinned is not None:
            if pinned == self._engine.version:
                requests = self._queue.take_requests(room, pinned=pinned)
            if not pinned == self._engine.version == self._newest:
                return requests  # do not begin training visits with a version that is old on purpose
        newest, is_lock_step = self._newest, self._recipe.sampling.alternate
        if is_lock_step and self._engine.version != newest and newest not in self._loader.refused:
            return requests  # a phase has one version; searchers of other runs generate on while they pull
        if len(requests) < room and self._status.num_unpushed < MAX_UNPUSHED_ROLLOUTS:
            requests += self._queue.take_requests(room - len(requests), pinned=None)
        return requests

    async def _drain(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Finish active requests, deliver complete visits, and return all other leases, within `searcher.drain_s`."""
        self._status.state = "draining"
        drain_s = self._recipe.searcher.drain_s
        begin = time.monotonic()
        log.info("draining", drain_s=drain_s, num_active=self._engine.num_active)
        unreturned = await self._return_visits(
            [visit for visit in self._queue.open_visits() if not visit.num_submitted]
        )
        await self._wait_until(lambda: not self._is_busy and not self._is_playing, begin + 0.7 * drain_s, tasks)
        self._aborts += [request_id for visit in self._queue.open_visits() for request_id in visit.request_ids()]
        if self.episodes is not None:  # an episode is stored whole or not at all
            self._aborts += self.episodes.cancel_all()
        # the step in progress may still complete rollouts, and they are delivered too
        await self._wait_until(lambda: not self._is_busy, begin + 0.8 * drain_s, tasks)
        cut_short = self._queue.open_visits()
        self._queue.drop(cut_short)
        # rollouts of a visit that is cut short are paid for, so they are pushed; an evaluation must be complete
        for visit in cut_short:
            if visit.completions and visit.pinned is None:
                self._delivery.put(visit)
        await self._wait_until(self._is_settled, begin + 0.85 * drain_s, tasks)
        abandoned = self._delivery.drain()
        await self._wait_until(self._is_settled, begin + 0.95 * drain_s, tasks)
        if self._is_leasing:
            log.warning(LEASES_EXPIRE, detail="the drain is over")
        await self._return_visits([*cut_short, *abandoned, *self._queue.open_visits()], also=unreturned)
        log.info("drained", num_returned=len(cut_short), num_unpushed=self._status.num_unpushed)

    def _is_settled(self) -> bool:
        """Return whether no lease request, score, push or lease return is in progress."""
        return self._delivery.is_idle and not self._is_leasing and not self._leases.num_returns_in_flight

    async def _wait_until(self, done: Callable[[], bool], end: float, tasks: Sequence[asyncio.Task[None]]) -> None:
        while not done() and time.monotonic() < end:
            await asyncio.sleep(self._tick_s)
            _raise_first_error(tasks)

    async def _return_visits(self, visits: Sequence[Visit], *, also: Sequence[str] = ()) -> list[str]:
        """Drop visits, and give their leases and those in `also` back. Return the ids that were not acknowledged."""
        self._queue.drop(visits)
        return await self._leases.return_leases([*also, *(visit.lease.lease_id for visit in visits)])


def _raise_first_error(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error

"""The life of a visit in the searcher: one lease, its prompt, and the S rollouts that are sampled for it.

Other systems call a visit a prompt group; here a group is the K rollouts of one prompt in one slot of a batch.

    state       in                          next
    leased      SearcherLoop._lease_task    queued; or returned (not needed), or refused (its prompt is too long)
    queued      WorkQueue                   sampling; or dropped when its lease is lost; or returned by a drain
    sampling    WorkQueue and the engine    complete with its last completion; or refused (the engine cannot honour
                                            it); or cut short by a drain, which still delivers a training visit's
                                            completions
    complete    Delivery                    scored, or pending if the reward service is away
    scored      Delivery                    pushed (training) or reported (evaluation): the buffer has acknowledged it

`LeaseManager` renews a lease until its visit is pushed or reported, which ends the lease. A returned lease lets another
searcher have the visit at once. A lease expires if the searcher or the network fails. Rollouts count no matter who
holds the lease: once sampling has begun, a lost lease changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tba.api import MAX_LEASE_IDS, Lease, LeaseRenewal, LeaseReturn
from tba.clients import BufferClient
from tba.concurrency import in_thread
from tba.config import Recipe
from tba.config.searcher import SearcherSection, TaskSampling, TemperatureMix
from tba.errors import ServiceError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire import Sampling
from tba_searcher.engines.engine import Completion, Request
from tba_searcher.episodes.conversation import PlayedEpisode
from tba_searcher.episodes.runner import EpisodeRunner
from tba_searcher.generation.status import SearcherStatus

_DEFAULT_SAMPLING = TaskSampling()
"""For tasks without an entry in the recipe."""
_IDLE_RENEWAL_S = 0.05
_CALL_TIMEOUT_S = 5.0
log = get_logger("leases")


@dataclass(slots=True, kw_only=True)
class Visit:
    """One lease, its tokenized prompt and its completions so far."""

    lease: Lease
    prompt_tokens: tuple[int, ...]
    pinned: PolicyVersion | None
    """The version that an evaluation must be sampled with; None in training."""
    num_submitted: int = 0
    completions: list[Completion | PlayedEpisode] = field(default_factory=list)

    def request_ids(self) -> list[str]:
        """Return the ids of the requests submitted so far."""
        return [f"{self.lease.lease_id}/{number + 1}" for number in range(self.num_submitted)]


class WorkQueue:
    """The visits that are queued or being sampled."""

    def __init__(
        self,
        settings: SearcherSection,
        *,
        run_seed: int,
        eos_ids: tuple[int, ...],
        episodes: EpisodeRunner | None = None,
    ) -> None:
        self._settings, self._run_seed, self._eos_ids = settings, run_seed, eos_ids
        self.episodes = episodes
        # two queues: evaluations go first, and must not stand behind training visits
        self._queues: dict[bool, deque[Visit]] = {True: deque(), False: deque()}  # evaluation? -> not fully submitted
        self._open: dict[str, Visit] = {}  # by lease id, in order of arrival

    def add(self, visit: Visit) -> None:
        """Queue a visit."""
        self._open[visit.lease.lease_id] = visit
        self._queues[visit.pinned is not None].append(visit)

    @property
    def num_unsubmitted(self) -> int:
        """Number of rollouts that have not been submitted to the engine."""
        return sum(v.lease.num_rollouts - v.num_submitted for queue in self._queues.values() for v in queue)

    @property
    def pinned_version(self) -> PolicyVersion | None:
        """The version of the oldest open evaluation."""
        return next((visit.pinned for visit in self._open.values() if visit.pinned is not None), None)

    def pinned_versions(self) -> set[PolicyVersion]:
        """Return the versions of all open evaluations."""
        return {visit.pinned for visit in self._open.values() if visit.pinned is not None}

    def open_visits(self) -> list[Visit]:
        """Return all visits that are queued or being sampled."""
        return list(self._open.values())

    def visit_of(self, request_id: str) -> Visit | None:
        """Return the open visit that a request belongs to."""
        return self._open.get(request_id.rpartition("/")[0])

    def take_requests(self, max_requests: int, *, pinned: PolicyVersion | None) -> list[Request]:
        """Remove and return the next requests of evaluations that pin version `pinned`; None: of training visits.

        Episodes begin here too; turns of those that are open come first.
        """
        queue, requests, num_begun = self._queues[pinned is not None], list[Request](), 0
        if self.episodes is not None:
            requests, num_begun = self.episodes.take_turns(max_requests, pinned=pinned), self.episodes.num_resetting
        for visit in list(queue):
            if pinned is not None and visit.pinned != pinned:
                continue
            episodes = self.episodes if self.episodes and self.episodes.plays(visit.lease.prompt.task) else None
            while visit.num_submitted < visit.lease.num_rollouts and len(requests) < max_requests:
                if episodes is None:
                    requests.append(self._request(visit))
                    continue
                if len(requests) + num_begun >= max_requests or not episodes.has_room(pinned):
                    break
                episodes.begin(visit.lease.lease_id, visit.lease.prompt, self._request(visit), visit.pinned)
                num_begun += 1
            if visit.num_submitted == visit.lease.num_rollouts:
                queue.remove(visit)
            if len(requests) >= max_requests:
                break
        return requests

    def add_completion(self, completion: Completion) -> Visit | None:
        """Add a completion to its visit. If that completes the visit, remove it from the queue and return it."""
        visit = self.visit_of(completion.request_id)
        if visit is None:  # dropped while the engine was decoding it
            return None
        if self.episodes is not None and self.episodes.plays(visit.lease.prompt.task):
            self.episodes.settle(completion)  # one reply of several
            return None
        return self.add_outcome(visit, completion)

    def add_outcome(self, visit: Visit, outcome: Completion | PlayedEpisode) -> Visit | None:
        """Add what one of its requests or episodes has become to a visit; return the visit if that completes it."""
        visit.completions.append(outcome)
        is_complete = len(visit.completions) >= visit.lease.num_rollouts
        return self._open.pop(visit.lease.lease_id) if is_complete else None

    def drop(self, visits: Iterable[Visit]) -> list[str]:
        """Remove visits from the queue; the caller must return their leases, and abort the requests returned here."""
        request_ids = list[str]()
        for visit in visits:
            request_ids += visit.request_ids()
            if self.episodes is not None:
                request_ids += self.episodes.cancel(visit.lease.lease_id)
            self._open.pop(visit.lease.lease_id, None)
            queue = self._queues[visit.pinned is not None]
            if visit in queue:
                queue.remove(visit)
        return request_ids

    def _request(self, visit: Visit) -> Request:
        visit.num_submitted += 1
        settings, lease = self._settings, visit.lease
        task = settings.tasks.get(lease.prompt.task, _DEFAULT_SAMPLING)
        # an evaluation measures the policy as it is: no top-p, top-k or mix
        sampling = Sampling.of(lease.temperature, stop=tuple(task.stop))
        if visit.pinned is None:
            temperature, mix = lease.temperature, settings.temperature_mix
            if mix is not None:
                number, num_missing = visit.num_submitted, lease.num_rollouts
                temperature = draw_temperature(mix, self._run_seed, lease.visit_id, num_missing, number)
            sampling = Sampling.of(temperature, top_p=settings.top_p, top_k=settings.top_k, stop=tuple(task.stop))
        return Request(
            request_id=f"{visit.lease.lease_id}/{visit.num_submitted}",
            prompt_tokens=visit.prompt_tokens,
            sampling=sampling,
            max_response_tokens=settings.max_response_tokens,
            min_response_tokens=task.min_response_tokens,
            eos_ids=self._eos_ids,
        )


def draw_temperature(mix: TemperatureMix, run_seed: int, visit_id: str, num_missing: int, number: int) -> float:
    """Return a temperature, uniform in the mix, for rollout `number` of the `num_missing` that a visit still needs."""
    # The same visit with nothing delivered draws the same temperatures again: a second draw would favour those whose
    # rollouts end before a lease expires. `num_missing` is part of the seed because the rest of a visit that was
    # delivered in part would otherwise repeat temperatures that are there already.
    digest = hashlib.sha256(f"{run_seed}|temperature|{visit_id}|{num_missing}|{number}".encode()).digest()
    return mix.low + (mix.high - mix.low) * int.from_bytes(digest[:8], "big") / 2**64


class LeaseManager:
    """Renews and returns the leases that this searcher holds.

    Args:
        buffer: the client that returns leases.
        renewals: the client that renews leases; it does not retry.
        queue: holds the visits that are not complete.
        delivering: returns the lease ids of the visits that are being scored or pushed.
    """

    def __init__(
        self,
        *,
        buffer: BufferClient,
        renewals: BufferClient,
        queue: WorkQueue,
        delivering: Callable[[], set[str]],
        status: SearcherStatus,
    ) -> None:
        self._buffer, self._renewals = buffer, renewals
        self._queue, self._delivering, self._status = queue, delivering, status
        self.num_returns_in_flight = 0
        """Number of `return_leases` calls that have not ended."""

    async def renew_forever(self) -> None:
        """Renew all leases, each time after a third of the shortest lease duration."""
        lease_s = 3 * _IDLE_RENEWAL_S
        while True:
            lease_s = min([visit.lease.expires_in_s for visit in self._queue.open_visits()], default=lease_s)
            await asyncio.sleep(lease_s / 3)
            await self.renew()

    async def renew(self) -> None:
        """Renew the leases of all visits of this searcher; drop queued visits whose leases are lost."""
        held = {visit.lease.lease_id for visit in self._queue.open_visits()} | self._delivering()
        lost: set[str] = set()
        for lease_ids in _chunks(sorted(held)):
            body = LeaseRenewal(searcher_id=self._status.searcher_id, lease_ids=lease_ids)
            try:
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    reply = await in_thread(lambda body=body: self._renewals.renew_leases(body))
            except (ServiceError, TimeoutError) as error:
                log.debug("leases not renewed", num_leases=len(lease_ids), detail=str(error))
            else:
                lost.update(reply.lost_lease_ids)
        # a visit that is being sampled continues: its rollouts count no matter who holds the lease
        dropped = [v for v in self._queue.open_visits() if v.lease.lease_id in lost and not v.num_submitted]
        if dropped:
            log.warning("leases lost; their visits are not begun", num_leases=len(dropped))
            self._queue.drop(dropped)

    async def return_leases(self, lease_ids: Sequence[str], *, refused: Sequence[str] = ()) -> list[str]:
        """Return leases to the buffer, so that other searchers get them at once. Leases that are not returned expire.

        Args:
            refused: ids of more leases, whose prompts cannot be sampled.

        Returns:
            The ids in `lease_ids` whose return the buffer has not acknowledged.
        """
        name, unreturned = self._status.searcher_id, list[str]()
        bodies = [LeaseReturn(searcher_id=name, lease_ids=chunk) for chunk in _chunks(lease_ids)]
        bodies += [LeaseReturn(searcher_id=name, lease_ids=[], refused_lease_ids=chunk) for chunk in _chunks(refused)]
        self.num_returns_in_flight += 1
        try:
            for body in bodies:
                try:
                    async with asyncio.timeout(_CALL_TIMEOUT_S):
                        await in_thread(lambda body=body: self._buffer.return_leases(body))
                except (ServiceError, TimeoutError) as error:
                    num = len(body.lease_ids) + len(body.refused_lease_ids)
                    log.warning("leases not returned; they expire", num_leases=num, detail=str(error))
                    unreturned += body.lease_ids
                else:
                    self._status.counts["leases_returned"] += len(body.lease_ids)
        finally:
            self.num_returns_in_flight -= 1
        return unreturned


def num_round_visits(recipe: Recipe) -> int:
    """Return how many visits fill one round of slots, but at most what `samples_per_insert` allows per batch."""
    sampling, num_rollouts = recipe.sampling, recipe.searcher.num_slots
    if sampling.samples_per_insert is not None:
        num_drawn = sampling.prompts_per_batch * sampling.group_size
        num_rollouts = min(num_rollouts, math.ceil(num_drawn / sampling.samples_per_insert))
    # rounded down: a draw makes room for so many at least
    return max(num_rollouts // sampling.rollouts_per_visit, 1)


def _chunks(lease_ids: Sequence[str]) -> Iterator[list[str]]:
    """Yield lease ids in lists that each fit into one request."""
    for start in range(0, len(lease_ids), MAX_LEASE_IDS):
        yield list(lease_ids[start : start + MAX_LEASE_IDS])

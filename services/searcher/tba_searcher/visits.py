"""Leases on their way through the searcher: queued, being sampled, complete."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tba.api import Lease
from tba.config.searcher import SearcherSection, TaskSampling, TemperatureMix
from tba.versions import PolicyVersion
from tba.wire import Sampling
from tba_searcher.engines.base import Completion, Request

_PLAIN = TaskSampling()
"""Of tasks that the recipe says nothing about."""


@dataclass(slots=True, kw_only=True)
class Visit:
    """One lease with its tokenized prompt and the completions so far. `pinned` is set for evaluations."""

    lease: Lease
    prompt_tokens: tuple[int, ...]
    pinned: PolicyVersion | None
    num_submitted: int = 0
    completions: list[Completion] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """All completions that the lease asks for are there."""
        return len(self.completions) >= self.lease.num_rollouts

    def request_ids(self) -> list[str]:
        """Ids of the requests submitted so far."""
        return [f"{self.lease.lease_id}/{number + 1}" for number in range(self.num_submitted)]


class Backlog:
    """Visits that are not complete.

    Args:
        settings: how rollouts are sampled.
        run_seed: of the draws of `temperature_mix`.
        eos_ids: of every request.
    """

    def __init__(self, settings: SearcherSection, *, run_seed: int, eos_ids: tuple[int, ...]) -> None:
        self._settings, self._run_seed, self._eos_ids = settings, run_seed, eos_ids
        self._queues: dict[bool, deque[Visit]] = {True: deque(), False: deque()}  # evaluation? -> not fully submitted
        self._open: dict[str, Visit] = {}  # by lease id, in order of arrival

    def add(self, visit: Visit) -> None:
        """Queue a visit."""
        self._open[visit.lease.lease_id] = visit
        self._queues[visit.pinned is not None].append(visit)

    @property
    def num_unsubmitted(self) -> int:
        """Rollouts that no engine has been asked for yet."""
        return sum(v.lease.num_rollouts - v.num_submitted for queue in self._queues.values() for v in queue)

    @property
    def pinned_version(self) -> PolicyVersion | None:
        """The version of the oldest open evaluation."""
        return next((visit.pinned for visit in self._open.values() if visit.pinned is not None), None)

    def pinned_versions(self) -> set[PolicyVersion]:
        """Versions of all open evaluations."""
        return {visit.pinned for visit in self._open.values() if visit.pinned is not None}

    def take(self, max_requests: int, *, pinned: PolicyVersion | None) -> list[Request]:
        """The next requests: of evaluations of `pinned`, or of training visits when it is None."""
        queue, requests = self._queues[pinned is not None], []
        for visit in list(queue):
            if pinned is not None and visit.pinned != pinned:
                continue
            while visit.num_submitted < visit.lease.num_rollouts and len(requests) < max_requests:
                requests.append(self._request(visit))
            if visit.num_submitted == visit.lease.num_rollouts:
                queue.remove(visit)
            if len(requests) == max_requests:
                break
        return requests

    def finish(self, completion: Completion) -> Visit | None:
        """Add a completion to its visit; returns the visit when that completes it. Dropped visits are ignored."""
        visit = self.visit_of(completion.request_id)
        if visit is None:
            return None
        visit.completions.append(completion)
        return self._open.pop(visit.lease.lease_id) if visit.complete else None

    def visit_of(self, request_id: str) -> Visit | None:
        """The open visit that a request belongs to."""
        return self._open.get(request_id.rpartition("/")[0])

    def drop(self, visits: Iterable[Visit]) -> None:
        """Forget visits; the caller returns their leases."""
        for visit in visits:
            self._open.pop(visit.lease.lease_id, None)
            queue = self._queues[visit.pinned is not None]
            if visit in queue:
                queue.remove(visit)

    def open_visits(self) -> list[Visit]:
        """All visits that are not complete."""
        return list(self._open.values())

    def _request(self, visit: Visit) -> Request:
        visit.num_submitted += 1
        task = self._settings.tasks.get(visit.lease.prompt.task, _PLAIN)
        return Request(
            request_id=f"{visit.lease.lease_id}/{visit.num_submitted}",
            prompt_tokens=visit.prompt_tokens,
            sampling=self._sampling(visit, tuple(task.stop)),
            max_response_tokens=task.max_response_tokens or self._settings.max_response_tokens,
            min_response_tokens=task.min_response_tokens,
            eos_ids=self._eos_ids,
        )

    def _sampling(self, visit: Visit, stop: tuple[str, ...]) -> Sampling:
        """Evaluations take the policy as it is, at the temperature of their lease."""
        settings, lease = self._settings, visit.lease
        if visit.pinned is not None:
            return Sampling(temperature=lease.temperature, stop=stop)
        temperature = lease.temperature
        if settings.temperature_mix is not None:
            temperature = drawn_temperature(
                settings.temperature_mix, self._run_seed, lease.visit_id, lease.num_rollouts, visit.num_submitted
            )
        return Sampling(temperature=temperature, top_p=settings.top_p, top_k=settings.top_k, stop=stop)


def drawn_temperature(mix: TemperatureMix, run_seed: int, visit_id: str, num_lacking: int, number: int) -> float:
    """The sampling temperature of rollout `number` of the `num_lacking` that a visit lacks: uniform in the mix.

    A visit of which nothing has arrived is sampled again at the same temperatures: a second draw would favour those
    whose rollouts are done before a lease expires. What is left of one that has arrived in part is drawn anew, or it
    would repeat temperatures that are there already.
    """
    digest = hashlib.sha256(f"{run_seed}|temperature|{visit_id}|{num_lacking}|{number}".encode()).digest()
    return mix.low + (mix.high - mix.low) * int.from_bytes(digest[:8], "big") / 2**64

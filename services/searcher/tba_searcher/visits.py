"""Leases on their way through the searcher: queued, being sampled, complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tba.api import Lease
from tba.versions import PolicyVersion
from tba_searcher.engines.base import Completion, Request


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
        max_response_tokens, eos_ids: of every request.
    """

    def __init__(self, *, max_response_tokens: int, eos_ids: tuple[int, ...]) -> None:
        self._max_response_tokens, self._eos_ids = max_response_tokens, eos_ids
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
        visit = self._open.get(completion.request_id.rpartition("/")[0])
        if visit is None:
            return None
        visit.completions.append(completion)
        return self._open.pop(visit.lease.lease_id) if visit.complete else None

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
        return Request(
            request_id=f"{visit.lease.lease_id}/{visit.num_submitted}",
            prompt_tokens=visit.prompt_tokens,
            temperature=visit.lease.temperature,
            max_response_tokens=self._max_response_tokens,
            eos_ids=self._eos_ids,
        )

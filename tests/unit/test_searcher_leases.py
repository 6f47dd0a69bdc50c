"""How a searcher renews, returns and refuses its leases."""

from __future__ import annotations

from typing import Any

from tba_searcher.generation.status import SearcherStatus, WaitRegistry
from tba_searcher.generation.visits import LeaseManager, Visit, WorkQueue

from tba.api import MAX_LEASE_IDS, Lease, LeaseRenewal, LeaseRenewalReply, LeaseReturn, Prompt
from tba.config.searcher import SearcherSection
from tba.errors import UnavailableError


class RecordedBuffer:
    """Knows which leases are lost; `away` makes it answer nothing."""

    def __init__(self, *lost: str) -> None:
        self.lost, self.away = lost, False
        self.renewed: list[list[str]] = []
        self.returned: list[list[str]] = []
        self.refused: list[list[str]] = []

    def renew_leases(self, request: LeaseRenewal) -> LeaseRenewalReply:
        if self.away:
            raise UnavailableError("no answer")
        self.renewed.append(request.lease_ids)
        return LeaseRenewalReply(lost_lease_ids=[name for name in request.lease_ids if name in self.lost])

    def return_leases(self, request: LeaseReturn) -> None:
        if self.away:
            raise UnavailableError("no answer")
        self.returned.append(request.lease_ids)
        self.refused.append(request.refused_lease_ids)


def visit_of(name: str) -> Visit:
    prompt = Prompt(prompt_id="p", task="addition", text="1+1=")
    lease = Lease(
        lease_id=name, kind="train", visit_id=name, prompt=prompt, num_rollouts=2, temperature=1.0, expires_in_s=60
    )
    return Visit(lease=lease, prompt_tokens=(5, 6), pinned=None)


def make_leases(buffer: Any, queue: WorkQueue, *delivering: str) -> tuple[LeaseManager, SearcherStatus]:
    status = SearcherStatus(searcher_id="s", run="r", waits=WaitRegistry())
    leases = LeaseManager(
        buffer=buffer, renewals=buffer, queue=queue, delivering=lambda: set(delivering), status=status
    )
    return leases, status


def make_queue(*names: str) -> WorkQueue:
    queue = WorkQueue(SearcherSection(max_response_tokens=4), run_seed=0, eos_ids=(1,))
    for name in names:
        queue.add(visit_of(name))
    return queue


async def test_a_lost_lease_ends_its_visit_only_if_the_visit_is_not_begun() -> None:
    queue = make_queue("begun", "lost", "held")
    assert [request.request_id for request in queue.take_requests(1, pinned=None)] == ["begun/1"]
    buffer = RecordedBuffer("begun", "lost", "delivering")
    leases, _ = make_leases(buffer, queue, "delivering")
    await leases.renew()
    assert buffer.renewed == [["begun", "delivering", "held", "lost"]]
    assert [visit.lease.lease_id for visit in queue.open_visits()] == ["begun", "held"]
    assert [request.request_id for request in queue.take_requests(9, pinned=None)] == ["begun/2", "held/1", "held/2"]


async def test_a_renewal_that_fails_loses_nothing() -> None:
    queue = make_queue("a")
    buffer = RecordedBuffer("a")
    buffer.away = True
    leases, status = make_leases(buffer, queue)
    await leases.renew()
    await leases.return_leases(["a"], refused=["b"])
    assert len(queue.open_visits()) == 1
    assert status.counts["leases_returned"] == 0


async def test_many_leases_go_in_portions_and_no_lease_means_no_request() -> None:
    buffer = RecordedBuffer()
    leases, status = make_leases(buffer, make_queue())
    await leases.renew()
    await leases.return_leases([])
    assert (buffer.renewed, buffer.returned) == ([], [])
    ids = [f"lease-{number}" for number in range(MAX_LEASE_IDS + 1)]
    await leases.return_leases(ids, refused=ids[:2])
    assert [len(part) for part in buffer.returned] == [MAX_LEASE_IDS, 1, 0]
    assert buffer.refused == [[], [], ids[:2]]
    assert status.counts["leases_returned"] == MAX_LEASE_IDS + 1

"""What a searcher tells the buffer about the leases it holds."""

from __future__ import annotations

from typing import Any

from tba_searcher.leases import Leases
from tba_searcher.status import Status
from tba_searcher.visits import Backlog, Visit
from tba_searcher.waits import Waits

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


class Delivering:
    """A delivery with these leases on their way."""

    def __init__(self, *lease_ids: str) -> None:
        self.lease_ids = set(lease_ids)


def make_visit(name: str) -> Visit:
    prompt = Prompt(prompt_id="p", task="addition", text="1+1=")
    lease = Lease(
        lease_id=name, kind="train", visit_id=name, prompt=prompt, num_rollouts=2, temperature=1.0, expires_in_s=60
    )
    return Visit(lease=lease, prompt_tokens=(5, 6), pinned=None)


def make_leases(buffer: Any, backlog: Backlog, *delivering: str) -> tuple[Leases, Status]:
    delivery: Any = Delivering(*delivering)
    status = Status(searcher_id="s", run="r", waits=Waits())
    return Leases(buffer=buffer, renewals=buffer, backlog=backlog, delivery=delivery, status=status), status


def make_backlog(*names: str) -> Backlog:
    backlog = Backlog(SearcherSection(max_response_tokens=4), run_seed=0, eos_ids=(1,))
    for name in names:
        backlog.add(make_visit(name))
    return backlog


async def test_a_lost_lease_ends_its_visit_only_if_the_visit_is_not_begun() -> None:
    backlog = make_backlog("begun", "lost", "held")
    assert [request.request_id for request in backlog.take(1, pinned=None)] == ["begun/1"]
    buffer = RecordedBuffer("begun", "lost", "delivering")
    leases, _ = make_leases(buffer, backlog, "delivering")
    await leases.renew()
    assert buffer.renewed == [["begun", "delivering", "held", "lost"]]
    assert [visit.lease.lease_id for visit in backlog.open_visits()] == ["begun", "held"]
    assert [request.request_id for request in backlog.take(9, pinned=None)] == ["begun/2", "held/1", "held/2"]


async def test_a_renewal_that_fails_loses_nothing() -> None:
    backlog = make_backlog("a")
    buffer = RecordedBuffer("a")
    buffer.away = True
    leases, status = make_leases(buffer, backlog)
    await leases.renew()
    await leases.give_back(["a"], refused=["b"])
    assert len(backlog.open_visits()) == 1
    assert status.counts["leases_returned"] == 0


async def test_many_leases_go_in_portions_and_no_lease_means_no_request() -> None:
    buffer = RecordedBuffer()
    leases, status = make_leases(buffer, make_backlog())
    await leases.renew()
    await leases.give_back([])
    assert (buffer.renewed, buffer.returned) == ([], [])
    ids = [f"lease-{number}" for number in range(MAX_LEASE_IDS + 1)]
    await leases.give_back(ids, refused=ids[:2])
    assert [len(part) for part in buffer.returned] == [MAX_LEASE_IDS, 1, 0]
    assert buffer.refused == [[], [], ids[:2]]
    assert status.counts["leases_returned"] == MAX_LEASE_IDS + 1

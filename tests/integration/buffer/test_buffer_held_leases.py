"""Lease requests that wait at the buffer: for room, evaluations, a new weight version, or the end of the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
from tba_buffer.prompts.leases import MAX_HELD

from tba.api import EvalRequest, LeaseReply, LeaseRequest, LeaseReturn, LineageReply, RunCommand, VersionRequest
from tba.clients import BufferClient
from tba.versions import PolicyVersion
from tba.wire import encode_rollout
from tests.support.buffer import make_rollout, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.leases import draw, fulfil, lease, request_eval
from tests.support.metrics import values
from tests.support.waits import until

FLOW = {"samples_per_insert": 1.0, "samples_per_insert_error": 16, "prompts_per_batch": 2, "min_size_to_sample": 8}
"""Room for four visits of four rollouts, and for two more with each batch."""
WAIT_S = 20.0
"""Longer than any test waits."""


def hold(buffer: BufferThread, *, searcher_id: str = "s2", min_leases: int = 1, wait_s: float = WAIT_S) -> LeaseReply:
    wanted: Any = {"max_leases": 8, "min_leases": min_leases, "wait_s": wait_s, "known_version": "0-0"}
    return buffer.client().lease(LeaseRequest(searcher_id=searcher_id, **wanted))


def full(serve_buffer: ServeBuffer, **sections: Any) -> tuple[BufferThread, BufferClient, LineageReply]:
    """Begin a run, and use up its room: four visits, which are fulfilled."""
    buffer = serve_buffer(sampling=FLOW, **sections)
    client, lineage = buffer.begin(40, 4)
    for item in lease(client, 20).leases:
        fulfil(client, item)
    assert lease(client).wait == "trainer-ahead"
    return buffer, client, lineage


def until_held(buffer: BufferThread, num_requests: int) -> None:
    """Wait until so many requests have arrived, and have had time to get what they should not get."""
    until("all have arrived", lambda: values(buffer.url, "tba_requests_in_flight").get(("lease",), 0) == num_requests)
    time.sleep(0.3)


def answer_after(buffer: BufferThread, act: Callable[[], object], **changes) -> LeaseReply:
    """Hold a request, see that it waits, act, and return its answer."""
    with ThreadPoolExecutor(1) as pool:
        answer: Future[LeaseReply] = pool.submit(hold, buffer, **changes)
        until_held(buffer, 1)
        assert not answer.done()
        begin = time.monotonic()
        act()
        reply = answer.result(WAIT_S)
        assert time.monotonic() - begin < 15.0, "something else than the act has ended the wait"
        return reply


def test_a_held_request_waits_for_as_many_visits_as_it_asks_for(serve_buffer: ServeBuffer) -> None:
    buffer, client, lineage = full(serve_buffer)
    draw(client, lineage, 1)
    assert len(answer_after(buffer, lambda: draw(client, lineage, 2), min_leases=4).leases) == 4


def test_held_requests_share_the_room_of_a_draw(serve_buffer: ServeBuffer) -> None:
    """Each asks for eight visits. Without sharing the first one gets both, and the other waits for the next draw."""
    buffer, client, lineage = full(serve_buffer)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(hold, buffer, searcher_id=name) for name in ("s2", "s3")]
        until_held(buffer, 2)
        assert not any(answer.done() for answer in answers)
        draw(client, lineage, 1)
        assert [len(answer.result(15.0).leases) for answer in answers] == [1, 1]
    # alone, a request has all of it
    assert len(answer_after(buffer, lambda: draw(client, lineage, 2)).leases) == 2


def test_a_held_request_that_wants_a_round_gets_no_less(serve_buffer: ServeBuffer) -> None:
    """One round is decoded together, so a share is not below it: the others wait for the next room."""
    buffer, client, lineage = full(serve_buffer)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(hold, buffer, searcher_id=name, min_leases=2) for name in ("s2", "s3")]
        until_held(buffer, 2)
        draw(client, lineage, 1)
        until("one has its answer", lambda: any(answer.done() for answer in answers))
        until_held(buffer, 1)
        assert sorted(answer.done() for answer in answers) == [False, True]
        draw(client, lineage, 2)
        assert [len(answer.result(15.0).leases) for answer in answers] == [2, 2]


def test_a_held_request_has_all_where_the_rest_is_too_little_for_the_others(serve_buffer: ServeBuffer) -> None:
    """Two visits: one each would leave one that nobody takes."""
    buffer, client, lineage = full(serve_buffer)
    with ThreadPoolExecutor(2) as pool:
        small = pool.submit(hold, buffer, searcher_id="s2")
        until_held(buffer, 1)
        large = pool.submit(hold, buffer, searcher_id="s3", min_leases=2)
        until_held(buffer, 2)
        draw(client, lineage, 1)
        until("one has its answer", lambda: small.done() or large.done())
        until_held(buffer, 1)
        assert sorted(answer.done() for answer in (small, large)) == [False, True]
        done, waiting = (small, large) if small.done() else (large, small)
        assert len(done.result().leases) == 2
        draw(client, lineage, 2)
        assert len(waiting.result(15.0).leases) == 2


def test_a_held_request_gets_what_there_is_when_its_time_is_over(serve_buffer: ServeBuffer) -> None:
    buffer, client, lineage = full(serve_buffer)
    draw(client, lineage, 1)
    begin = time.monotonic()
    assert len(hold(buffer, min_leases=4, wait_s=0.5).leases) == 2
    assert time.monotonic() - begin >= 0.5
    reply = hold(buffer, wait_s=0.5)
    assert (reply.leases, reply.wait, reply.retry_after_s) == ([], "trainer-ahead", 0.0)


@pytest.mark.parametrize("act", ["a version", "an evaluation", "done", "fail"])
def test_a_held_request_is_answered_at_once_by(serve_buffer: ServeBuffer, act) -> None:
    buffer, client, lineage = full(serve_buffer)
    if act == "a version":
        version = VersionRequest(version="1-0", token=lineage.token)
        reply = answer_after(buffer, lambda: client.announce_version(version))
        assert (reply.leases, reply.latest_version) == ([], "1-0")
    elif act == "an evaluation":
        reply = answer_after(buffer, lambda: request_eval(client, lineage), min_leases=4)
        assert {item.kind for item in reply.leases} in ({"sample"}, {"greedy"}, {"sample", "greedy"})
    else:
        reply = answer_after(buffer, lambda: client.command(act, RunCommand(token=lineage.token, reason="test")))
        assert reply.run_state == {"done": "done", "fail": "failed"}[act]


def test_a_held_request_gets_what_another_searcher_returns(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer(sampling=FLOW)
    client, _ = buffer.begin(40)
    held = [item.lease_id for item in lease(client, 20).leases]
    back = LeaseReturn(searcher_id="s1", lease_ids=held[:1])
    assert len(answer_after(buffer, lambda: client.return_leases(back)).leases) == 1


def test_a_paused_run_holds_requests_until_it_goes_on(serve_buffer: ServeBuffer) -> None:
    buffer, client, lineage = full(serve_buffer)
    draw(client, lineage, 1)
    client.command("pause", RunCommand())
    assert len(answer_after(buffer, lambda: client.command("resume", RunCommand())).leases) == 2


def test_many_requests_at_once_hold_no_more_places_than_there_are(serve_buffer: ServeBuffer) -> None:
    """So hundreds of searchers that wait cost the buffer no more than those that are held."""
    buffer, client, lineage = full(serve_buffer)
    with ThreadPoolExecutor(3 * MAX_HELD) as pool:
        asked = [pool.submit(hold, buffer, searcher_id=f"s{i}") for i in range(3 * MAX_HELD)]
        until("the rest is answered", lambda: sum(answer.done() for answer in asked) >= 2 * MAX_HELD, deadline_s=15)
        until_held(buffer, MAX_HELD)
        replies = [answer.result() for answer in asked if answer.done()]
        assert [(reply.leases, reply.wait) for reply in replies] == [([], "trainer-ahead")] * 2 * MAX_HELD
        assert all(reply.retry_after_s > 0 for reply in replies), "they have waited as long as those that are held"
        client.command("done", RunCommand(token=lineage.token, reason="test"))


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
def test_leases_of_a_dead_searcher_expire_where_they_fill_the_room(serve_buffer: ServeBuffer, wait_s: float) -> None:
    """Else the trainer would wait for rollouts, and every searcher for the trainer, for ever."""
    buffer = serve_buffer(sampling=FLOW, buffer={"lease_s": 1.0})
    client, _ = buffer.begin(40)
    held = {item.visit_id for item in lease(client, 20).leases}
    deadline, found = time.monotonic() + WAIT_S, set[str]()
    while found != held and time.monotonic() < deadline:
        found |= {item.visit_id for item in hold(buffer, wait_s=wait_s).leases}
        time.sleep(0.1)
    assert found == held


@pytest.mark.parametrize("state", ["running", "stopping"])
def test_units_of_a_dead_searcher_expire_where_there_is_no_room(serve_buffer: ServeBuffer, state: str) -> None:
    buffer, client, lineage = full(serve_buffer, buffer={"lease_s": 1.0})
    request_eval(client, lineage)
    units = {item.visit_id for item in lease(client, 20).leases}
    assert units
    if state == "stopping":
        client.command("stop", RunCommand())
    deadline, found = time.monotonic() + WAIT_S, set[str]()
    while found != units and time.monotonic() < deadline:
        found |= {item.visit_id for item in hold(buffer, wait_s=1.0).leases}
    assert found == units


@pytest.mark.parametrize("wait_s", [0.0, 2.0])
def test_a_repeated_request_gets_the_leases_that_took_all_the_room(serve_buffer: ServeBuffer, wait_s: float) -> None:
    client, _ = serve_buffer(sampling=FLOW).begin(40)
    request = LeaseRequest(searcher_id="s1", max_leases=20, min_leases=2, wait_s=wait_s, known_version="0-0")
    first = client.lease(request)
    assert len(first.leases) == 4
    again = client.lease(request)
    assert [item.lease_id for item in again.leases] == [item.lease_id for item in first.leases]


def test_a_searcher_that_hung_up_gets_nothing(serve_buffer: ServeBuffer) -> None:
    """Nobody would work on its leases until they expire, and the whole run would wait for that."""
    buffer, client, lineage = full(serve_buffer)
    connection = HTTPConnection(urlsplit(buffer.url).netloc, timeout=WAIT_S)
    request = LeaseRequest(searcher_id="gone", max_leases=8, wait_s=WAIT_S, known_version="0-0")
    connection.request("POST", "/v1/leases", request.model_dump_json(), {"content-type": "application/json"})
    until_held(buffer, 1)
    connection.close()
    until("it is let go", lambda: not values(buffer.url, "tba_requests_in_flight").get(("lease",), 0), deadline_s=10)
    draw(client, lineage, 1)
    assert len(hold(buffer).leases) == 2


def test_with_a_lag_searchers_hear_of_an_older_version_and_evaluations_of_the_newest(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer(sampling={"lag_steps": 3}, trainer={"sync_interval": 2}).begin(20, 3)

    def told_after(step: int) -> str | None:
        client.announce_version(VersionRequest(version=f"{lineage.lineage}-{step}", token=lineage.token))
        visit = lease(client, 1).leases[0]
        told = lease(client).latest_version
        rollout = make_rollout(visit.prompt.prompt_id, visit_id=visit.visit_id, searcher_id="s1")
        assert client.push([encode_rollout(rollout)]).latest_version == told
        return told

    assert [told_after(step) for step in (2, 4, 6, 8, 9)] == ["0-0", "0-0", "1-2", "1-4", "1-6"]
    info = client.run()
    assert (info.latest_version, info.sampling_version) == ("1-9", "1-6")
    assert client.request_eval(EvalRequest(num_prompts=3)).version == "1-9"
    lineage = start_lineage(client, PolicyVersion(1, 8), mark=False)
    assert lease(client).latest_version == "1-6"
    assert [told_after(step) for step in (8, 10, 12, 13)] == ["2-8", "2-8", "2-8", "2-10"]
    assert told_after(11) == "2-10"  # not back to 2-8, which may be deleted

"""Leases: every visit is worked on by one searcher at a time, and none is lost with its searcher."""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis import Redis

from tba.api import EvalResult, EvalResults, Lease, LeaseRenewal, LeaseRequest, LeaseReturn, RunCommand, VersionRequest
from tba.clients import BufferClient
from tba.errors import ConflictError, UnauthorizedError
from tba.wire import encode_rollout
from tests.support.buffer import make_payloads, make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer, later
from tests.support.leases import fulfil, lease, request_eval
from tests.support.metrics import values
from tests.support.waits import DEADLINE_S

FLOW = {"samples_per_insert": 1.0, "samples_per_insert_error": 16}


def open_work(raw: Redis) -> dict[str, int]:
    """Count the visits that are leased, or wait to be leased again, in Redis."""
    return {
        "visits": raw.hlen("tba:test:visits"),
        "returned": raw.llen("tba:test:returned"),
        "leases": raw.hlen("tba:test:leases"),
        "deadlines": raw.zcard("tba:test:lease_deadlines"),
        "inflight": int(raw.hget("tba:test:counters", "inflight") or 0),
    }


def test_an_upload_is_idempotent_and_changed_content_is_refused_whole(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    prompts = make_prompts(5, 2)
    assert client.upload_prompts(prompts).num_new == 7
    reply = client.upload_prompts(prompts[2:])
    assert (reply.num_new, reply.num_same, reply.num_train, reply.num_heldout) == (0, 5, 5, 2)
    changed = prompts[0].model_copy(update={"text": "something else"})
    new = prompts[0].model_copy(update={"prompt_id": "new"})
    with pytest.raises(ConflictError, match="train-0"):
        client.upload_prompts([new, changed])
    assert client.stats().num_prompts_train == 5


def test_leases_name_what_they_wait_for(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    assert lease(client).wait == "no-version"
    start_lineage(client)
    assert lease(client).wait == "no-prompts"
    client.upload_prompts(make_prompts(2))
    reply = lease(client)
    assert (len(reply.leases), reply.wait, reply.latest_version) == (4, None, "0-0")
    client.command("pause", RunCommand())
    reply = lease(client)
    assert (reply.leases, reply.wait, reply.run_state) == ([], "run-paused", "paused")


def test_an_epoch_leases_every_prompt_once_and_a_restart_continues_where_it_was(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer().begin(10, 3)
    first = lease(client, 4).leases
    again = serve_buffer().client()
    rest = lease(again, 6, "s2").leases
    assert {item.prompt.prompt_id for item in first + rest} == {f"train-{i}" for i in range(10)}
    assert len({item.visit_id for item in first + rest}) == 10
    assert all(item.kind == "train" and item.num_rollouts == 4 for item in first + rest)
    assert len({item.prompt.prompt_id for item in lease(again, 10).leases}) == 10


def test_an_expired_visit_comes_back_first_and_owes_only_what_is_missing(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer(buffer={"lease_s": 1000.0}).begin(10)
    done, partial, lost = lease(client, 3).leases
    fulfil(client, done)
    fulfil(client, partial, 3)
    later(client, 1001.0)
    again = lease(client, 3, "s2").leases
    assert {(item.visit_id, item.num_rollouts) for item in again[:2]} == {(partial.visit_id, 1), (lost.visit_id, 4)}
    assert again[2].visit_id not in {done.visit_id, partial.visit_id, lost.visit_id}
    stats = client.stats()
    assert (stats.leases["expired"], stats.leases["fulfilled"], stats.leases["open"]) == (2, 1, 3)
    fulfil(client, lost)  # the first searcher was only slow: its rollouts count, and the visit is fulfilled
    stats = client.stats()
    assert (stats.num_rollouts, stats.leases["fulfilled"], stats.leases["open"]) == (11, 2, 2)


def test_only_the_owner_returns_a_lease_and_it_is_given_out_at_once(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer().begin(10)
    (mine,) = lease(client, 1).leases
    client.return_leases(LeaseReturn(searcher_id="thief", lease_ids=[mine.lease_id]))
    assert lease(client, 1, "s2").leases[0].visit_id != mine.visit_id
    client.return_leases(LeaseReturn(searcher_id="s1", lease_ids=[mine.lease_id, "lease-of-nobody"]))
    client.return_leases(LeaseReturn(searcher_id="s1", lease_ids=[mine.lease_id]))
    (again,) = lease(client, 1, "s2").leases
    assert (again.visit_id, client.stats().leases["returned"]) == (mine.visit_id, 1)
    assert again.lease_id != mine.lease_id


def test_visits_that_cannot_be_sampled_end_and_make_room_for_those_that_can(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer(sampling=FLOW).begin(10)
    seen: list[str] = []
    while len(seen) < 10:
        leases = lease(client, 2).leases
        assert len(leases) == 2, "refused visits no longer count as leased, nor are they leased again"
        seen += [item.visit_id for item in leases]
        refused = [item.lease_id for item in leases]
        client.return_leases(LeaseReturn(searcher_id="s1", lease_ids=[], refused_lease_ids=refused))
    assert len(set(seen)) == 10
    stats = client.stats()
    assert (stats.leases["refused"], stats.leases["returned"], stats.leases["open"]) == (10, 0, 0)
    (mine,) = lease(client, 1).leases
    client.return_leases(LeaseReturn(searcher_id="thief", lease_ids=[], refused_lease_ids=[mine.lease_id]))
    assert client.stats().leases["refused"] == 10


def test_a_renewed_lease_outlives_its_deadline_and_a_lost_one_is_named(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer(buffer={"lease_s": 1000.0}).begin(10, 3)
    request_eval(client, lineage)
    renewed, *_, lost = lease(client, 9).leases  # an evaluation unit and a visit
    assert (renewed.kind, lost.kind) == ("sample", "train")
    later(client, 600.0)
    reply = client.renew_leases(LeaseRenewal(searcher_id="s1", lease_ids=[renewed.lease_id]))
    assert reply.lost_lease_ids == []
    later(client, 600.0)
    again = lease(client, 30, "s2").leases
    assert lost.visit_id in {item.visit_id for item in again}
    assert renewed.visit_id not in {item.visit_id for item in again}
    ids = [lost.lease_id, renewed.lease_id, "lease-of-nobody"]
    reply = client.renew_leases(LeaseRenewal(searcher_id="s1", lease_ids=ids))
    assert reply.lost_lease_ids == [lost.lease_id, "lease-of-nobody"]


def test_searchers_wait_while_the_trainer_is_behind(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer(sampling=FLOW).begin(20)
    leases = lease(client, 20).leases
    assert len(leases) == 4
    assert lease(client).wait == "trainer-ahead"
    client.return_leases(LeaseReturn(searcher_id="s1", lease_ids=[leases[0].lease_id]))
    assert [item.visit_id for item in lease(client, 20).leases] == [leases[0].visit_id]
    for item in leases:
        fulfil(client, item)
    assert lease(client).wait == "trainer-ahead"
    assert client.push(make_payloads(["train-0"])).outcomes[0].outcome == "new"


def test_searchers_that_ask_at_once_share_the_room(serve_buffer: ServeBuffer) -> None:
    buffer = serve_buffer(sampling=FLOW)
    buffer.begin(50)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: lease(buffer.client(), 3, f"s{i}"), range(8)))
    visits = [item.visit_id for reply in replies for item in reply.leases]
    assert len(visits) == len(set(visits)) == 4


def test_alternate_leases_one_interval_and_then_waits_for_the_next_mark(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer(sampling={"alternate": True}, trainer={"sync_interval": 2}).begin(20)
    leases = lease(client, 20).leases
    assert sum(item.num_rollouts for item in leases) == 32
    for item in leases:
        fulfil(client, item)
    assert lease(client).wait == "alternate-train"
    client.announce_version(VersionRequest(version="1-2", token=lineage.token))
    assert len(lease(client, 20).leases) == 8


def test_a_request_that_is_sent_again_gets_the_same_leases(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().with_prompts(20, 3)
    request_eval(client, start_lineage(client))
    request = LeaseRequest(searcher_id="s1", max_leases=9)
    first, again = client.lease(request), client.lease(request)
    assert {item.kind for item in first.leases} == {"train", "sample", "greedy"}
    assert again.leases == first.leases
    stats = client.stats()
    assert (stats.leases["granted"], stats.leases["open"]) == (9, 9)
    other = client.lease(LeaseRequest(searcher_id="s2", max_leases=3, request_id=request.request_id))
    assert not {item.visit_id for item in other.leases} & {item.visit_id for item in first.leases}


def test_a_request_that_is_sent_again_answers_what_it_still_holds(serve_buffer: ServeBuffer) -> None:
    """A proxy may repeat an old request. Some of its leases have ended then, and nothing may get lost by that."""
    client, _ = serve_buffer().begin(20)
    request = LeaseRequest(searcher_id="s1", max_leases=4)
    done, given_back, *held = client.lease(request).leases
    fulfil(client, done)
    fulfil(client, held[0], 1)
    client.return_leases(LeaseReturn(searcher_id="s1", lease_ids=[given_back.lease_id]))
    again = client.lease(request).leases
    assert [(item.lease_id, item.visit_id) for item in again] == [(item.lease_id, item.visit_id) for item in held]
    assert [item.num_rollouts for item in again] == [3, 4]
    assert client.stats().leases["open"] == 2
    assert lease(client, 1, "s2").leases[0].visit_id == given_back.visit_id


def test_a_request_that_is_sent_again_starts_the_deadline_again(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer(buffer={"lease_s": 1000.0}).begin(20)
    request = LeaseRequest(searcher_id="s1", max_leases=2)
    first = client.lease(request).leases
    for _ in range(2):
        later(client, 600.0)
        assert client.lease(request).leases == first
    lease(client, 1, "s2")  # expired ones come back first
    assert client.stats().leases["expired"] == 0
    later(client, 1001.0)
    lease(client, 1, "s2")
    assert client.stats().leases["expired"] == 3


def test_one_prompt_is_on_lease_hundreds_of_times_at_once(serve_buffer: ServeBuffer, raw: Redis) -> None:
    """Red-teaming has a single prompt: 256 searchers hold 400 visits of it, and every one gets its share."""
    buffer = serve_buffer(sampling={"rollouts_per_visit": 20})
    buffer.begin(1)
    clients = [buffer.client() for _ in range(16)]

    def ask(searcher: int) -> list[Lease]:
        return lease(clients[searcher % 16], 2 if searcher < 144 else 1, f"searcher-{searcher}").leases

    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(ask, range(256)))
    leases = [item for reply in replies for item in reply]
    assert [len(reply) for reply in replies] == [2] * 144 + [1] * 112
    assert len({item.visit_id for item in leases}) == len({item.lease_id for item in leases}) == 400
    assert {(item.prompt.prompt_id, item.num_rollouts) for item in leases} == {("train-0", 20)}
    assert open_work(raw) == {"visits": 400, "returned": 0, "leases": 400, "deadlines": 400, "inflight": 8000}
    epochs = sorted(int(item.visit_id.split("-")[1]) for item in leases)
    assert epochs == list(range(400))  # an epoch of one prompt is one visit


def test_many_searchers_that_ask_again_and_again_lose_and_double_nothing(serve_buffer: ServeBuffer, raw: Redis) -> None:
    """Leases that are fulfilled, half fulfilled, returned, refused, expired and asked for twice, all at once."""
    buffer = serve_buffer(buffer={"lease_s": 0.5}, sampling={"rollouts_per_visit": 3})
    client, _ = buffer.begin(7)
    refused, pushed = set[str](), Counter[str]()

    def push(mine: BufferClient, item: Lease, num: int, searcher_id: str) -> None:
        fulfil(mine, item, num, searcher_id)
        pushed[item.visit_id] += num

    def search(number: int) -> None:
        mine, rng = buffer.client(), random.Random(number)
        for _ in range(8):
            request = LeaseRequest(searcher_id=f"s{number}", max_leases=rng.randint(1, 4))
            leases = mine.lease(request).leases
            if rng.random() < 0.3:
                leases = mine.lease(request).leases
            for item in leases:
                match rng.randrange(5):
                    case 0 | 1:
                        push(mine, item, item.num_rollouts, f"s{number}")
                    case 2:
                        push(mine, item, 1, f"s{number}")
                    case 3:
                        mine.return_leases(LeaseReturn(searcher_id=f"s{number}", lease_ids=[item.lease_id]))
                    case 4:
                        refused.add(item.visit_id)
                        ids = [item.lease_id]
                        mine.return_leases(LeaseReturn(searcher_id=f"s{number}", lease_ids=[], refused_lease_ids=ids))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(search, range(8)))
    until = time.monotonic() + DEADLINE_S
    while any(open_work(raw).values()) and time.monotonic() < until:
        for item in lease(client, 8, "last").leases:  # expired and returned visits come first
            push(client, item, item.num_rollouts, "last")
    assert not any(open_work(raw).values())
    assert refused
    assert len(pushed) > 30
    assert {visit_id for visit_id, num in pushed.items() if num < 3} <= refused
    assert client.stats().num_rollouts == sum(pushed.values())


def test_posterior_selection_continues_after_a_restart_as_if_there_was_none(serve_buffer: ServeBuffer) -> None:
    """The choice is a function of seed, cursor and index: a process that takes over chooses the same."""
    visits = []
    for name in ("goes-on", "restarts"):
        client, _ = serve_buffer(run=name, data={"selection": "posterior"}).begin(50)
        leases = lease(client, 5).leases
        for item in leases:
            values: dict[str, Any] = {"run": name, "visit_id": item.visit_id}
            rollouts = [make_rollout(item.prompt.prompt_id, reward=float(i % 2), **values) for i in range(4)]
            client.push([encode_rollout(rollout) for rollout in rollouts])
        if name == "restarts":
            client = serve_buffer(run=name, data={"selection": "posterior"}).client()
        leases += lease(client, 20).leases
        visits.append([(item.visit_id, item.prompt.prompt_id) for item in leases])
    assert visits[0] == visits[1]


def test_a_lease_from_before_the_clock_went_back_ends_after_lease_s(serve_buffer: ServeBuffer, raw: Redis) -> None:
    client, _ = serve_buffer(buffer={"lease_s": 1000.0}).begin(4)
    held = lease(client, 2, "dead").leases
    key, ahead_s = "tba:test:lease_deadlines", time.time() + 1e6  # as after a clock that was 10^6 s ahead
    raw.zadd(key, {item.lease_id: ahead_s for item in held})
    lease(client, 1, "other")
    for item in held:
        assert float(raw.zscore(key, item.lease_id) or 0) <= time.time() + 1000.0
    assert client.stats().leases["open"] == 3


def test_a_push_counts_only_under_a_name_that_the_visit_was_leased_to(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer().begin(4)
    (mine,) = lease(client, 1, "s1").leases
    sampled = [
        encode_rollout(make_rollout(mine.prompt.prompt_id, visit_id=mine.visit_id, searcher_id=name))
        for name in ("thief", "s1")
    ]
    stolen, own = client.push(sampled).outcomes
    assert (stolen.outcome, own.outcome) == ("refused", "new")
    assert str(stolen.reason).startswith("not-leased: ")
    stats = client.stats()
    assert (stats.refused, stats.num_rollouts, stats.leases["open"]) == ({"not-leased": 1}, 1, 1)
    later(client, 10_000)
    (again,) = [item for item in lease(client, 4, "s2").leases if item.visit_id == mine.visit_id]
    assert again.num_rollouts == 3
    fulfil(client, again, 1, "s1")  # it was only slow
    fulfil(client, again, 2, "s2")
    assert client.stats().leases["fulfilled"] == 1


def test_acts_on_a_lease_of_another_searcher_change_nothing_and_are_counted(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(4, 3)
    evaluation = request_eval(client, lineage)
    leases = lease(client, 8, "s1").leases
    ids = [item.lease_id for item in leases]
    assert client.renew_leases(LeaseRenewal(searcher_id="thief", lease_ids=ids[:2])).lost_lease_ids == ids[:2]
    client.return_leases(LeaseReturn(searcher_id="thief", lease_ids=ids[:3]))
    item = next(item for item in leases if item.kind == "greedy")
    result = EvalResult(lease_id=item.lease_id, rewards=[1.0], num_response_tokens=[3])
    with pytest.raises(UnauthorizedError, match="was granted to another searcher, not to 'thief'"):
        client.eval_results(evaluation.eval_id, EvalResults(searcher_id="thief", version="0-0", results=[result]))
    assert client.stats().leases["open"] == len(leases)
    counted = {("renew",): 2, ("return",): 3, ("eval_results",): 1}
    assert values(client.base_url, "tba_buffer_foreign_writes_total") == counted
    client.eval_results(evaluation.eval_id, EvalResults(searcher_id="s1", version="0-0", results=[result]))
    assert client.stats().leases["fulfilled"] == 1

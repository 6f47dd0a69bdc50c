"""Rollouts as they are listed, read and sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
import pytest
from redis import Redis

from tba.api import Prompt, RolloutInfo
from tba.clients import BufferClient
from tba.errors import NotFoundError
from tba.versions import START, PolicyVersion
from tba.wire import RefLogprob, Rollout, Sampling, VersionSpan, encode_rollout
from tests.support.buffer import make_payloads, make_prompts, make_rollout, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.leases import draw, make_step


@pytest.fixture
def buffer(serve_buffer: ServeBuffer) -> BufferThread:
    return serve_buffer()


def problem(buffer: BufferThread, query: str) -> tuple[int, str]:
    reply = httpx2.get(f"{buffer.url}/v1/rollouts{query}", timeout=60)
    assert reply.headers["content-type"] == "application/problem+json"
    return reply.status_code, reply.json()["detail"]


@pytest.fixture
def varied(serve_buffer: ServeBuffer) -> BufferThread:
    """60 rollouts: prompts train-0 to train-3 and other-0, versions 0-0, 1-1, 1-2, searchers a and b, some texts."""
    served = serve_buffer()
    client = served.client()
    other = [Prompt(prompt_id="other-0", task="other", text="Wie groß?")]
    client.upload_prompts([*make_prompts(4), *other])
    start_lineage(client)
    versions = [START, PolicyVersion(1, 1), PolicyVersion(1, 2)]
    rollouts = [
        make_rollout(
            "other-0" if n % 5 == 4 else f"train-{n % 5}",
            task="other" if n % 5 == 4 else "addition",
            version=versions[n % 3],
            reward=None if n % 10 == 9 else float(n % 7),
            searcher_id="a" if n % 4 else "b",
            finish_reason="length" if n % 6 == 0 else "stop",
            response_text=f"Answer {n}",
        )
        for n in range(60)
    ]
    client.push([encode_rollout(rollout) for rollout in rollouts])
    return served


def walk(client: BufferClient, *, limit: int, **query: Any) -> list[RolloutInfo]:
    """Every rollout of all pages."""
    found, cursor = [], None
    while True:
        page = client.list_rollouts(limit=limit, cursor=cursor, **query)
        assert len(page.rollouts) <= limit
        found += page.rollouts
        cursor = page.next
        if cursor is None:
            return found


def number(info: RolloutInfo) -> int:
    return int(info.response_text.removeprefix("Answer "))


FILTERS: list[tuple[dict[str, Any], Callable[[int], bool]]] = [
    ({}, lambda n: True),
    ({"prompt_id": "train-2"}, lambda n: n % 5 == 2),
    ({"version": "1-1"}, lambda n: n % 3 == 1),
    ({"status": "scored", "prompt_id": "train-3", "version": "0-0"}, lambda n: n % 5 == 3 and n % 3 == 0),
    ({"task": "other"}, lambda n: n % 5 == 4),
    ({"task": "nothing"}, lambda n: False),
    ({"from_version": "0-7"}, lambda n: n % 3 > 0),
    ({"from_version": "1-1", "to_version": "1-1"}, lambda n: n % 3 == 1),
    ({"to_version": "1-1"}, lambda n: n % 3 < 2),
    ({"min_reward": 3, "max_reward": 4.5}, lambda n: n % 10 != 9 and n % 7 in (3, 4)),
    ({"max_reward": 1}, lambda n: n % 10 != 9 and n % 7 < 2),
    ({"searcher_id": "b"}, lambda n: n % 4 == 0),
    ({"searcher_id": "nobody"}, lambda n: False),
    ({"finish_reason": "length"}, lambda n: n % 6 == 0),
    ({"contains": "ANSWER 1"}, lambda n: str(n).startswith("1")),
    ({"contains": "GROSS"}, lambda n: n % 5 == 4),
    ({"contains": "3+3="}, lambda n: n % 5 == 3),
    ({"searcher_id": "b", "task": "addition", "min_reward": 1}, lambda n: not n % 4 and n % 5 != 4 and n % 7 > 0),
]


@pytest.mark.parametrize("order", ["newest", "best", "worst"])
def test_every_filter_selects_what_it_says_over_all_pages(varied: BufferThread, order: str) -> None:
    client = varied.client()
    for query, matches in FILTERS:
        found = walk(client, limit=3, order=order, **query)
        expected = [n for n in range(60) if matches(n) and (order == "newest" or n % 10 != 9)]
        sign = {"newest": 0, "best": -1, "worst": 1}[order]
        expected.sort(key=lambda n: (sign * (n % 7), -n))
        assert [number(info) for info in found] == expected, query
    assert walk(client, limit=3, min_reward=0, status="pending") == []
    assert [number(info) for info in walk(client, limit=3, status="pending")] == [59, 49, 39, 29, 19, 9]
    assert walk(client, limit=3, status="failed") == []


def test_a_page_reads_a_bounded_number_of_rollouts_and_the_next_one_continues_behind_them(
    varied: BufferThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba_buffer.rollouts.queries.MAX_READ", 7)
    client = varied.client()
    page = client.list_rollouts(order="oldest", contains="answer 9", limit=5)
    assert (page.rollouts, page.num_read) == ([], 7)
    page = client.list_rollouts(order="oldest", contains="answer 9", limit=5, cursor=page.next)
    assert ([number(info) for info in page.rollouts], page.num_read) == ([9], 7)
    assert [number(info) for info in walk(client, order="oldest", contains="answer 9", limit=5)] == [9]
    page = client.list_rollouts(order="oldest", searcher_id="a", limit=2)
    assert ([number(info) for info in page.rollouts], page.num_read) == ([1, 2], 3), "what is not shown is not read"
    assert client.list_rollouts(limit=4).num_read == 4


def test_large_payloads_are_read_a_few_at_a_time(varied: BufferThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_buffer.rollouts.queries.CHUNK_BYTES", 1000)
    assert len(walk(varied.client(), limit=20)) == 60
    assert len(walk(varied.client(), limit=20, searcher_id="b")) == 15


def test_a_damaged_rollout_matches_no_payload_filter_and_is_shown_without_one(varied: BufferThread, raw: Redis) -> None:
    client = varied.client()
    bad = client.list_rollouts(limit=1).rollouts[0].rollout_id
    raw.hset("tba:test:payloads", bytes.fromhex(bad), b"\x00junk")  # pyright: ignore[reportArgumentType]
    assert bad not in {info.rollout_id for info in walk(client, limit=50, contains="answer")}
    assert client.list_rollouts(limit=1).rollouts[0].reward_status == "failed"
    detail = client.get_rollout(bad)
    assert (detail.rollout_id, detail.searcher_id) == (bad, "unreadable")


def test_parts_and_batches_of_a_rollout_are_shown(serve_buffer: ServeBuffer) -> None:
    scorers = [{"kind": "format", "pattern": "x", "gate": 1.0}, {"kind": "exact", "weight": 0.5}]
    client, lineage = serve_buffer(reward={"tasks": {"addition": {"scorers": scorers}}}).begin(4)
    parts = {"format": 1.0, "exact": 2.0, "older": 3.0}
    client.push(make_payloads([f"train-{i}" for i in range(4)], reward_parts=parts))
    assert {info.num_batches for info in client.list_rollouts().rollouts} == {0}
    draw(client, lineage, wait_s=2)
    for info in client.list_rollouts().rollouts:
        shown = [(part.name, part.score, part.weight) for part in info.reward_parts or []]
        assert shown == [("format", 1.0, 0.0), ("exact", 2.0, 0.5), ("older", 3.0, None)]
        assert info.num_batches == 1
        detail = client.get_rollout(info.rollout_id)
        assert (detail.reward_parts, detail.num_batches) == (info.reward_parts, 1)


def test_one_rollout_is_shown_whole(serve_buffer: ServeBuffer) -> None:
    client, _ = serve_buffer().begin(1)
    rollout: Rollout = make_rollout(
        num_tokens=5,
        response_text="x" * 2000 + "é",
        version_spans=(VersionSpan.of(START, 0, 2), VersionSpan.of(PolicyVersion(1, 4), 2, 5)),
        sampling=Sampling.of(0.7, top_p=0.9, top_k=40, seed=3, stop=("\n",)),
        sampler_logprobs=np.array([-0.1, -0.2, -0.3, -0.4, -0.5], dtype=np.float32),
        ref_logprob=RefLogprob.of(-2.5, START),
    )
    client.push([encode_rollout(rollout)])
    detail = client.get_rollout(rollout.rollout_id.hex())
    assert (detail.version, [span.version for span in detail.version_spans]) == ("0-0", ["0-0", "1-4"])
    assert (detail.response_tokens, detail.prompt_tokens) == ([1, 2, 3, 4, 5], [5, 6, 7])
    np.testing.assert_array_equal(np.array(detail.sampler_logprobs, dtype=np.float32), rollout.sampler_logprobs)
    assert detail.ref_logprob is not None
    assert (detail.ref_logprob.value, detail.ref_logprob.version) == (-2.5, "0-0")
    assert (detail.response_text, detail.response_text_cut) == (rollout.response_text, False)
    assert detail.sampling.model_dump() == {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 3, "stop": ["\n"]}
    (info,) = client.list_rollouts(text_chars=10).rollouts
    assert (info.response_text, info.response_text_cut, info.num_response_tokens) == ("x" * 10, True, 5)
    assert info.rollout_id == detail.rollout_id


def test_policy_age_is_that_of_now(serve_buffer: ServeBuffer) -> None:
    client, lineage = serve_buffer().begin(4)
    client.push([encode_rollout(make_rollout(f"train-{i}", reward=1.0)) for i in range(4) for _ in range(4)])
    assert client.list_rollouts().rollouts[0].policy_age_steps == 0
    for step in (1, 2):
        make_step(client, lineage, step)
    assert client.list_rollouts().rollouts[0].policy_age_steps == 2


def test_what_is_not_stored_is_not_found(buffer: BufferThread) -> None:
    with pytest.raises(NotFoundError, match=f"rollout {'0' * 32} is not stored"):
        buffer.client().get_rollout("0" * 32)
    assert problem(buffer, "?prompt_id=train-99") == (404, "prompt_id 'train-99' was never uploaded")
    assert problem(buffer, "/xyz")[0] == 422


def test_queries_that_cannot_be_meant_name_the_parameter_and_the_value(buffer: BufferThread) -> None:
    for query, status, said in [
        ("?cursor=junk", 400, "cursor 'junk' cannot be used: it is not a cursor"),
        ("?from_version=1-3&to_version=0-9", 400, "from_version 1-3 is after to_version 0-9; exchange them"),
        ("?min_reward=2&max_reward=1", 400, "min_reward 2.0 is above max_reward 1.0; exchange them"),
        ("?min_reward=nan", 422, "min_reward"),
        ("?contains=", 422, "contains"),
        ("?contains=" + "x" * 201, 422, "contains"),
        ("?finish_reason=bored", 422, "finish_reason"),
        ("?order=best&status=pending", 400, "rollouts of status 'pending' have none"),
        ("?order=median", 422, "order: Input should be 'best', 'worst', 'newest' or 'oldest' (value 'median')"),
        ("?limit=101", 422, "limit"),
        ("?version=1", 422, "version"),
        ("?version=01-2", 422, "policy version '01-2'"),
    ]:
        found = problem(buffer, query)
        assert found[0] == status, query
        assert said in found[1], query

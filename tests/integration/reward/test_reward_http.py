"""Kind `http`: a real endpoint that answers, refuses, is slow, busy, away, or talks nonsense."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tba_reward.scorer import OK, Failure, Item, Outcome, Scorer
from tba_reward.scorers import Tools, http

from tba.config.reward import HttpSpec
from tba.errors import ConfigError
from tests.support.redis_process import free_port
from tests.support.reward_server import RewardServer


@pytest.fixture
def server() -> Iterator[RewardServer]:
    server = RewardServer()
    server.score = lambda item: float(len(item["response"]))
    yield server
    server.stop()


def build(server_url: str, **spec: object) -> http.HttpScorer:
    tools = Tools(pool=None, models=None)  # type: ignore[arg-type]  # this kind uses neither
    return http.build(HttpSpec(kind="http", **{"url": f"{server_url}/v1/score", "timeout_s": 20.0, **spec}), tools)  # type: ignore[arg-type]


async def scored(scorer: Scorer, *responses: str) -> list[Outcome]:
    try:
        return await scorer.score([Item(prompt="p", response=r, data={"n": 1}) for r in responses])
    finally:
        await scorer.close()


def reason(outcome: Outcome) -> str:
    assert isinstance(outcome, Failure), outcome
    return outcome.reason


async def test_items_go_out_in_batches_and_come_back_in_order(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDPOINT_TOKEN", "secret")
    monkeypatch.setattr(http, "MAX_BATCH_ITEMS", 2)
    scorer = build(server.url, task="mine", token_env="ENDPOINT_TOKEN")
    await scorer.start()
    assert scorer.health() == OK
    assert await scored(scorer, "a", "bb", "ccc", "dddd", "lone \ud800") == [1.0, 2.0, 3.0, 4.0, 6.0]
    assert sorted(len(items) for items in server.requests) == [1, 2, 2]
    assert server.tokens == {"Bearer secret"}
    item = server.asked[0]
    assert item["task"] == "mine"
    assert (item["prompt"], item["data"], item["finish_reason"]) == ("p", {"n": 1}, "stop")


async def test_an_error_of_the_endpoint_keeps_its_reason(server: RewardServer) -> None:
    answers: dict[str, float | str] = {"a": "bad_data", "b": "its own words", "c": 1.0}
    server.score = lambda item: answers[item["response"]]
    first, second, third = await scored(build(server.url), "a", "b", "c")
    assert (reason(first), reason(second), third) == ("bad_data", "exception", 1.0)
    assert isinstance(second, Failure)
    assert "its own words" in second.detail


async def test_no_reward_and_no_number_are_no_score(server: RewardServer) -> None:
    answers = {"a": None, "b": float("inf"), "c": 0.5}
    server.refusal = lambda items: (
        200,
        {
            "results": [
                {"item_id": i["item_id"], "reward": answers[i["response"]]} for i in items if i["response"] != "d"
            ]
        },
    )
    outcomes = await scored(build(server.url), "a", "b", "c", "d")
    assert [reason(outcomes[at]) for at in (0, 1, 3)] == ["abstained", "not_finite", "exception"]
    assert outcomes[2] == 0.5


HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (b'"reward": NaN', "not_finite"),
        (b'"reward": -Infinity', "not_finite"),
        (b'"reward": 1e999', "not_finite"),
        (b'"reward": ' + HUGE.encode(), "not_finite"),
        (b'"reward": "0.5"', "exception"),
        (b'"reward": true', "exception"),
        (b'"reward": [0.5]', "exception"),
        (b'"reward": null, "error": "\xff no text"', "exception"),
        (b'"error": {"reason": ["bad_data"], "detail": 1}', "exception"),
        (b'"error": {"reason": "bad_data", "detail": null}', "bad_data"),
    ],
    ids=["nan", "infinite", "overflows", "digits", "text", "true", "list", "bytes", "odd-error", "no-detail"],
)
async def test_what_is_wrong_in_one_result_fails_that_item_alone(
    monkeypatch: pytest.MonkeyPatch, result: bytes, expected: str
) -> None:
    results = [b'{"item_id": "%d", "reward": %d}' % (number, number) for number in range(64)]
    results[7] = b'{"item_id": "7", %s}' % result
    body = b'{"results": [%s]}' % b", ".join(results)
    scorer = build("http://judge")
    monkeypatch.setattr(scorer, "_post", lambda sent, deadline_s: http._Answer(200, 0.0, body))
    outcomes = await scored(scorer, *["r"] * 64)
    assert reason(outcomes[7]) == expected
    assert outcomes[:7] + outcomes[8:] == [float(number) for number in range(64) if number != 7]


@pytest.mark.parametrize(
    "document", [{}, {"results": {}}, {"results": [{"reward": 1.0}]}, {"results": [{"item_id": 0}]}]
)
async def test_an_answer_that_is_none_is_no_score(server: RewardServer, document: dict) -> None:
    server.refusal = lambda items: (200, document)
    assert [reason(outcome) for outcome in await scored(build(server.url), "a", "b")] == ["exception"] * 2


async def test_the_item_that_a_batch_is_refused_for_stands_alone(server: RewardServer) -> None:
    server.refusal = lambda items: (
        (422, {"detail": "I do not like x"}) if any(i["response"] == "x" for i in items) else None
    )
    outcomes = await scored(build(server.url), "a", "bb", "x", "dddd", "eeeee")
    assert reason(outcomes[2]) == "malformed"
    assert outcomes[:2] + outcomes[3:] == [1.0, 2.0, 4.0, 5.0]
    assert "I do not like x" in str(outcomes[2])


async def test_busy_and_broken_endpoints_are_asked_again(server: RewardServer) -> None:
    answers = iter([(429, {}), (503, {}), None])
    server.refusal = lambda items: next(answers)
    assert await scored(build(server.url), "a", "bb") == [1.0, 2.0]
    assert len(server.requests) == 3


async def test_retries_are_bounded(server: RewardServer) -> None:
    server.refusal = lambda items: (500, {"detail": "always"})
    scorer = build(server.url)
    outcomes = await scored(scorer, "a", "b")
    assert [reason(outcome) for outcome in outcomes] == ["unreachable"] * 2
    assert len(server.requests) == 3
    assert "500" in scorer.health()


@pytest.mark.parametrize("status", [302, 401, 404])
async def test_what_a_repetition_would_not_change_is_not_repeated(server: RewardServer, status: int) -> None:
    server.refusal = lambda items: (status, {"detail": "no"})
    (outcome,) = await scored(build(server.url), "a")
    assert reason(outcome) == "exception"
    assert str(status) in str(outcome)
    assert len(server.requests) == 1


async def test_a_hung_endpoint_costs_the_deadline_and_only_its_batch(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()

    def hold(item: dict) -> float:
        if item["response"] == "slow":
            held.wait(60)
        return float(len(item["response"]))

    server.score = hold
    monkeypatch.setattr(http, "MAX_BATCH_ITEMS", 1)
    monkeypatch.setattr(http, "MAX_CONCURRENT", 2)
    scorer = build(server.url, timeout_s=5.0)
    outcomes = await scored(scorer, "slow", "bb", "ccc")
    held.set()
    assert reason(outcomes[0]) == "unreachable"
    assert outcomes[1:] == [2.0, 3.0]


@pytest.mark.parametrize("begin", [b"x-drop: ", b"content-length: 100000\r\n\r\n"], ids=["header", "body"])
async def test_an_endpoint_that_drips_ends_at_the_deadline(begin: bytes) -> None:
    """Every read gets a byte in time, which renews the timeout of the socket; the whole answer never comes."""
    over = asyncio.Event()

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + begin)
        with suppress(OSError):
            while not over.is_set():
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.02)
        over.set()
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(60):
        (outcome,) = await scored(build(f"http://127.0.0.1:{port}", timeout_s=0.3), "a")
        assert reason(outcome) == "unreachable"
        if b"content-length" in begin:
            await over.wait()  # the connection is given up
    over.set()
    server.close()


async def test_an_endpoint_that_is_away_is_unreachable_until_it_comes_back(server: RewardServer) -> None:
    scorer = build(server.url)
    server.leave()
    await scorer.start()
    assert "no connection" in scorer.health()
    (outcome,) = await scorer.score([Item(prompt="", response="a")])
    assert reason(outcome) == "unreachable"
    server.come_back()
    assert await scored(scorer, "a") == [1.0]
    assert scorer.health() == OK


async def test_what_a_failed_call_says_has_no_secret_of_the_address(server: RewardServer) -> None:
    address = server.url.replace("http://", "http://me:PASSWORD@") + "/mine?api_key=SECRET&x="
    server.refusal = lambda items: (500, {"detail": "POST /mine?api_key=SECRET&x=/v1/score failed"})
    scorer = build(address)
    (echoed,) = await scorer.score([Item(prompt="", response="a")])
    told = scorer.health()
    server.leave()
    (away,) = await scorer.score([Item(prompt="", response="a")])
    for text in (str(echoed), told, str(away), scorer.health()):
        assert f"{server.url}/mine" in text
        assert "SECRET" not in text
        assert "PASSWORD" not in text
    server.come_back()
    await scorer.close()


def test_a_failure_names_no_secret_whoever_made_it() -> None:
    said = "exception: Client error '401' for url 'http://u:PASSWORD@judge/v1?api_key=SECRET'"
    assert Failure("exception", said).detail == "exception: Client error '401' for url 'http://judge/v1"


async def test_a_missing_token_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENDPOINT_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="ENDPOINT_TOKEN is not set"):
        build(f"http://127.0.0.1:{free_port()}", token_env="ENDPOINT_TOKEN")


async def test_the_version_holds_the_address_with_its_query(server: RewardServer) -> None:
    versions = {
        build(server.url).version,
        build(server.url, url=f"{server.url}/v1/score?v=2").version,
        build(server.url, task="other").version,
        build(f"{server.url}/elsewhere").version,
    }
    assert len(versions) == 4
    assert build(server.url).version == build(server.url).version


async def test_a_deadline_that_has_passed_asks_nobody(server: RewardServer) -> None:
    scorer = build(server.url)
    assert reason(scorer._ask([Item(prompt="", response="a")], time.monotonic() - 1.0)[0]) == "unreachable"
    assert server.requests == []
    await scorer.close()

"""The clients against a real HTTP server with prepared answers."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tba.api import LeaseRequest, ScoreItem
from tba.clients import BufferClient, RewardClient
from tba.errors import (
    BadReplyError,
    BadRequestError,
    BusyError,
    ConfigError,
    ConflictError,
    FencedError,
    NotFoundError,
    RunOverError,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
)
from tba.server.problems import TYPE_PREFIX
from tests.support.answering import Answer, answering


def problem(status: int, slug: str, **extra: Any) -> Answer:
    return status, {"type": TYPE_PREFIX + slug, "title": "t", "status": status, "detail": "the detail", **extra}


LEASE = LeaseRequest(searcher_id="s", max_leases=1)
LEASED = (200, {"leases": [], "latest_version": None, "run_state": "running"})
TIMEOUT = {"reason": "timeout", "detail": ""}
ITEMS = [ScoreItem(item_id=name, task="exact", prompt="p", response="r") for name in ("a", "b")]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem(409, "fenced"), FencedError),
        (problem(409, "run-over"), RunOverError),
        (problem(409, "conflict"), ConflictError),
        (problem(404, "not-found"), NotFoundError),
        (problem(401, "unauthorized"), UnauthorizedError),
        (problem(413, "too-large"), BadRequestError),
        (problem(422, "malformed"), BadRequestError),
        (problem(503, "unavailable"), UnavailableError),
        ((500, b"<html>a proxy</html>"), UnavailableError),
    ],
)
def test_a_problem_comes_back_as_the_error_it_was(answer: Answer, error: type[ServiceError]):
    with answering([answer]) as (url, _), pytest.raises(error) as caught:
        BufferClient(url, retry_s=0).lease(LEASE)
    assert type(caught.value) is error


def test_busy_names_the_wait_and_is_not_retried_by_the_client():
    busy = problem(429, "busy", retry_after_s=0.25, wait="trainer-ahead")
    with answering([busy]) as (url, asked), pytest.raises(BusyError) as caught:
        BufferClient(url, retry_s=5).lease(LEASE)
    assert (caught.value.retry_after_s, caught.value.wait) == (0.25, "trainer-ahead")
    assert len(asked) == 1


def test_a_service_that_is_away_for_a_moment_is_asked_again():
    with answering([problem(503, "unavailable"), problem(503, "unavailable"), LEASED]) as (url, asked):
        assert BufferClient(url, retry_s=30).lease(LEASE).run_state == "running"
    assert len(asked) == 3


def test_a_service_that_does_not_answer_in_time_is_unavailable():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = BufferClient(f"http://127.0.0.1:{silent.getsockname()[1]}", retry_s=0, timeout_s=0.2)
        with pytest.raises(UnavailableError, match="ReadTimeoutError"):
            client.lease(LEASE)


def test_a_service_may_live_under_a_path_and_parameters_are_quoted():
    page = {"rollouts": [], "next": None, "log_position": 0}
    with answering([(200, page)]) as (url, asked), suppress(BadReplyError):
        BufferClient(url + "/tba/", retry_s=0).list_rollouts(prompt_id="a b&c=\N{CHECK MARK}", limit=5)
    assert asked[0].startswith("/tba/v1/rollouts?")
    assert parse_qs(urlsplit(asked[0]).query)["prompt_id"] == ["a b&c=\N{CHECK MARK}"]


def test_a_redirect_is_not_followed():
    """A token would go wherever it points."""
    with answering([(307, {})]) as (url, asked), pytest.raises(BadRequestError):
        BufferClient(url, retry_s=0, token="x" * 16).lease(LEASE)
    assert len(asked) == 1


def test_a_connection_that_the_service_closed_meanwhile_is_opened_again():
    with answering([LEASED]) as (url, asked):  # HTTP/1.0: closed after every answer
        client = BufferClient(url, retry_s=0)
        for _ in range(5):
            assert client.lease(LEASE).run_state == "running"
    assert len(asked) == 5


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "http://", "http://[::1"])
def test_what_is_no_address_of_a_service_is_refused_in_a_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is not the address of a service, such as http://127.0.0.1:8700"):
        BufferClient(url)


@pytest.mark.parametrize("body", [b"not json", {"leases": []}, {**LEASED[1], "leases": 1}])
def test_an_answer_of_another_kind_is_refused(body: Any):
    with answering([(200, body)]) as (url, _), pytest.raises(BadReplyError, match="is not a LeaseReply"):
        BufferClient(url, retry_s=0).lease(LEASE)


def test_what_a_newer_service_says_more_is_ignored():
    """While an upgrade rolls, old searchers talk to a new buffer."""
    with answering([(200, {**LEASED[1], "surprise": 1})]) as (url, _):
        assert BufferClient(url, retry_s=0).lease(LEASE).run_state == "running"


@pytest.mark.parametrize(
    "results",
    [
        [{"item_id": "a", "reward": 1.0}],
        [{"item_id": "b", "reward": 1.0}, {"item_id": "a", "reward": 0.0}],
        [{"item_id": "a", "reward": 1.0}, {"item_id": "b"}],
        [{"item_id": "a", "reward": 1.0}, {"item_id": "b", "reward": 0.0, "error": TIMEOUT}],
    ],
    ids=["too few", "another order", "neither reward nor error", "both"],
)
def test_scores_that_are_not_those_of_the_items_are_not_used(results: list[dict[str, Any]]):
    with answering([(200, {"results": results})]) as (url, _), pytest.raises(BadReplyError):
        RewardClient(url, retry_s=0).score(ITEMS)

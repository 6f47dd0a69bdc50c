"""The number of searchers of a run: a request for another number, refusals, the audit, and `tba scale`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tba.api import RunCommand, ScaleRequest, SearchersInfo
from tba.clients import BufferClient
from tba.errors import BadRequestError, ConflictError, UnauthorizedError
from tba_cli.main import main
from tests.support.buffer import make_heartbeat, start_lineage
from tests.support.buffer_fixtures import BufferThread, ServeBuffer
from tests.support.buffer_reads import ask

LOCAL = {"backend": "local", "max_searchers": 8}
TOKENS = {role: f"{role}-token-0123456789" for role in ("searcher", "trainer", "operator", "viewer")}


def scale(client: BufferClient, num: int | None, **more: Any) -> SearchersInfo:
    return client.scale(ScaleRequest(num_searchers=num, **more)).searchers


def beat(client: BufferClient, number: int, state: str = "running") -> None:
    client.heartbeat(make_heartbeat(f"searcher-{number}", state=state))


def test_a_number_is_asked_for_and_given_back_and_the_audit_says_who_when_why_and_when_it_was_there(
    serve_buffer: ServeBuffer,
) -> None:
    client = serve_buffer(scaling=LOCAL, searcher={"num_searchers": 2}).client()
    start_lineage(client)
    info = client.scaling().searchers
    assert (info.revision, info.desired, info.source, info.alive) == (0, 2, "recipe", 0)

    info = client.scale(ScaleRequest(num_searchers=3, reason="the night is cheap"))
    assert (info.searchers.revision, info.searchers.desired, info.searchers.source) == (1, 3, "operator")
    (change,) = info.changes
    assert (change.role, change.reason, change.lineage, change.step) == ("operator", "the night is cheap", 1, 0)
    assert (change.old, change.new) == (None, 3)
    for number in range(4):
        beat(client, number, state="ended" if number == 3 else "running")
    assert client.run().searchers == client.scaling().searchers
    assert client.scaling().searchers.alive == 3  # the fourth has ended

    back = client.scale(ScaleRequest(num_searchers=None))
    assert (back.searchers.desired, back.searchers.source) == (2, "recipe")
    assert [(change.old, change.new) for change in client.scaling().changes] == [(None, 3), (3, None)]
    assert [change.revision for change in client.scaling(after=1).changes] == [2]
    assert back.changes == client.scaling(after=1).changes


def test_a_request_that_is_sent_again_changes_nothing(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(scaling=LOCAL).client()
    request = ScaleRequest(num_searchers=3)
    first = client.scale(request)
    scale(client, 5)
    again = client.scale(request)
    assert (again.changes, again.searchers.desired) == (first.changes, 5)
    assert len(client.scaling().changes) == 2


def test_what_was_asked_for_survives_a_restart_and_a_superseded_buffer_takes_nothing(serve_buffer: ServeBuffer) -> None:
    old = serve_buffer(scaling=LOCAL)
    scale(old.client(), 5)
    new = serve_buffer(scaling=LOCAL).client()
    assert new.scaling().searchers.desired == 5
    with pytest.raises(Exception, match="newer buffer process owns run"):
        scale(old.client(), 1)
    assert new.scaling().searchers.desired == 5
    lowered = serve_buffer(scaling={**LOCAL, "max_searchers": 4}).client().scaling().searchers
    assert (lowered.desired, lowered.source) == (4, "operator")
    assert lowered.note == "5 were asked for when scaling.max_searchers was higher; it is 4 now"


def test_one_server_gets_one_searcher(serve_buffer: ServeBuffer, capsys: pytest.CaptureFixture[str]) -> None:
    scale(serve_buffer(scaling=LOCAL).client(), 3)
    served = serve_buffer(
        scaling=LOCAL, searcher={"num_searchers": 1, "engine": "openai", "openai": {"url": "http://127.0.0.1:8000"}}
    )
    shown = served.client().scaling().searchers  # asked for when each had an engine of its own
    assert (shown.desired, shown.source) == (1, "operator")
    assert shown.note == "3 were asked for, and the server http://127.0.0.1:8000 is for one searcher"
    with pytest.raises(
        BadRequestError, match=r"num_searchers is 2, and all would load weights into the server http://"
    ):
        scale(served.client(), 2)
    assert main(["scale", "2", "--url", served.url]) != 0
    assert "num_searchers is 2, and all would load weights into the server http://127.0.0.1" in capsys.readouterr().err
    assert scale(served.client(), 0).desired == 0
    assert scale(served.client(), 1).desired == 1


def test_impossible_numbers_are_refused_by_name_and_value(serve_buffer: ServeBuffer) -> None:
    served = serve_buffer(scaling=LOCAL)
    bodies: list[tuple[dict[str, Any], list[str]]] = [
        ({"num_searchers": 9}, ["num_searchers is 9", "scaling.max_searchers 8"]),
        ({"num_searchers": -1}, ["num_searchers", "-1"]),
        ({"num_searchers": 2.5}, ["num_searchers", "2.5"]),
        ({"num_searchers": True}, ["num_searchers", "True"]),
        ({"num_searchers": "many"}, ["num_searchers", "'many'"]),
        ({}, ["num_searchers"]),
        ({"num_searchers": 1, "num": 1}, ["num", "1"]),
    ]
    for body, words in bodies:
        status, answer = ask(served.url, "/v1/run/searchers", "PATCH", body)
        assert status == 422
        assert [word for word in words if word not in json.loads(answer)["detail"]] == []
    assert served.client().scaling().searchers.revision == 0


def test_where_nothing_of_tba_starts_searchers_the_answer_says_who_does(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    beat(client, 0)
    info = client.scaling().searchers
    assert (info.desired, info.source, info.alive, info.backend) == (None, None, 1, "none")
    with pytest.raises(ConflictError, match=r"docker compose up --scale; Kubernetes: kubectl scale"):
        scale(client, 3)


def test_an_offline_run_gets_no_searchers(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer(scaling=LOCAL, searcher={"num_searchers": 0}).client()
    with pytest.raises(ConflictError, match="the run is offline"):
        scale(client, 3)


def test_a_searcher_cannot_say_that_a_trainer_waits(serve_buffer: ServeBuffer) -> None:
    served = serve_buffer(tokens=TOKENS)
    for role, kind in (("searcher", "trainer"), ("searcher", "reward"), ("trainer", "searcher")):
        with pytest.raises(UnauthorizedError, match=f"role '{role}' sends heartbeats of kind '{role}', not '{kind}'"):
            served.client(token=TOKENS[role]).heartbeat(make_heartbeat("x", kind))
    for role in ("searcher", "trainer"):
        served.client(token=TOKENS[role]).heartbeat(make_heartbeat(role, role))


def tba(served: BufferThread, *words: str) -> int:
    return main([*words, "--url", served.url])


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the output of the command, without the log lines of the buffer, which runs in this process."""
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("20")]


def test_the_command_changes_and_shows(serve_buffer: ServeBuffer, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve_buffer(scaling=LOCAL)
    client = served.client()
    start_lineage(client)
    assert tba(served, "scale", "1", "--reason", "lunch") == 0
    assert said(capsys) == [
        "searchers: 1 desired (asked for by the operator), 0 alive, scaled by local",
        "revision 1, by the operator after step 0: recipe -> 1 (lunch)",
    ]
    beat(client, 0)
    assert tba(served, "scale", "1") == 0
    capsys.readouterr()
    assert tba(served, "scale") == 0
    out = said(capsys)
    assert (len(out), out[-1]) == (3, "revision 2, by the operator after step 0: 1 -> 1")
    assert tba(served, "scale", "recipe", "--json") == 0
    assert json.loads("\n".join(said(capsys)))["searchers"]["source"] == "recipe"
    assert tba(served, "status") == 0
    assert "  searchers: 2 desired (as the recipe says), 1 alive, scaled by local" in said(capsys)
    assert tba(served, "scale", "-3") == 2
    capsys.readouterr()
    for words, sentence in ((["many"], "'many' is neither a number"), (["9"], "num_searchers is 9")):
        assert tba(served, "scale", *words) == 2
        assert sentence in capsys.readouterr().err


def test_the_run_may_be_over(serve_buffer: ServeBuffer) -> None:
    lineage = start_lineage(client := serve_buffer(scaling=LOCAL).client())
    client.command("done", RunCommand(token=lineage.token))
    assert scale(client, 3).desired == 3  # for a trainer that continues with the run

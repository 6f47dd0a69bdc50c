"""`buffer.read_only`: a buffer that only shows what Redis holds, and leaves it as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from tba.api import LineageRequest, RescoreRequest, RunCommand, ScaleRequest
from tba.clients import BufferClient
from tba.errors import ConflictError, UnauthorizedError
from tba.wire import encode_rollout
from tests.support.buffer import make_heartbeat, make_prompts, make_rollout
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.buffer_reads import READS, ask, readyz

WHY = "this run is over since 2026-01-01 00:00:00: it is done"
TOKENS = {role: f"token-of-the-{role}" for role in ("searcher", "trainer", "operator", "viewer")}


def stored(raw: Redis) -> dict[bytes, Any]:
    """Return all that Redis has; DUMP would show also how it orders a hash in memory."""
    read: dict[bytes, Callable[[bytes], Any]] = {b"string": raw.get, b"hash": raw.hgetall, b"stream": raw.xrange}
    read |= {b"set": raw.smembers, b"list": lambda key: raw.lrange(key, 0, -1)}
    read[b"zset"] = lambda key: raw.zrange(key, 0, -1, withscores=True)
    keys: Any = raw.keys("*")
    return {key: read[raw.type(key)](key) for key in keys}  # pyright: ignore[reportArgumentType]


def fill(client: BufferClient, *, num: int = 10) -> list[str]:
    """Store a run with rollouts (one of them pending), a trainer and a searcher; return the ids."""
    client.upload_prompts(make_prompts(2))
    client.new_lineage(LineageRequest(trainer_id="t", parent="0-0"))
    rollouts = [make_rollout(reward=None if i == 0 else float(i)) for i in range(num)]
    client.push([encode_rollout(rollout) for rollout in rollouts])
    for kind in ("trainer", "searcher"):
        client.heartbeat(make_heartbeat(f"{kind}-0", kind, state="working"))
    return [rollout.rollout_id.hex() for rollout in rollouts]


def test_it_shows_everything_and_changes_nothing(serve_buffer: ServeBuffer, raw: Redis) -> None:
    first = serve_buffer()
    ids = fill(first.client())
    first.stop()
    before = stored(raw)

    # every limit is passed, and a reward service could be asked
    section = {"read_only": WHY, "max_rollouts": 8, "SCORE_EVERY_S": 0.05}
    view = serve_buffer(buffer=section, reward={"url": "http://127.0.0.1:9"}, scaling={"backend": "local"})
    client = view.client()
    info = client.run()
    assert (info.read_only, info.note, info.state, info.lineage) == (True, WHY, "running", 1)
    assert {item.component_id: (item.alive, item.state) for item in info.components} == {
        "buffer": (True, "read-only"),
        "searcher-0": (False, "working"),
        "trainer-0": (False, "working"),
    }
    assert info.waits == []
    assert {item.rollout_id for item in client.list_rollouts().rollouts} == set(ids)
    assert client.get_rollout(ids[0]).reward_status == "pending"
    for path in READS:
        assert ask(view.url, path)[0] == (404 if path == "/v1/rescore" else 200), path
    assert readyz(view.url) == (200, {"status": "ok"})
    # silent for longer than a normal buffer remembers: shown all the same
    view.ahead_s = 7200.0
    assert {item.component_id for item in client.run().components} == {"buffer", "searcher-0", "trainer-0"}
    assert stored(raw) == before


def test_every_write_is_refused_with_the_reason(serve_buffer: ServeBuffer, raw: Redis) -> None:
    first = serve_buffer()
    fill(first.client())
    first.stop()
    view = serve_buffer(buffer={"read_only": WHY})
    before = stored(raw)
    client = view.client()
    for write in (
        lambda: client.command("resume", RunCommand()),
        lambda: client.scale(ScaleRequest(num_searchers=1)),
        lambda: client.start_rescore(RescoreRequest()),
        lambda: client.push([encode_rollout(make_rollout())]),
        lambda: client.new_lineage(LineageRequest(trainer_id="u", parent="0-0")),
    ):
        with pytest.raises(ConflictError, match=r"this is a read-only view .this run is over since"):
            write()
    operations = [
        (method.upper(), path)
        for path, methods in json.loads(ask(view.url, "/openapi.json")[1])["paths"].items()
        for method in methods
        if method != "get"
    ]
    assert len(operations) >= 19
    for method, path in operations:
        status, answer = ask(view.url, path.replace("{name}", "n"), method, {})
        assert (status, WHY in json.loads(answer)["detail"]) == (409, True), (method, path, answer)
    assert stored(raw) == before


def test_it_does_not_take_the_run_from_its_buffer(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    fill(client)
    view = serve_buffer(buffer={"read_only": WHY})
    assert view.client().run().read_only
    assert [item.outcome for item in client.push([encode_rollout(make_rollout())]).outcomes] == ["new"]
    assert len(view.client().list_rollouts().rollouts) == 11, "it follows the log"
    assert not client.run().read_only


def test_tokens_are_checked_before_the_refusal(serve_buffer: ServeBuffer) -> None:
    view = serve_buffer(buffer={"read_only": WHY}, tokens=TOKENS)
    with pytest.raises(UnauthorizedError):
        view.client().run()
    assert ask(view.url, "/v1/run", "POST", {})[0] == 401
    assert ask(view.url, "/v1/run", "POST", {}, TOKENS["operator"])[0] == 409
    assert view.client(token=TOKENS["viewer"]).run().read_only


def test_a_loss_of_redis_is_shown_and_not_accepted(serve_buffer: ServeBuffer, raw: Redis) -> None:
    first = serve_buffer()
    fill(first.client())
    first.stop()
    raw.hset("tba:test:run", "changes_missing", "5")
    before = stored(raw)
    view = serve_buffer(buffer={"read_only": WHY})
    info = view.client().run()
    assert "5 acknowledged changes are missing" in (info.loss or "")
    assert readyz(view.url)[0] == 200, "it is ready to be looked at"
    assert stored(raw) == before

"""Fuzzed requests and pushes against a real buffer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from schemathesis import Case
from tba_buffer.api.app import build_app

from tba.api import EvalRequest, LeaseRequest
from tba.wire import decode_rollout, encode_push
from tests.support.buffer import make_payloads, make_prompts, make_recipe, start_lineage, start_stack
from tests.support.buffer_fixtures import BufferThread
from tests.support.fuzz import fuzz, load_schema, operations
from tests.support.redis_process import RedisProcess

DOCUMENT = build_app(make_recipe(), None).openapi()
SCHEMA = load_schema(DOCUMENT)
NUM_STORED = 40
MSGPACK = (("/v1/rollouts", "post"), ("/v1/heartbeats", "post"))


class World:
    """A buffer that holds something of everything, and the values that name it.

    It is a process of its own: hypothesis refuses threads that use `random` beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.stack = start_stack(folder, store={"url": f"file://{folder / 'store'}"})
        self.url, self.client = self.stack.buffer.url, self.stack.client
        self.client.upload_prompts(make_prompts(10, 4))
        self.values: dict[str, Any] = {}
        self.renew()
        self.client.push(make_payloads([f"train-{i}" for i in range(10)]))
        request = EvalRequest(version="0-0", num_prompts=2, token=self.values["token"])
        self.values["eval_id"] = self.client.request_eval(request).eval_id
        leases = self.client.lease(LeaseRequest(searcher_id="s", max_leases=2)).leases
        self.values["lease_ids"] = [lease.lease_id for lease in leases]
        self.values["rollout_id"] = self.client.list_rollouts().rollouts[0].rollout_id

    def renew(self) -> None:
        """A new lineage: the run continues whatever was commanded, and its token is the valid one."""
        lineage = start_lineage(self.client)
        self.values.update(token=lineage.token, lineage=lineage.lineage, step=1, version="0-0", parent="0-0")
        self.values["prompt_id"] = "train-3"

    def put_known(self, case: Case) -> None:
        """Existing values for every parameter and field that has such a name."""
        for part in (case.path_parameters, case.query, case.body):
            if isinstance(part, dict):
                part.update({name: self.values[name] for name in part if name in self.values})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.stack.stop()


def do_not_wait(case: Case) -> None:
    """Long polls answer at once."""
    if isinstance(case.body, dict) and isinstance(case.body.get("wait_s"), int | float):
        case.body["wait_s"] = 0


@pytest.mark.parametrize(("path", "method"), operations(DOCUMENT))
def test_every_answer_is_documented_and_every_error_is_a_problem(world: World, path: str, method: str) -> None:
    world.renew()
    before = world.client.stats()
    changes: Any = {"known": world.put_known, "always": do_not_wait, "anything_fits": (path, method) in MSGPACK}
    fuzz(SCHEMA, path, method, base_url=world.url, max_examples=15, **changes)
    after = world.client.stats()
    assert (after.num_rollouts, after.payload_bytes) == (before.num_rollouts, before.payload_bytes)
    assert after.num_rollouts == NUM_STORED
    assert world.client.get_rollout(world.values["rollout_id"]).rollout_id == world.values["rollout_id"]


MAX_BODY_BYTES = 4096


class PushWorld:
    """A buffer, one connection to it, and what it has acknowledged."""

    def __init__(self, redis_url: str) -> None:
        self.buffer = BufferThread(make_recipe(buffer={"redis_url": redis_url, "max_body_bytes": MAX_BODY_BYTES}))
        self.client = self.buffer.client()
        self.client.upload_prompts(make_prompts(2, 1))
        self.stored: dict[bytes, bytes] = {}
        self._connection = HTTPConnection(self.buffer.url.removeprefix("http://"), timeout=30)

    def post(self, body: bytes) -> tuple[int, str, Any]:
        """Status, content type and JSON of the answer."""
        self._connection.request("POST", "/v1/rollouts", body=body)
        with self._connection.getresponse() as reply:
            return reply.status, reply.headers["content-type"], json.loads(reply.read())

    def stop(self) -> None:
        self._connection.close()
        self.buffer.stop()


@pytest.fixture(scope="module")
def pushes(redis: RedisProcess) -> Iterator[PushWorld]:
    made = PushWorld(redis.url)
    yield made
    made.stop()


@st.composite
def damaged_push(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A valid push of three rollouts with some bytes replaced, added, removed or cut off."""
    payloads = make_payloads(["train-0", "train-1", "nobody-knows"], per_prompt=1)
    raw = bytearray(encode_push(payloads))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        match draw(st.sampled_from(["replace", "flip", "insert", "remove", "repeat", "cut"])):
            case "replace":
                raw[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "flip":
                raw[at : at + 1] = bytes([raw[at] ^ (1 << draw(st.integers(0, 7)))]) if raw else b""
            case "insert":
                raw[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "remove":
                del raw[at : at + draw(st.integers(1, 8))]
            case "repeat":
                raw += raw[at : at + 2000]
            case "cut":
                del raw[at:]
    return bytes(raw), payloads


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(push=damaged_push())
def test_damaged_bytes_never_break_the_service(pushes: PushWorld, push: tuple[bytes, list[bytes]]) -> None:
    body, payloads = push
    status, content_type, answer = pushes.post(body)
    if status != 200:
        assert status in (413, 422)
        assert (content_type, answer["status"], bool(answer["detail"])) == ("application/problem+json", status, True)
        assert (status == 413) >= (len(body) > MAX_BODY_BYTES)
        return
    assert content_type == "application/json"
    for item in answer["outcomes"]:
        assert item["outcome"] in ("new", "duplicate", "refused")
        assert (item["outcome"] == "refused") == bool(item["reason"])
        if item["outcome"] == "new":
            pushes.stored[bytes.fromhex(item["rollout_id"])] = body
    if body == encode_push(payloads):
        assert [item["outcome"] for item in answer["outcomes"]] == ["new", "new", "refused"]


TOO_MANY, ROLLOUTS = b"\xff\xff\xff\xff", b"\x82\xa6schema\x01\xa8rollouts"
HOSTILE = [b"", b"\xc1", b"\x80", b"\xdf" + TOO_MANY, b"\x91" * 4000, b"\x81" * 4000]
HOSTILE += [ROLLOUTS + rest for rest in (b"\xdd" + TOO_MANY, b"\xc6" + TOO_MANY, b"\x91\xc4\x00")]


@pytest.mark.parametrize("body", HOSTILE)
def test_hostile_headers_are_refused(pushes: PushWorld, body: bytes) -> None:
    status, _, answer = pushes.post(body)
    if status == 200:
        assert [item["outcome"] for item in answer["outcomes"]] == ["refused"]
    else:
        assert status == 422


def test_what_is_stored_is_what_was_acknowledged_and_can_be_read(pushes: PushWorld, raw: Redis) -> None:
    """Runs last: after all the damage above."""
    payloads: dict[bytes, bytes] = raw.hgetall("tba:test:payloads")  # type: ignore[assignment]
    assert payloads.keys() == pushes.stored.keys()
    for rollout_id, payload in payloads.items():
        assert payload in pushes.stored[rollout_id]
        assert decode_rollout(payload).rollout_id == rollout_id
    stats = pushes.client.stats()
    assert (stats.num_rollouts, stats.payload_bytes) == (len(payloads), sum(map(len, payloads.values())))
    assert pushes.client.push(make_payloads(["train-0"])).outcomes[0].outcome == "new"

"""Any key of the run may be damaged: every request is answered, or refused with a 503 that names the field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis
from tba_buffer.index.log_follower import Compactor
from tba_buffer.storage.keys import Keys

from tba.api import (
    AckRequest,
    CheckpointRequest,
    EvalResult,
    EvalResults,
    LeaseReturn,
    LineageRequest,
    RunCommand,
    SettingsRequest,
    TrainedRollouts,
    VersionRequest,
)
from tba.config import parse_live
from tba.errors import TbaError, UnavailableError
from tba.versions import PolicyVersion
from tba.wire import STARTED_AT_S, WAITED_S, Batch, encode_rollout
from tests.support.buffer import begin_run, make_heartbeat, make_payloads, make_rollout, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.buffer_reads import ask
from tests.support.leases import draw, lease, request_eval
from tests.support.redis_process import RedisProcess
from tests.support.waits import until

KEYS = Keys("test")
NAMES = sorted(name for name in vars(KEYS) if not name.startswith("_"))
NOT_HERE = {"log", "payloads", "originals", "gone", "gone_before", "format"}
"""test_buffer_log_follower.py and test_buffer_damage.py test the rollouts themselves."""
DECISIVE = {
    "counters": ("drawn", "inflight", "marks", "scored_at_mark", "scored_total", "void"),
    "log_checkpoint": ("generation", "position", "marks"),
    "run": (
        *("checkpoint", "latest_version", "lineage", "lineage_position"),
        *("sampling_version", "state", "step", "token"),
    ),
    "scaling": ("revision", "wanted"),
    "settings": ("revision",),
}
"""Fields that are damaged alone: they say how the run stands, so what needs them may be refused with their name."""
NEEDED_FOR_LEASES = ("step", "latest_version", "rollback")
ONE_BY_ONE = [(key, field) for key, fields in DECISIVE.items() for field in fields]
ABSENT = {"log_checkpoint": b"hash", "scaling": b"hash", "scaling_changes": b"list"}
ABSENT |= {"scaling_requests": b"hash"}
"""Keys that a run such as this one does not have."""
DAMAGE = [b"\xff\x00junk", b'{"state": "pending"}']


class World:
    """A run in which every key of the storage is there."""

    def __init__(self, serve: ServeBuffer, server: RedisProcess) -> None:
        sampling = {"min_size_to_sample": 1, "prompts_per_batch": 1, "group_size": 2}
        self.buffer = serve(sampling=sampling, eval={"timeout_s": 20_000.0})
        self.client = client = self.buffer.client()
        self.store = Redis.from_url(server.url)
        begin_run(client, 4, 3)
        self.lineage = start_lineage(client)
        client.push(make_payloads([f"train-{i}" for i in range(4)]))
        client.change_settings(SettingsRequest(settings=parse_live({"sampling_temperature": 0.5})))
        client.register_checkpoint(CheckpointRequest(token=self.lineage.token, version="0-0", key="none"))
        eval_id = request_eval(client, self.lineage).eval_id
        leases = lease(client, 9).leases
        unit = leases[0]
        result = EvalResult(lease_id=unit.lease_id, rewards=[1.0] * 2, num_response_tokens=[3] * 2)
        client.eval_results(eval_id, EvalResults(searcher_id="s1", version="0-0", results=[result]))
        returned = [leases[1].lease_id, leases[-1].lease_id]
        client.return_leases(LeaseReturn(searcher_id="s1", lease_ids=returned))
        self.beat()
        batch = self.draw(1)
        ids = [rollout.rollout_id.hex() for rollout in batch.rollouts]
        trained = TrainedRollouts(rollout_ids=ids, advantages=[0.5, -0.5], weights=[1.0, None])
        token = self.lineage.token
        ack = AckRequest(lineage=self.lineage.lineage, step=1, token=token, policy_ages=[0, 0], trained=trained)
        client.ack(batch.batch_id, ack)
        self.draw(2)
        client.command("pause", RunCommand())
        client.command("resume", RunCommand())

    def beat(self) -> None:
        gauges = {STARTED_AT_S: 5.0, f"{WAITED_S}batch": 1.0}
        self.client.heartbeat(make_heartbeat("t", "trainer", gauges=gauges))

    def draw(self, step: int) -> Batch:
        return draw(self.client, self.lineage, step)

    def push(self) -> None:
        self.client.push([encode_rollout(make_rollout())])

    def damage(self, name: str, field: str | None, damage: bytes) -> None:
        """One field of a key; without a field, all entries of the key, and one more."""
        key, store = getattr(KEYS, name), self.store
        match ABSENT.get(name) or store.type(key):
            case b"hash":
                known = [item for item in store.hkeys(key) if item.decode() not in DECISIVE.get(name, ())]  # pyright: ignore
                names = [*known, b"\xffmore", b"more"] if field is None else [field.encode()]
                store.hset(key, mapping=dict.fromkeys(names, damage))
            case b"list":
                for at in range(store.llen(key)):  # pyright: ignore[reportArgumentType]
                    store.lset(key, at, damage)  # pyright: ignore[reportArgumentType]
                store.rpush(key, damage)
            case b"zset":
                store.zadd(key, {damage: 1.0, damage + b"|": 1e12})
            case b"set":
                store.sadd(key, damage)
            case _:
                store.set(key, damage)


@pytest.fixture
def world(serve_buffer: ServeBuffer, redis: RedisProcess) -> Iterator[World]:
    made = World(serve_buffer, redis)
    yield made
    made.store.close()


def outcome(what: Callable[[], object]) -> TbaError | None:
    try:
        what()
    except TbaError as error:
        return error
    return None


def check_answers(world: World, name: str, field: str | None) -> None:
    client, url = world.client, world.buffer.url
    answers = {
        "lease": outcome(lambda: lease(client, 4, "s2")),
        "lease again": outcome(lambda: lease(client, 4, "s3")),
        "push": outcome(world.push),
        "draw": outcome(lambda: world.draw(2)),
        "draw on": outcome(lambda: world.draw(3)),
        "beat": outcome(world.beat),
    }
    word = field or getattr(KEYS, name)
    for what, error in answers.items():
        if isinstance(error, UnavailableError):
            assert word in str(error), (what, error)
        elif name not in DECISIVE:
            assert error is None, (what, error)
    for path in ("/v1/run", "/v1/run/changes", "/v1/run/searchers", "/v1/stats", "/v1/ledger"):
        status, body = ask(url, path)
        assert status == 200 or (status == 503 and word in body.decode()), (path, status, body)
    assert ask(url, "/metrics")[0] == 200
    assert b"the background upkeep has failed" not in ask(url, "/readyz")[1]


@pytest.mark.parametrize("damage", DAMAGE, ids=["junk", "json"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_HERE])
def test_a_damaged_key_is_named_or_in_nobodys_way(world: World, name: str, damage: bytes) -> None:
    world.damage(name, None, damage)
    check_answers(world, name, None)


@pytest.mark.parametrize("damage", DAMAGE, ids=["junk", "json"])
@pytest.mark.parametrize(("name", "field"), ONE_BY_ONE)
def test_a_damaged_field_of_how_the_run_stands_is_named(world: World, name: str, field: str, damage: bytes) -> None:
    world.damage(name, field, damage)
    check_answers(world, name, field)


@pytest.mark.parametrize("damage", [b"\xff", b"", None])
def test_what_a_trainer_announces_is_refused_naming_the_damaged_lineage(world: World, damage: bytes | None) -> None:
    token, version = world.lineage.token, f"{world.lineage.lineage}-1"
    world.store.hdel(KEYS.run, "lineage")
    if damage is not None:
        world.store.hset(KEYS.run, "lineage", damage)
    said = "the field lineage of tba:test:run in Redis (cannot be read|is missing)"
    with pytest.raises(UnavailableError, match=said):
        world.client.announce_version(VersionRequest(token=token, version=version))
    for announced in (version, "0-0"):
        with pytest.raises(UnavailableError, match=said):
            world.client.register_checkpoint(CheckpointRequest(token=token, version=announced, key="none"))


@pytest.mark.parametrize(
    ("key", "field"),
    [("counters", name) for name in DECISIVE["counters"]] + [("run", name) for name in NEEDED_FOR_LEASES],
)
def test_what_leases_cannot_do_without_makes_the_service_not_ready_until_it_is_restored(
    serve_buffer: ServeBuffer, raw: Redis, key: str, field: str
) -> None:
    url, name = serve_buffer().url, getattr(KEYS, key)
    whole: Any = raw.hget(name, field)
    raw.hset(name, field, b"\xff")
    until("not ready, by name", lambda: (reply := ask(url, "/readyz"))[0] == 503 and field.encode() in reply[1])
    if whole is None:
        raw.hdel(name, field)
    else:
        raw.hset(name, field, whole)
    until("ready", lambda: ask(url, "/readyz")[0] == 200)


def test_a_damaged_lineage_lets_no_rollout_look_too_old(serve_buffer: ServeBuffer, raw: Redis) -> None:
    server = serve_buffer(buffer={"max_policy_age_steps": 10})
    client = server.client()
    first = begin_run(client, 4).lineage
    raw.hset(KEYS.run, mapping={"step": 100, "checkpoint": f"{first}-100"})
    second = client.new_lineage(LineageRequest(trainer_id="t", parent=f"{first}-100")).lineage
    version = PolicyVersion(second, 100)
    client.push([encode_rollout(make_rollout(version=version)) for _ in range(5)])
    raw.hset(KEYS.run, "lineage", b"\xff")
    until("noticed", lambda: b"lineage" in ask(server.url, "/readyz")[1])
    # the bounds are enforced after every push, and nobody knows how old a rollout is
    with pytest.raises(UnavailableError, match="the field lineage of tba:test:run in Redis cannot be read"):
        server.client(retry_s=0.0).push([encode_rollout(make_rollout(version=version))])
    raw.hset(KEYS.run, "lineage", second)
    until("ready", lambda: ask(server.url, "/readyz")[0] == 200)
    assert client.stats().num_rollouts == 6


def test_one_look_of_the_upkeep_that_fails_is_not_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def damaged(*_: object) -> None:
        raise ValueError("something in Redis is no number")

    with monkeypatch.context() as patch:
        patch.setattr(Compactor, "keep_up", damaged)
        until("it shows", lambda: b"something in Redis is no number" in ask(world.buffer.url, "/readyz")[1])
        world.push()
    until("it continues", lambda: ask(world.buffer.url, "/readyz")[0] == 200)


def test_a_damaged_count_of_marks_leaves_no_mark_half_done(world: World) -> None:
    world.store.hset(KEYS.counters, "marks", b"\xff")
    before = world.store.xlen(KEYS.log)
    for _ in range(2):
        world.client.announce_version(VersionRequest(token=world.lineage.token, version=f"{world.lineage.lineage}-2"))
    assert world.store.xlen(KEYS.log) == before + 1  # pyright: ignore[reportOperatorIssue]
    assert world.client.run().latest_version == f"{world.lineage.lineage}-2"


def test_damaged_counts_of_evictions_stop_no_push(serve_buffer: ServeBuffer, raw: Redis) -> None:
    buffer = serve_buffer(buffer={"max_rollouts": 2}, sampling={"min_size_to_sample": 1, "prompts_per_batch": 1})
    raw.hset(KEYS.counters, "evicted:max_rollouts", b"\xff")
    client, _ = buffer.begin(4, 3)
    for _ in range(3):
        client.push(make_payloads(["train-0", "train-1"]))
    assert raw.hlen(KEYS.payloads) == 2


def test_a_position_of_the_log_without_a_log_is_repaired_by_accepting(serve_buffer: ServeBuffer, raw: Redis) -> None:
    buffer = serve_buffer()
    raw.hset(KEYS.counters, "log_position", b"x")
    client = buffer.client()
    until("it is refused", lambda: client.run().loss is not None)
    client.command("accept-loss", RunCommand())
    until("it is ready", lambda: ask(buffer.url, "/readyz")[0] == 200)
    assert raw.hget(KEYS.counters, "log_position") == b"0"

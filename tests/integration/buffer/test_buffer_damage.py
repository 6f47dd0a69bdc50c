"""A damaged visit, lease or rollout in Redis costs itself alone, and a damaged number that shows losses is a loss.

test_buffer_damaged_keys.py tests all other entries: each is a 503 with its name.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis import Redis
from tba_buffer.service import Buffer
from tba_buffer.storage.keys import Keys

from tba.api import AckRequest, BatchRequest, LeaseRenewal, LeaseReturn, LineageReply, RunCommand
from tba.clients import BufferClient
from tba.errors import BadRequestError, BusyError, UnavailableError
from tba.wire import Batch, encode_rollout
from tests.support.buffer import make_recipe, make_rollout
from tests.support.buffer_fixtures import ServeBuffer, later
from tests.support.buffer_reads import ask, read_everything
from tests.support.leases import fulfil, lease, request_eval
from tests.support.redis_process import RedisProcess
from tests.support.waits import until

KEYS = Keys("test")
SAMPLING = {"min_size_to_sample": 1, "prompts_per_batch": 1, "group_size": 4}
DAMAGE = [b"\xff\x00", b"", b"null", b"[]", b"7", b'{"p": 5, "l": "", "n": 1}', b'{"n": "many"}', b"[" * 5000]


@pytest.mark.parametrize("damage", [*DAMAGE, b'{"p": "train-0", "l": "", "n": 1e300}'])
def test_a_damaged_visit_is_dropped_and_other_pushes_and_leases_continue(
    serve_buffer: ServeBuffer, raw: Redis, damage: bytes
) -> None:
    client, _ = serve_buffer().begin(4, 3)
    bad, good, left = lease(client, 3).leases
    raw.hset(KEYS.visits, bad.visit_id, damage)
    fulfil(client, bad)
    fulfil(client, good)
    assert client.stats().num_rollouts == bad.num_rollouts + good.num_rollouts
    in_flight: Any = raw.hget(KEYS.counters, "inflight")
    assert int(in_flight) == left.num_rollouts, "the visit that is gone is not waited for"
    assert lease(client, 3, "s2").leases, "others get work"
    later(client, 10_000)
    visits = {item.visit_id for item in lease(client, 8, "s3").leases}
    assert visits & {left.visit_id, bad.visit_id} == {left.visit_id}
    read_everything(client.base_url)


@pytest.mark.parametrize("damage", [*DAMAGE, b'{"k": "train", "s": "s1"}', b'{"k": "other", "s": "s1", "v": "x"}'])
def test_a_damaged_lease_is_unknown_to_its_holder_and_what_it_owed_is_leased_again(
    serve_buffer: ServeBuffer, raw: Redis, damage: bytes
) -> None:
    client, lineage = serve_buffer(eval={"timeout_s": 20_000.0}).begin(4, 3)
    request_eval(client, lineage)
    leases = lease(client, 8).leases
    (bad, good, *_), bad_unit = [item for item in leases if item.kind == "train"], leases[0]
    assert bad_unit.kind != "train"
    raw.hset(KEYS.leases, mapping=dict.fromkeys([bad.lease_id, bad_unit.lease_id], damage))
    ids = [bad.lease_id, good.lease_id, bad_unit.lease_id]
    lost = client.renew_leases(LeaseRenewal(searcher_id="s1", lease_ids=ids)).lost_lease_ids
    assert set(lost) == {bad.lease_id, bad_unit.lease_id}
    client.return_leases(LeaseReturn(searcher_id="s1", lease_ids=ids))
    assert lease(client, 1, "s2").leases[0].visit_id == good.visit_id
    later(client, 1000)
    again = {item.visit_id for item in lease(client, 16, "s3").leases}
    assert {bad.visit_id, bad_unit.visit_id} <= again, "nothing that was owed is lost"
    read_everything(client.base_url)


def begin_with_damage(
    serve_buffer: ServeBuffer, raw: Redis, damaged: bytes = b"\xff\x00", group_size: int = 4
) -> tuple[BufferClient, LineageReply, str]:
    """Six scored rollouts of one prompt, one of which is damaged."""
    client, lineage = serve_buffer(sampling=SAMPLING | {"group_size": group_size}).begin(1)
    client.push([encode_rollout(make_rollout(reward=float(i))) for i in range(6)])
    bad = client.list_rollouts().rollouts[0].rollout_id
    raw.hset(KEYS.payloads, bytes.fromhex(bad), damaged)
    return client, lineage, bad


def draw_and_ack(client: BufferClient, lineage: LineageReply, step: int) -> Batch:
    """Draw the batch of a step, and ack it as the trainer does."""
    who: dict[str, Any] = {"lineage": lineage.lineage, "step": step, "token": lineage.token}
    batch = client.draw_batch(BatchRequest(trainer_id="t", wait_s=5.0, **who))
    refused = Counter(each.reason for each in batch.refused)
    ages = [0] * len(batch.rollouts)
    skipped = None if batch.groups else "refused"
    ack = AckRequest(policy_ages=ages, refused=refused, unreadable=list(batch.unreadable), skipped=skipped, **who)
    client.ack(batch.batch_id, ack)
    client.ack(batch.batch_id, ack)  # a repeated ack changes nothing
    return batch


@pytest.mark.parametrize("damaged", [b"\xff\x00", encode_rollout(make_rollout(reward=1.0))], ids=["bytes", "other id"])
def test_a_damaged_rollout_costs_itself_alone_and_fails_with_the_first_ack_that_names_it(
    serve_buffer: ServeBuffer, raw: Redis, damaged: bytes
) -> None:
    client, lineage, bad = begin_with_damage(serve_buffer, raw, damaged)
    with_damage = []
    for step in range(1, 21):
        batch = draw_and_ack(client, lineage, step)
        assert len(batch.rollouts) == 4 - len(batch.unreadable)
        assert bad not in {rollout.rollout_id.hex() for rollout in batch.rollouts}
        with_damage += [step] * len(batch.unreadable)
    assert len(with_damage) == 1
    stats = client.stats()
    assert (stats.num_scored, stats.num_failed, stats.rollouts_refused_by_trainer) == (5, 1, {"malformed": 1})
    assert client.get_rollout(bad).reward_status == "failed"


def test_a_batch_of_damaged_rollouts_alone_is_acked_as_skipped_and_never_drawn_again(
    serve_buffer: ServeBuffer, raw: Redis
) -> None:
    client, lineage, _ = begin_with_damage(serve_buffer, raw, group_size=6)
    ids: list[Any] = raw.hkeys(KEYS.payloads)  # pyright: ignore[reportAssignmentType]
    raw.hset(KEYS.payloads, mapping=dict.fromkeys(ids, b"\xff\x00"))
    assert draw_and_ack(client, lineage, 1).groups == ()
    stats = client.stats()
    assert (stats.num_scored, stats.num_failed, stats.batches_skipped) == (0, 6, {"refused": 1})
    with pytest.raises(BusyError) as busy:
        draw_and_ack(client, lineage, 2)
    assert busy.value.wait == "rollouts"


def test_an_ack_names_places_of_its_batch_that_it_refused_and_what_can_be_read_does_not_fail_by_that(
    serve_buffer: ServeBuffer,
) -> None:
    client, lineage = serve_buffer(sampling=SAMPLING).begin(1, per_prompt=6)
    who: dict[str, Any] = {"lineage": lineage.lineage, "step": 1, "token": lineage.token}
    batch = client.draw_batch(BatchRequest(trainer_id="t", **who))
    for places in ([4], [0, 1]):
        with pytest.raises(BadRequestError):
            client.ack(batch.batch_id, AckRequest(refused={"malformed": 1}, unreadable=places, **who))
    client.ack(batch.batch_id, AckRequest(refused={"schema-version": 1}, unreadable=[0], policy_ages=[0] * 3, **who))
    assert client.stats().num_failed == 0


def refused_with(client: BufferClient, text: str) -> None:
    """Check that pushes are refused, every answer says why, and the upkeep continues."""
    until("it is found out", lambda: text in (client.run().loss or ""))
    with pytest.raises(UnavailableError, match="tba buffer accept-loss") as refusal:
        client.push([encode_rollout(make_rollout())])
    assert text in str(refusal.value)
    status, body = ask(client.base_url, "/readyz")
    assert (status, b"restore Redis" in body, b"the background upkeep has failed" in body) == (503, True, False)


def ready(client: BufferClient) -> None:
    until("ready", lambda: ask(client.base_url, "/readyz")[0] == 200)
    assert {item.outcome for item in client.push([encode_rollout(make_rollout())]).outcomes} == {"new"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("acknowledged", b"9" * 40), ("log_position", b"\xff"), ("buffer epoch", b"many"), ("changes_missing", b"1e9")],
)
@pytest.mark.parametrize("is_restored", [True, False])
def test_a_damaged_number_that_losses_are_found_by_is_taken_as_a_loss(
    serve_buffer: ServeBuffer, raw: Redis, name: str, value: bytes, is_restored: bool
) -> None:
    client, _ = serve_buffer().begin(4)
    client.push([encode_rollout(make_rollout()) for _ in range(3)])
    key = KEYS.run if name == "changes_missing" else KEYS.counters
    if name == "buffer epoch":
        before = raw.get(KEYS.epoch)
        raw.set(KEYS.epoch, value)
    else:
        before = raw.hget(key, name)
        raw.hset(key, name, value)
    refused_with(client, "the buffer epoch" if name == "buffer epoch" else f"the field {name}")
    assert (client.stats().num_rollouts, len(client.list_rollouts().rollouts)) == (3, 3), "reading continues"
    if not is_restored:
        client.command("accept-loss", RunCommand(reason="x"))
    elif name == "buffer epoch":
        raw.set(KEYS.epoch, before)  # pyright: ignore[reportArgumentType]
    elif before is None:
        raw.hdel(key, name)
    else:
        raw.hset(key, name, before)  # pyright: ignore[reportArgumentType]
    ready(client)
    assert client.stats().num_rollouts == 4


def test_counters_older_than_the_log_are_a_loss_that_can_be_accepted(serve_buffer: ServeBuffer, raw: Redis) -> None:
    first = serve_buffer()
    client, _ = first.begin(4)
    client.push([encode_rollout(make_rollout())])
    older = raw.hgetall(KEYS.counters)
    client.push([encode_rollout(make_rollout()) for _ in range(3)])
    first.stop()
    raw.delete(KEYS.counters)
    raw.hset(KEYS.counters, mapping=older)  # pyright: ignore[reportArgumentType]
    client = serve_buffer().client()
    refused_with(client, "log_position is 2, and the log ends at 5")
    client.command("accept-loss", RunCommand(reason="x"))
    ready(client)
    assert client.stats().num_rollouts == 5


@pytest.mark.parametrize("field", ["generation", "marks"])
async def test_a_damaged_base_is_named_and_is_no_defect_of_the_buffer(
    serve_buffer: ServeBuffer, redis: RedisProcess, field: str
) -> None:
    buffer = Buffer(make_recipe(buffer={"redis_url": redis.url}), CollectorRegistry())
    base = {"generation": 1, "position": 0, "num_pieces": 0, "marks": "[]"} | {field: b"\xff"}
    await buffer.context.redis.hset(KEYS.log_checkpoint, mapping=base)
    with pytest.raises(UnavailableError, match="tba:test:base, the checkpoint of the log, cannot be read"):
        await buffer.compactor.keep_up(buffer.view.index)
    await buffer.stop()

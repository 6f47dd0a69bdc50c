"""Every script is safe to repeat with the same arguments, as redis-py repeats it when a connection turns out dead."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tba_buffer.index.log_follower import Compactor
from tba_buffer.run.rollback import Rollbacks
from tba_buffer.service import Buffer
from tba_buffer.snapshots.load import SnapshotLoad
from tba_buffer.snapshots.save import SnapshotSave
from tba_buffer.storage.context import SCRIPT_NAMES, Context, Scripts
from tba_buffer.storage.redis_client import Command

from tba.api import (
    AckRequest,
    BatchRequest,
    CheckpointRequest,
    EvalRequest,
    EvalResult,
    EvalResults,
    LeaseRenewal,
    LeaseRequest,
    LeaseReturn,
    LineageRequest,
    LoadRequest,
    RollbackRequest,
    RunCommand,
    ScaleRequest,
    SettingsRequest,
    TrainedRollouts,
    VersionRequest,
)
from tba.config import parse_live
from tba.store import FileStore
from tba.weights import checkpoint_prefix
from tba.wire import STARTED_AT_S, WAITED_S, decode_batch, encode_rollout
from tba.wire.snapshot_manifest import SnapshotSource
from tests.support.buffer import make_heartbeat, make_prompts, make_rollout
from tests.support.buffer_fixtures import StartService
from tests.support.reward_server import RewardServer

REPLY_DIFFERS = {"push", "upload"}
"""They report what is new; the second time nothing is."""


@pytest.fixture
async def buffer(start_service: StartService, reward: RewardServer) -> Buffer:
    section = {"max_rollouts": 40, "UPKEEP_S": 3600.0}  # one script at a time: evictions of the upkeep come in between
    return await start_service(num_prompts=0, buffer=section, reward={"url": reward.url})


async def everything(client: Any) -> dict[bytes, Any]:
    """All keys; without what a push counts of its duplicates, and how many changes were acknowledged."""
    readers = {
        b"string": client.get,
        b"hash": client.hgetall,
        b"set": client.smembers,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"stream": lambda key: client.xrange(key),
    }
    found = {key: await readers[await client.type(key)](key) for key in sorted(await client.keys("*"))}
    for key in (b"tba:test:counters", b"tba:other:counters"):
        for name in (b"pushed:duplicate", b"acknowledged"):
            found.get(key, {}).pop(name, None)
    return found


class TwiceScripts(Scripts):
    """Runs every script twice and compares."""

    def __init__(self, context: Context) -> None:
        super().__init__(context.durability, context.keys, context.epoch, context.losses)
        self.names: set[str] = set()

    async def run_with(
        self, name: str, args: Mapping[str, Any], payloads: Sequence[bytes] = (), commands: Sequence[Command] = ()
    ) -> list[Any]:
        client = self._durability.redis
        replies = await super().run_with(name, args, payloads, commands)
        before = await everything(client)
        again = await super().run_with(name, args, payloads)
        assert await everything(client) == before, f"{name} is not safe to repeat"
        assert name in REPLY_DIFFERS or again[0] == replies[0], f"{name} answers something else when it is repeated"
        self.names.add(name)
        return replies


async def roll_back(buffer: Buffer, folder: Path) -> None:
    """Ask for checkpoint 1-1, and obey."""
    store, back = FileStore(folder), RollbackRequest(step=1)
    store.put(f"{checkpoint_prefix('test')}1-1/manifest.json", b"{}")
    await Rollbacks(buffer.context, buffer.lineages, lambda: store).request(back)
    await buffer.lineages.new(LineageRequest(trainer_id="t", parent="1-1", obeys=back.request_id))


async def test_every_script_run_twice_leaves_what_it_left_once(
    buffer: Buffer, reward: RewardServer, start_service: StartService, tmp_path: Path
) -> None:
    twice = TwiceScripts(buffer.context)
    object.__setattr__(buffer.context, "scripts", twice)
    lineages, leases, draws, ack = buffer.lineages, buffer.leases, buffer.drawer, buffer.ledger.ack
    await buffer.catalog.upload(make_prompts(8, 3))
    lineage = await lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    await lineages.publish(VersionRequest(version="0-0", token=lineage.token))
    evaluation = EvalRequest(version="0-0", token=lineage.token, num_prompts=1)
    eval_id = (await buffer.evaluations.request(evaluation)).eval_id
    reply = await leases.lease(LeaseRequest(searcher_id="s", max_leases=6))
    assert [lease.kind for lease in reply.leases] == ["sample", "greedy", *["train"] * 4]
    ids = [lease.lease_id for lease in reply.leases]
    await leases.renew(LeaseRenewal(searcher_id="s", lease_ids=ids))
    nums = {each.lease_id: each.num_rollouts for each in reply.leases[:2]}
    results = [EvalResult(lease_id=i, rewards=[1.0] * n, num_response_tokens=[3] * n) for i, n in nums.items()]
    await buffer.evaluations.results(eval_id, EvalResults(searcher_id="s", version="0-0", results=results))
    await leases.give_back(LeaseReturn(searcher_id="s", lease_ids=ids[2:3], refused_lease_ids=ids[3:4]))
    again = await leases.lease(LeaseRequest(searcher_id="s", max_leases=2))
    assert again.leases[0].visit_id == reply.leases[2].visit_id

    visits = {lease.prompt.prompt_id: lease.visit_id for lease in reply.leases[4:]}
    for prompt_id, visit_id in [*visits.items(), *((f"train-{i}", "visit-of-nobody") for i in range(8))]:
        rollouts = [make_rollout(prompt_id, visit_id=visit_id, reward=float(i), searcher_id="s") for i in range(4)]
        await buffer.writer.push([encode_rollout(rollout) for rollout in rollouts])
    assert (await buffer.stats.read()).evicted == {}
    await buffer.writer.push([encode_rollout(make_rollout()) for _ in range(8)])
    assert (await buffer.stats.read()).evicted == {"max_rollouts": 8}

    reward.gate.clear()  # one script at a time
    await buffer.writer.push([encode_rollout(make_rollout(reward=None)) for _ in range(3)])
    reward.gate.set()
    while (await buffer.stats.read()).num_pending:
        await asyncio.sleep(0.01)

    request = BatchRequest(trainer_id="t", lineage=lineage.lineage, step=1, token=lineage.token)
    batch = decode_batch((await draws.draw(request)).body)
    ids = [rollout.rollout_id.hex() for rollout in batch.rollouts]
    trained = TrainedRollouts(rollout_ids=ids, advantages=[0.5] * 16, weights=[1.0] * 16)
    await ack(batch.batch_id, AckRequest(lineage=1, step=1, token=lineage.token, policy_ages=[0] * 16, trained=trained))
    change = SettingsRequest(settings=parse_live({"beta": 0.1, "most_on_policy_prob": 1, "sampling_temperature": 0.5}))
    assert (await buffer.settings.change(change, "operator")).revision == 1
    batch = decode_batch((await draws.draw(request.model_copy(update={"step": 2}))).body)
    await ack(batch.batch_id, AckRequest(lineage=1, step=2, token=lineage.token, settings_revision=1))
    await leases.lease(LeaseRequest(searcher_id="s", max_leases=1))
    await draws.draw(request.model_copy(update={"step": 3}))
    await lineages.checkpoint(CheckpointRequest(version="1-1", token=lineage.token, key="checkpoints/1-1"))
    await roll_back(buffer, tmp_path / "checkpoints")
    await lineages.new(LineageRequest(trainer_id="t", parent="0-0", rollback=True))
    await buffer.control.command("pause", RunCommand(reason="look"), "operator")
    await buffer.control.command("stop", RunCommand(), "operator")
    await lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    await buffer.control.command("pause", RunCommand(reason="the store was slow"), "operator")
    changes = (await buffer.control.changes(after=0)).changes
    assert [change.command for change in changes] == ["rollback", "lineage", "pause", "stop", "lineage", "pause"]
    said = [getattr(changes[-1], name) for name in ("role", "reason", "old", "new", "number")]
    assert said == ["operator", "the store was slow", "running", "paused", 6]
    assert await buffer.scaling.record(ScaleRequest(num_searchers=2)) == 1
    gauges = {STARTED_AT_S: 1.0, f"{WAITED_S}rollouts": 2.5}
    await buffer.components.trainer_waits.count(make_heartbeat("t", "trainer", gauges=gauges))
    assert await buffer.components.trainer_waits.totals() == {"rollouts": 2.5}
    await Compactor(buffer.context, min_events=1).keep_up(await buffer.view.catch_up())
    await save_and_load(buffer, start_service, twice, tmp_path)
    assert twice.names == set(SCRIPT_NAMES) - {"accept_loss"}  # it runs when the others are refused


async def test_a_loss_that_is_accepted_twice_by_one_request_is_counted_once(buffer: Buffer) -> None:
    await buffer.catalog.upload(make_prompts(1))
    args = buffer.context.losses.accept_args("operator", "x", "request-1")
    number = await buffer.context.scripts.accept_loss(**args)
    before = await everything(buffer.context.redis)
    assert await buffer.context.scripts.accept_loss(**args) == number
    assert await everything(buffer.context.redis) == before


@pytest.mark.parametrize(("field", "value"), [("state", b"bogus"), ("step", b"many"), ("lineage", b"\xff")])
async def test_a_line_of_the_audit_written_over_damage_can_be_read(buffer: Buffer, field: str, value: bytes) -> None:
    redis, keys = buffer.context.redis, buffer.context.keys
    whole = await redis.hget(keys.run, field)
    await redis.hset(keys.run, field, value)
    await buffer.context.scripts.accept_loss(**buffer.context.losses.accept_args("operator", "look again", "request-1"))
    await (redis.hdel(keys.run, field) if whole is None else redis.hset(keys.run, field, whole))
    changes = (await buffer.control.changes(after=0)).changes
    assert [(line.command, line.reason) for line in changes] == [("accept-loss", "look again")]


async def save_and_load(buffer: Buffer, start_service: StartService, twice: TwiceScripts, folder: Path) -> None:
    """The scripts of a run that begins with a snapshot of this one."""
    store = FileStore(folder / "store")
    await SnapshotSave(buffer.context, buffer.view, buffer.catalog, store, SnapshotSource("test", "end")).run()
    other = await start_service(num_prompts=0, run="other")
    others = TwiceScripts(other.context)
    object.__setattr__(other.context, "scripts", others)
    parts: Any = {"catalog": other.catalog, "lineages": other.lineages, "evictor": other.evictor}
    await SnapshotLoad(other.context, store=store, request=LoadRequest(source="test/end"), **parts).run()
    twice.names |= others.names
    assert (await other.stats.read()).num_rollouts == (await buffer.stats.read()).num_rollouts


async def test_uploads_at_once_add_every_prompt_once(buffer: Buffer) -> None:
    prompts = make_prompts(3000)
    await asyncio.gather(*(buffer.catalog.upload(prompts[at : at + 500]) for at in range(0, 3000, 500)))
    assert sorted(buffer.catalog.ids) == sorted(prompt.prompt_id for prompt in prompts)
    assert len(buffer.catalog.train) == 3000
    numbers = [buffer.catalog.find(prompt_id) for prompt_id in buffer.catalog.ids]
    assert [found[0] for found in numbers if found] == list(range(3000))

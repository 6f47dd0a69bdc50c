"""Drawing batches: waits, and many trainers at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import create_autospec

import pytest
from redis import Redis
from tba_buffer.run.state import RunSnapshot
from tba_buffer.sampling.mop import draw_slots
from tba_buffer.service import Buffer

from tba.api import AckRequest, BatchRequest, LineageReply, LineageRequest, VersionRequest
from tba.clients import BufferClient
from tba.errors import BusyError, UnavailableError
from tba.wire import Batch
from tba_cli.reports.ledger import LedgerCheck, ledger_lines, lineage_tree
from tests.support.buffer import make_payloads, make_prompts
from tests.support.buffer_fixtures import ServeBuffer, StartService
from tests.support.redis_process import RedisProcess
from tests.support.scored_buffer import counters

HOUR_S = 3600.0


class WallClock:
    """A clock that jumps on command."""

    offset_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset_s


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


async def begin(buffer: Buffer, num_rollouts: int) -> LineageReply:
    """A run in its first version with this many rollouts of one prompt."""
    await buffer.catalog.upload(make_prompts(8))
    lineage = await buffer.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    await buffer.lineages.publish(VersionRequest(version="0-0", token=lineage.token))
    await buffer.writer.push(make_payloads([f"train-{i}" for i in range(8)], per_prompt=num_rollouts // 8))
    return lineage


def request_of(lineage: LineageReply, step: int, wait_s: float = 0.0) -> BatchRequest:
    return BatchRequest(trainer_id="t", lineage=lineage.lineage, step=step, token=lineage.token, wait_s=wait_s)


@pytest.fixture
def start(start_service: StartService, clock: WallClock) -> StartService:
    """Call it with settings of the sampling section."""
    return lambda **sampling: start_service(clock=clock, sampling=sampling, trainer={"sync_interval": 2})


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
async def test_a_wall_clock_that_jumps_neither_holds_nor_ends_a_wait(start, clock: WallClock, jump_s: float) -> None:
    buffer = await start()
    lineage = await begin(buffer, 0)
    waiting = asyncio.create_task(buffer.drawer.draw(request_of(lineage, 1, wait_s=8.0)))
    while not (await buffer.components.read())[1]:
        await asyncio.sleep(0.01)
    clock.offset_s = jump_s
    (wait,) = (await buffer.components.read())[1]
    assert 0 <= wait.for_s <= 30
    assert -30 <= wait.deadline_in_s <= 8
    buffer.context.changed.notify()  # it looks again; eight seconds are not over
    await asyncio.sleep(0.1)
    assert not waiting.done()
    with pytest.raises(BusyError):
        await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"samples_per_insert": 1.0, "samples_per_insert_error": 16}, "samples-per-insert"),
        ({"alternate": True, "samples_per_insert": None}, "alternate-generate"),
    ],
)
async def test_races_lost_to_flow_control_are_named_after_it(
    start, monkeypatch: pytest.MonkeyPatch, sampling: dict, expected: str
) -> None:
    """Each look is older than what other draws have taken since."""
    buffer = await start(**sampling)
    lineage = await begin(buffer, 48)
    kept: RunSnapshot = await buffer.drawer._run_state.read()

    async def same_look() -> RunSnapshot:
        return replace(kept, index=await buffer.view.catch_up())  # but for draws: a batch from an old index is refused

    monkeypatch.setattr(buffer.drawer._run_state, "read", same_look)

    with pytest.raises(BusyError) as caught:
        _ = [await buffer.drawer.draw(request_of(lineage, step)) for step in range(1, 99)]
    assert caught.value.wait == expected


async def test_races_lost_to_eviction_of_everything_wait_for_rollouts(start, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = await start()
    lineage = await begin(buffer, 48)

    nothing_left = create_autospec(draw_slots, side_effect=ValueError("no prompt can fill a slot"))
    monkeypatch.setattr("tba_buffer.sampling.draw.draw_slots", nothing_left)
    with pytest.raises(BusyError) as caught:
        await buffer.drawer.draw(request_of(lineage, 1))
    assert caught.value.wait == "rollouts"


async def test_races_lost_to_void_batches_say_so(start, monkeypatch: pytest.MonkeyPatch, clock: WallClock) -> None:
    """The open batch is late each time it is to be answered, and nothing replaces it."""
    buffer = await start()
    lineage = await begin(buffer, 48)
    await buffer.drawer.draw(request_of(lineage, 1))

    async def not_voided(_: str) -> None:
        clock.offset_s = 0.0

    answer = buffer.drawer._return_open

    async def answer_late(member: str) -> object:
        clock.offset_s = HOUR_S
        return await answer(member)

    monkeypatch.setattr(buffer.drawer, "_return_open", answer_late)
    monkeypatch.setattr(buffer.drawer._run_state, "void", not_voided)
    with pytest.raises(BusyError) as caught:
        await buffer.drawer.draw(request_of(lineage, 1))
    assert caught.value.wait == "void-batch"


THREADS = 8
BATCH = 16


def filled(serve_buffer: ServeBuffer, **sections: dict) -> tuple[BufferClient, LineageReply]:
    return serve_buffer(**sections).begin(8, per_prompt=6)


def draw_or_none(client: BufferClient, lineage: LineageReply, step: int) -> Batch | None:
    try:
        return client.draw_batch(request_of(lineage, step))
    except BusyError:
        return None


def test_draws_of_many_steps_and_of_the_same_step_at_once(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer)
    steps = [step for step in range(1, 21) for _ in range(3)]  # each three times
    with ThreadPoolExecutor(THREADS) as pool:
        batches = list(pool.map(lambda step: client.draw_batch(request_of(lineage, step)), steps))
    by_step = {(step, batch.batch_id) for step, batch in zip(steps, batches, strict=True)}
    assert len(by_step) == len({batch_id for _, batch_id in by_step}) == 20
    assert client.stats().rollouts_drawn == 20 * BATCH


def test_draws_at_once_never_overshoot_samples_per_insert(serve_buffer: ServeBuffer, redis: RedisProcess) -> None:
    client, lineage = filled(serve_buffer, sampling={"samples_per_insert": 2.0, "samples_per_insert_error": 16})
    num_allowed = (2 * 48 + 16) // BATCH
    with ThreadPoolExecutor(THREADS) as pool:
        batches = list(pool.map(lambda step: draw_or_none(client, lineage, step), range(1, 4 * num_allowed)))
    assert sum(batch is not None for batch in batches) == num_allowed
    assert counters(redis)["drawn"] == num_allowed * BATCH
    client.push(make_payloads([f"train-{i}" for i in range(8)], per_prompt=2))
    with ThreadPoolExecutor(THREADS) as pool:
        more = list(pool.map(lambda step: draw_or_none(client, lineage, step), range(100, 120)))
    assert sum(batch is not None for batch in more) == 2


def test_draws_at_once_never_overshoot_an_alternate_interval(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer, sampling={"alternate": True}, trainer={"sync_interval": 3})
    for interval in range(2):
        steps = range(1 + 20 * interval, 21 + 20 * interval)
        with ThreadPoolExecutor(THREADS) as pool:
            batches = list(pool.map(lambda step: draw_or_none(client, lineage, step), steps))
        assert sum(batch is not None for batch in batches) == 3
        client.announce_version(VersionRequest(version=f"1-{interval}", token=lineage.token))
        client.push(make_payloads([f"train-{i}" for i in range(8)], per_prompt=6))


def test_a_batch_is_whole_however_much_is_evicted_meanwhile(serve_buffer: ServeBuffer, redis: RedisProcess) -> None:
    """Every push evicts a sixth of what is stored, while a trainer trains and two draws run ahead of it."""
    buffer = serve_buffer(buffer={"max_rollouts": 48})
    client, lineage = buffer.begin(8, per_prompt=6)
    over = threading.Event()

    def push_on() -> int:
        pusher, num = buffer.client(), 0
        while not over.is_set():
            pusher.push(make_payloads([f"train-{i}" for i in range(8)], per_prompt=1))
            num += 8
        return num

    num_steps, batches = 60, []
    with ThreadPoolExecutor(3) as pool:
        pushes = pool.submit(push_on)
        try:
            ahead = [pool.submit(client.draw_batch, request_of(lineage, step, 60.0)) for step in (1, 2)]
            for step in range(1, num_steps + 1):
                batches.append(ahead.pop(0).result())
                client.ack(batches[-1].batch_id, AckRequest(lineage=1, step=step, token=lineage.token))
                ahead.append(pool.submit(client.draw_batch, request_of(lineage, step + 2, 60.0)))
            for future in ahead:
                future.result()
        finally:
            over.set()
    assert pushes.result() > 48  # all of the first ones are gone
    for batch in batches:
        assert [len(group.rollouts) for group in batch.groups] == [4] * 4
        assert all({r.prompt_id for r in group.rollouts} == {group.prompt_id} for group in batch.groups)
    numbers, run = counters(redis), client.run()
    assert numbers["drawn"] - numbers.get("void", 0) == numbers["trained"] + 2 * BATCH == (num_steps + 2) * BATCH
    check = LedgerCheck(lineage_tree(run.parents), lineage=run.lineage, step=run.step)
    for line in ledger_lines(client):
        check.take(line)
    assert (check.violations(), check.num_batches, run.step) == ([], num_steps, num_steps)
    assert Counter(batch.batch_id for batch in batches).most_common(1)[0][1] == 1


def test_a_batch_with_a_lost_rollout_is_never_answered_and_counts_as_void(
    serve_buffer: ServeBuffer, redis: RedisProcess, raw: Redis
) -> None:
    client, lineage = filled(serve_buffer)
    client.draw_batch(request_of(lineage, 1))
    raw.delete("tba:test:payloads")
    for step in (1, 2):  # the open batch, and a new one
        with pytest.raises(UnavailableError, match="their payloads are not in Redis"):
            client.draw_batch(request_of(lineage, step))
    numbers = counters(redis)
    assert numbers["drawn"] == numbers["void"]

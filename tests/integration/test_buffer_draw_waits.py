"""How long a draw waits, and what it says that it waits for, whatever the wall clock and other draws do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry
from tba_buffer.run.state import RunSnapshot
from tba_buffer.service import Buffer

from tba.api import BatchRequest, LineageReply, LineageRequest, VersionRequest
from tba.errors import BusyError
from tests.support.buffer import make_payloads, make_prompts, make_recipe
from tests.support.redis_process import RedisProcess

HOUR_S = 3600.0


class WallClock:
    """Jumps when told."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        """Unix seconds."""
        return time.time() + self.offset_s


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


async def begin(buffer: Buffer, num_rollouts: int) -> LineageReply:
    """A run in its first version with this many rollouts of one prompt."""
    await buffer.prompts.catalog.upload(make_prompts(8))
    lineage = await buffer.run.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    await buffer.run.lineages.publish(VersionRequest(version="0-0", token=lineage.token))
    await buffer.rollouts.writer.push(make_payloads([f"train-{i}" for i in range(8)], per_prompt=num_rollouts // 8))
    return lineage


def request_of(lineage: LineageReply, step: int, wait_s: float = 0.0) -> BatchRequest:
    return BatchRequest(trainer_id="t", lineage=lineage.lineage, step=step, token=lineage.token, wait_s=wait_s)


@pytest.fixture
async def start(redis: RedisProcess, clock: WallClock) -> AsyncIterator:
    started = []

    async def starter(**sampling: object) -> Buffer:
        recipe = make_recipe(buffer={"redis_url": redis.url}, sampling=sampling, trainer={"sync_interval": 2})
        buffer = Buffer(recipe, CollectorRegistry(), clock=clock)
        await buffer.context.redis.flushall()
        await buffer.start()
        started.append(buffer)
        return buffer

    yield starter
    for buffer in started:
        await buffer.stop()


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
async def test_a_wall_clock_that_jumps_neither_holds_nor_ends_a_wait(start, clock: WallClock, jump_s: float) -> None:
    buffer = await start()
    lineage = await begin(buffer, 0)
    waiting = asyncio.create_task(buffer.sampling.batch_drawer.draw(request_of(lineage, 1, wait_s=3.0)))
    while not (await buffer.run.components.read())[1]:
        await asyncio.sleep(0.01)
    clock.offset_s = jump_s
    (wait,) = (await buffer.run.components.read())[1]
    assert 0 <= wait.for_s <= 30
    assert -30 <= wait.deadline_in_s <= 3
    buffer.context.changed.notify()  # it looks again; three seconds are not over
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
    kept: RunSnapshot = await buffer.sampling.batch_drawer._run_state.read()

    async def same_look() -> RunSnapshot:
        return kept

    monkeypatch.setattr(buffer.sampling.batch_drawer._run_state, "read", same_look)

    async def draw_on() -> None:
        for step in range(1, 99):
            await buffer.sampling.batch_drawer.draw(request_of(lineage, step))

    with pytest.raises(BusyError) as caught:
        await draw_on()
    assert caught.value.wait == expected


async def test_races_lost_to_eviction_of_all_there_was_wait_for_rollouts(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await start()
    lineage = await begin(buffer, 48)

    def nothing_left(*_: object) -> None:
        raise ValueError("no prompt can fill a slot")

    monkeypatch.setattr("tba_buffer.sampling.draw.draw_slots", nothing_left)
    with pytest.raises(BusyError) as caught:
        await buffer.sampling.batch_drawer.draw(request_of(lineage, 1))
    assert caught.value.wait == "rollouts"


async def test_races_lost_to_void_batches_say_so(start, monkeypatch: pytest.MonkeyPatch, clock: WallClock) -> None:
    """The open batch is late each time it is to be answered, and nothing replaces it."""
    buffer = await start()
    lineage = await begin(buffer, 48)
    await buffer.sampling.batch_drawer.draw(request_of(lineage, 1))

    async def not_voided(_: str) -> None:
        clock.offset_s = 0.0

    answer = buffer.sampling.batch_drawer._return_open

    async def answer_late(member: str) -> object:
        clock.offset_s = HOUR_S
        return await answer(member)

    monkeypatch.setattr(buffer.sampling.batch_drawer, "_return_open", answer_late)
    monkeypatch.setattr(buffer.sampling.batch_drawer._run_state, "void", not_voided)
    with pytest.raises(BusyError) as caught:
        await buffer.sampling.batch_drawer.draw(request_of(lineage, 1))
    assert caught.value.wait == "void-batch"

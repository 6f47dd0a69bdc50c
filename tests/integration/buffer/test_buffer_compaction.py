"""The checkpoint of the log: one atomic switch, right after a crash at any step, right for every reader meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tba_buffer.index import log_follower
from tba_buffer.index.log_follower import PIECE_LIFETIME_MS, Compactor, read_head
from tba_buffer.service import Buffer

from tba.api import LineageRequest, VersionRequest
from tba.errors import UnavailableError
from tests.support.buffer import make_payloads, make_recipe
from tests.support.buffer_fixtures import StartService, copy_of, go_back
from tests.support.index_values import fingerprint
from tests.support.redis_process import RedisProcess, start_redis

NUM_PIECES = 7


@pytest.fixture
def redis(tmp_path: Path) -> Any:
    process = start_redis(tmp_path)
    yield process
    process.stop()


@pytest.fixture
async def buffer(start_service: StartService) -> Buffer:
    """20 live rollouts of 40, and a publication; nothing that upkeep reads or writes comes in between."""
    started = await start_service(buffer={"max_rollouts": 20, "UPKEEP_S": 3600.0})
    lineage = await started.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    await push(started)
    await started.lineages.publish(VersionRequest(version="0-0", token=lineage.token))
    await push(started)
    return started


def new_buffer(redis: RedisProcess) -> Buffer:
    return Buffer(make_recipe(buffer={"redis_url": redis.url, "max_rollouts": 20}), CollectorRegistry())


def new_writer(buffer: Buffer) -> Compactor:
    return Compactor(buffer.context, min_events=5, piece_records=3)


async def push(buffer: Buffer, num: int = 5) -> None:
    await buffer.writer.push(make_payloads([f"train-{i}" for i in range(4)], per_prompt=num))


async def fingerprint_of_restart(redis: RedisProcess) -> tuple[object, ...]:
    """Return the state that a starting buffer reads; this buffer is not started and owns nothing."""
    other = new_buffer(redis)
    try:
        return fingerprint(await other.view.catch_up())
    finally:
        await other.stop()


async def pieces(buffer: Buffer) -> dict[str, int]:
    """Name of each piece -> how long it still lives in ms, -1 for ever."""
    names = await buffer.context.redis.keys("*:base:*")
    return {name.decode().split(":base:")[1]: await buffer.context.redis.pttl(name) for name in names}


def expected_pieces(generation: int) -> dict[str, int]:
    return {f"{generation}:{number}": -1 for number in range(NUM_PIECES)}


async def test_a_checkpoint_replaces_the_log_and_the_checkpoint_before(buffer: Buffer, redis: RedisProcess) -> None:
    writer, log_key = new_writer(buffer), buffer.context.keys.log
    for generation in (1, 2):
        index = await buffer.view.catch_up()
        await writer.keep_up(index)
        assert await pieces(buffer) == expected_pieces(generation)
        head = await read_head(buffer.context)
        assert (head.generation, head.position, head.num_pieces) == (generation, index.position, NUM_PIECES)
        assert (head.publications, len(head.publications)) == (tuple(index.publications), 1)
        assert await buffer.context.redis.xlen(log_key) == 1
        assert await fingerprint_of_restart(redis) == fingerprint(index)
        await push(buffer, num=2)
        assert await fingerprint_of_restart(redis) == fingerprint(await buffer.view.catch_up())


async def test_a_short_tail_is_left_alone(buffer: Buffer) -> None:
    index = await buffer.view.catch_up()
    for min_events, num_checkpoints in ((1000, 0), (index.position, 0), (index.position - 1, 1)):
        await Compactor(buffer.context, min_events=min_events).keep_up(index)
        assert (await read_head(buffer.context)).generation == num_checkpoints
    await push(buffer, num=2)
    await Compactor(buffer.context, min_events=12).keep_up(await buffer.view.catch_up())
    assert (await read_head(buffer.context)).generation == 1


async def test_many_small_pushes_make_a_tail_long_too(buffer: Buffer) -> None:
    writer = Compactor(buffer.context, min_events=16)
    await writer.keep_up(await buffer.view.catch_up())
    assert (await read_head(buffer.context)).generation == 1
    for _ in range(2):
        await buffer.writer.push(make_payloads(["train-0"], per_prompt=1))
    assert (await buffer.view.catch_up()).position - (await read_head(buffer.context)).position < 16
    await writer.keep_up(await buffer.view.catch_up())
    assert (await read_head(buffer.context)).generation == 2


@pytest.mark.parametrize("num_written", [0, 1, NUM_PIECES])
async def test_a_crash_between_pieces_changes_nothing(buffer: Buffer, redis: RedisProcess, num_written: int) -> None:
    await new_writer(buffer).keep_up(await buffer.view.catch_up())
    await push(buffer)
    before = fingerprint(await buffer.view.catch_up())
    fail_after(buffer, num_written)
    with pytest.raises(UnavailableError, match="crash"):
        await new_writer(buffer).keep_up(buffer.view.index)
    left = await pieces(buffer)
    assert {name: left.pop(name) for name in expected_pieces(1)} == expected_pieces(1)
    assert set(left) == {f"2:{number}" for number in range(num_written)}
    assert all(0 < life_ms <= PIECE_LIFETIME_MS for life_ms in left.values())
    assert await fingerprint_of_restart(redis) == before
    again = new_buffer(redis)
    await again.start()
    await new_writer(again).keep_up(again.view.index)
    assert {name for name, life_ms in (await pieces(again)).items() if life_ms < 0} == set(expected_pieces(3))
    assert await fingerprint_of_restart(redis) == before
    await again.stop()


def fail_after(buffer: Buffer, num_written: int) -> None:
    """From now on the process dies after so many pieces, at the latest before the switch."""
    context, num = buffer.context, 0
    real_set, real_run = context.redis.set, context.scripts.run

    async def failing_set(*args: Any, **kwargs: Any) -> Any:
        nonlocal num
        num += 1
        if num > num_written:
            raise UnavailableError("crash")
        return await real_set(*args, **kwargs)

    async def failing_run(name: str, **args: Any) -> Any:
        if name == "compact":
            raise UnavailableError("crash")
        return await real_run(name, **args)

    context.redis.set = failing_set
    context.scripts.run = failing_run  # type: ignore[method-assign]


async def test_after_a_failure_the_next_attempt_waits(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, index, real_run = new_writer(buffer), await buffer.view.catch_up(), buffer.context.scripts.run
    fail_after(buffer, 100)
    with pytest.raises(UnavailableError):
        await writer.keep_up(index)
    buffer.context.scripts.run = real_run  # type: ignore[method-assign]
    await writer.keep_up(index)
    assert (await read_head(buffer.context)).generation == 0
    monkeypatch.setattr(writer, "_retry_at_s", 0.0)
    await writer.keep_up(index)
    assert (await read_head(buffer.context)).generation == 2


async def test_what_changes_while_the_pieces_are_written_is_right(buffer: Buffer, redis: RedisProcess) -> None:
    index, real_set, num = await buffer.view.catch_up(), buffer.context.redis.set, 0
    position = index.position

    async def set_and_push(*args: Any, **kwargs: Any) -> Any:
        nonlocal num
        reply, num = await real_set(*args, **kwargs), num + 1
        if num in (2, 4):
            await push(buffer, num=1)  # evicts four of the oldest
            await buffer.view.catch_up()
        return reply

    buffer.context.redis.set = set_and_push
    await new_writer(buffer).keep_up(index)
    head = await read_head(buffer.context)
    assert (head.generation, head.position) == (1, position)
    assert await fingerprint_of_restart(redis) == fingerprint(await buffer.view.catch_up())


async def test_a_checkpoint_whose_pieces_are_gone_is_not_switched_to(buffer: Buffer, redis: RedisProcess) -> None:
    index, real_run = await buffer.view.catch_up(), buffer.context.scripts.run

    async def lose_a_piece(name: str, **args: Any) -> Any:
        await buffer.context.redis.unlink(buffer.context.keys.checkpoint_piece(args["generation"], 1))
        return await real_run(name, **args)

    buffer.context.scripts.run = lose_a_piece  # type: ignore[method-assign]
    await new_writer(buffer).keep_up(index)
    assert (await read_head(buffer.context)).generation == 0
    assert await fingerprint_of_restart(redis) == fingerprint(index)


async def test_redis_killed_right_after_the_switch_has_the_checkpoint(buffer: Buffer, redis: RedisProcess) -> None:
    index = await buffer.view.catch_up()
    await new_writer(buffer).keep_up(index)
    redis.kill()
    redis.start()
    assert await pieces(buffer) == expected_pieces(1)
    assert await fingerprint_of_restart(redis) == fingerprint(index)


async def test_a_reader_starts_over_when_another_checkpoint_is_switched_to(
    buffer: Buffer, redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = new_writer(buffer)
    await writer.keep_up(await buffer.view.catch_up())
    await push(buffer)
    heads, real_read_head = [], log_follower.read_head

    async def read_head_then_switch(context: Any) -> Any:
        heads.append(await real_read_head(context))
        if len(heads) == 1:
            await writer.keep_up(await buffer.view.catch_up())
        return heads[-1]

    monkeypatch.setattr(log_follower, "read_head", read_head_then_switch)
    assert await fingerprint_of_restart(redis) == fingerprint(await buffer.view.catch_up())
    assert [head.generation for head in heads] == [1, 1, 2], "read, read by the compactor, read again"


async def test_a_log_with_a_hole_is_a_clear_state_and_not_a_wrong_index(buffer: Buffer, redis: RedisProcess) -> None:
    keys, client = buffer.context.keys, buffer.context.redis
    entries = await client.xrange(keys.log)
    await client.xdel(keys.log, entries[1][0])
    with pytest.raises(UnavailableError, match=r"log of run 'test' in Redis is not whole .*view ends at"):
        await fingerprint_of_restart(redis)
    await client.xtrim(keys.log, minid=entries[2][0], approximate=False)
    with pytest.raises(UnavailableError, match=r"not whole .*begins at .* no checkpoint"):
        await fingerprint_of_restart(redis)
    await client.delete(keys.log)
    with pytest.raises(UnavailableError, match=r"not whole .*entries end at 0"):
        await fingerprint_of_restart(redis)


async def test_a_redis_that_lost_its_end_and_has_grown_again_is_noticed(start_service: StartService) -> None:
    """With appendfsync everysec, the log can end at the same position in another history."""
    buffer = await start_service()
    client, keys = buffer.context.redis, buffer.context.keys
    await push(buffer)
    earlier = await copy_of(client)
    await push(buffer)
    assert (await buffer.view.catch_up()).position == 40
    await go_back(client, earlier)
    with pytest.raises(UnavailableError, match="lost data of this run: 1 acknowledged changes"):
        await push(buffer)
    await buffer.recovery.accept("operator", None)
    index = await buffer.view.catch_up()
    assert index.position == 40
    assert set(index.rollout_ids(index.live_rows())) == set(await client.hkeys(keys.payloads))


async def test_of_two_that_accept_a_loss_at_once_one_does(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await start_service()
    client, keys, reread = buffer.context.redis, buffer.context.keys, buffer.view.reread
    earlier = await copy_of(client)
    await push(buffer)
    await go_back(client, earlier)
    others: list[asyncio.Task[None]] = []

    async def reread_while_another_accepts() -> None:
        if not others:
            others.append(asyncio.create_task(buffer.recovery.accept("operator", "the second")))
            await asyncio.wait(others, timeout=1.0)  # it waits for the first
        await reread()

    monkeypatch.setattr(buffer.view, "reread", reread_while_another_accepts)
    await buffer.recovery.accept("operator", "the first")
    await others[0]
    lines = [json.loads(line) for line in await client.lrange(keys.run_changes, 0, -1)]
    assert [line["reason"] for line in lines] == ["the first"]
    assert await client.hget(keys.run, "losses_accepted") == b"1"

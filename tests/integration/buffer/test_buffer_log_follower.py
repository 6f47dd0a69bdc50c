"""Catching up with the log, page by page, when a page cannot be read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tba_buffer.index import log_follower as viewing
from tba_buffer.index.log_follower import IndexView
from tba_buffer.service import Buffer

from tba.api import LineageRequest
from tba.errors import UnavailableError
from tba.wire import encode_rollout
from tests.support.buffer import make_prompts, make_rollout
from tests.support.buffer_fixtures import StartService
from tests.support.waits import DEADLINE_S


@pytest.fixture
async def buffer(start_service: StartService) -> Buffer:
    return await start_service()


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_catch_up_that_ends_early_continues_where_it_ended(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(viewing, "ENTRIES_PER_READ", 4)
    view, redis_client = IndexView(buffer.context), buffer.context.redis
    await buffer.writer.push([encode_rollout(make_rollout())])
    index = await view.catch_up()
    for _ in range(12):
        await buffer.writer.push([encode_rollout(make_rollout())])
    xrange, pages, here = redis_client.xrange, 0, asyncio.current_task()

    async def second_page_ends(*args: Any) -> Any:
        nonlocal pages
        if asyncio.current_task() is not here:  # upkeep reads the log as well
            return await xrange(*args)
        pages += 1
        if pages == 2:
            raise UnavailableError("away") if how == "fails" else asyncio.CancelledError
        return await xrange(*args)

    monkeypatch.setattr(redis_client, "xrange", second_page_ends)
    with pytest.raises((UnavailableError, asyncio.CancelledError)):
        await view.catch_up()
    assert index.position == 4, "the first page is applied"
    assert await view.catch_up() is index, "not built again"
    assert index.num_live == 13


async def test_after_redis_came_back_from_an_older_file_everything_is_read_again(buffer: Buffer) -> None:
    client, keys = buffer.context.redis, buffer.context.keys
    await buffer.writer.push([encode_rollout(make_rollout())])
    names = [name for name in await client.keys("*") if name != keys.epoch.encode()]
    older = {name: await client.dump(name) for name in names}
    await buffer.catalog.upload(make_prompts(6))
    await buffer.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    await buffer.writer.push([encode_rollout(make_rollout("train-5"))])
    index = await buffer.view.catch_up()
    assert [index.num_live, buffer.lineages.knows(1)] == [2, True]

    await client.delete(*[name for name in await client.keys("*") if name != keys.epoch.encode()])
    for name, content in older.items():
        await client.restore(name, 0, content)
    assert (await buffer.view.catch_up()).num_live == 1
    assert [buffer.catalog.ids, buffer.lineages.knows(1)] == [[f"train-{i}" for i in range(4)], False]
    assert buffer.catalog.find("train-5") is None
    assert len(buffer.catalog.train_numbers()) == 4


async def test_a_log_of_more_prompts_than_redis_has_is_refused(buffer: Buffer) -> None:
    client, keys = buffer.context.redis, buffer.context.keys
    await buffer.writer.push([encode_rollout(make_rollout("train-3"))])
    await buffer.view.catch_up()
    await client.ltrim(keys.prompt_order, 0, 2)
    after = Buffer(buffer.context.recipe, CollectorRegistry())
    with pytest.raises(UnavailableError, match=r"lost prompts of run 'test'.*prompt number 3, but it has 3 prompts"):
        await after.start()
    assert await after.ready() is not None
    await after.stop()


async def test_an_entry_that_is_none_of_the_log_is_named(buffer: Buffer) -> None:
    await buffer.writer.push([encode_rollout(make_rollout())])
    await buffer.view.catch_up()
    await buffer.context.redis.xadd(buffer.context.keys.log, {"zz": 1}, id="2-0")
    with pytest.raises(UnavailableError, match=r"not whole .entry 2-0 is not an entry of the log"):
        await buffer.view.catch_up()
    assert "entry 2-0" in str(await buffer.ready())
    await buffer.context.redis.xdel(buffer.context.keys.log, "2-0")
    assert (await buffer.view.catch_up()).num_live == 1
    async with asyncio.timeout(DEADLINE_S):  # the upkeep, which has seen the entry too, looks again within a second
        while await buffer.ready() is not None:
            await asyncio.sleep(0.05)

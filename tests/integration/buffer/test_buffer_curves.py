"""GET /v1/curves: the metrics of the steps over HTTP, over resumes, restores of Redis and damaged lines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from redis import Redis
from tba_buffer.monitoring import curves
from tba_buffer.monitoring.curves import CurvesReader
from tba_buffer.run.lineage import Lineages
from tba_buffer.storage.context import Context
from tba_buffer.storage.keys import Keys

from tba.clients import BufferClient
from tba.errors import BadRequestError
from tba.versions import START, PolicyVersion
from tests.support.buffer import make_recipe, start_lineage
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.buffer_reads import ask
from tests.support.leases import make_step
from tests.support.redis_process import RedisProcess

KEYS = Keys("test")


def filled(serve_buffer: ServeBuffer, **sections: Any) -> BufferClient:
    client, _ = serve_buffer(**sections).begin(4, per_prompt=4)
    return client


def line(step: int, **metrics: float | None) -> str:
    """A line of the ledger with so many rollouts that a few of them fill a page."""
    ids = ["0" * 32] * 512
    return json.dumps(
        {"kind": "batch", "lineage": 1, "step": step, "acked_at_s": 100.0 + step, "rollout_ids": ids}
        | {"batch_id": f"b-{step}", "num_rollouts": len(ids), "metrics": metrics}
    )


def append(redis: RedisProcess, *lines: str) -> None:
    with Redis.from_url(redis.url) as direct:
        for text in lines:
            direct.rpush(KEYS.ledger, text)


def test_a_step_is_in_the_curves_as_soon_as_it_is_acked(serve_buffer: ServeBuffer) -> None:
    client = filled(serve_buffer)
    first = start_lineage(client)
    before = client.curves()
    assert (before.names, before.num_steps, before.steps, before.values) == ([], 0, [], {})
    make_step(client, first, 1, metrics={"loss": 0.5, "reward": None})
    make_step(client, first, 2, metrics={"loss": 0.25, "grad_norm": 7})
    found = client.curves()
    assert found.names == ["loss", "reward", "grad_norm"]
    assert (found.num_steps, found.num_steps_per_point, found.num_abandoned) == (2, 1, 0)
    assert (found.first_steps, found.steps) == ([1, 2], [1, 2])
    assert found.values == {"loss": [0.5, 0.25], "reward": [None, None], "grad_norm": [None, 7.0]}
    assert found.at_s == [entry.acked_at_s for entry in client.ledger().entries if entry.kind == "batch"]
    make_step(client, first, 3, metrics={"loss": 0.125})
    assert client.curves(names=["loss", "unknown"], from_step=2).values == {
        "loss": [0.25, 0.125],
        "unknown": [None, None],
    }
    assert client.curves(names=["loss"], to_step=1).values == {"loss": [0.5]}
    assert client.curves(names=[]).values == {}


@pytest.mark.parametrize("mix", [None, {"low": 0.5, "high": 2.0}])
def test_the_summary_takes_no_mix_of_temperatures_for_old_data(
    serve_buffer: ServeBuffer, mix: dict[str, float] | None
) -> None:
    client = filled(serve_buffer, searcher={"temperature_mix": mix})
    lineage = start_lineage(client)
    for step in (1, 2, 3):
        make_step(client, lineage, step, metrics={"ess": 0.01})
    assert (client.summary().state == "alarm") == (mix is None)


def test_a_resume_takes_abandoned_steps_out_that_were_shown_before(serve_buffer: ServeBuffer) -> None:
    client = filled(serve_buffer)
    first = start_lineage(client)
    for step in (1, 2, 3):
        make_step(client, first, step, metrics={"loss": float(step)})
    assert client.curves().values["loss"] == [1.0, 2.0, 3.0]
    second = start_lineage(client, PolicyVersion(first.lineage, 1))
    assert (client.curves().steps, client.curves().num_abandoned) == ([1], 2)
    make_step(client, second, 2, metrics={"loss": 20.0})
    found = client.curves()
    assert (found.steps, found.values["loss"], found.num_abandoned) == ([1, 2], [1.0, 20.0], 2)
    start_lineage(client, START)
    assert (client.curves().steps, client.curves().num_abandoned) == ([], 4)


def test_ranges_and_numbers_that_cannot_be_meant_are_refused(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().client()
    with pytest.raises(BadRequestError, match="from_step 5 is after to_step 4"):
        client.curves(from_step=5, to_step=4)
    for points in (0, 2001):
        with pytest.raises(BadRequestError, match="max_points"):
            client.curves(max_points=points)
    with pytest.raises(BadRequestError, match="501 metrics; ask for at most 500"):
        client.curves(names=[f"m{i}" for i in range(501)])


def test_a_damaged_line_is_an_error_with_its_number(serve_buffer: ServeBuffer, redis: RedisProcess) -> None:
    client = filled(serve_buffer)
    # line 0 is the start of the trainer; the numbers are those that the ledger gives
    append(redis, line(1, loss=1.0), json.dumps({"kind": "batch", "lineage": 1, "acked_at_s": 1.0, "metrics": {}}))
    for _ in range(2):
        status, answer = ask(client.base_url, "/v1/curves")
        assert (status, b"the field line 2 of tba:test:ledger in Redis cannot be read" in answer) == (503, True)


class World:
    """A reader over a Redis that the test fills."""

    def __init__(self, redis: RedisProcess) -> None:
        self.redis = redis
        self.context = Context.connect(make_recipe(buffer={"redis_url": redis.url}))
        self.reader = CurvesReader(self.context, Lineages(self.context))
        with Redis.from_url(redis.url) as direct:
            direct.flushall()
            direct.hset(KEYS.run, "lineage", 1)

    def append(self, *lines: str) -> None:
        append(self.redis, *lines)

    async def losses(self, **query: Any) -> list[float | None]:
        return (await self.reader.read(names="loss", **query)).values["loss"]


@pytest_asyncio.fixture
async def world(redis: RedisProcess) -> AsyncIterator[World]:
    found = World(redis)
    yield found
    await found.context.durability.aclose()


async def test_what_was_read_is_not_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = 0
    sizes: list[int] = []
    original = curves.read_page

    def counted(lines: list[bytes], **of: Any) -> list[curves.BatchLine]:
        nonlocal parsed
        parsed += len(lines)
        sizes.append(sum(map(len, lines)))
        return original(lines, **of)

    monkeypatch.setattr(curves, "read_page", counted)
    monkeypatch.setattr(curves, "PAGE_BYTES", 100_000)  # about five lines
    world.append(*(line(step, loss=float(step)) for step in range(1, 51)))
    assert await world.losses() == [float(step) for step in range(1, 51)]
    assert parsed == 50
    assert max(sizes[1:]) <= 100_000
    world.append(line(51, loss=51.0))
    assert (await world.losses())[-2:] == [50.0, 51.0]
    assert await world.losses(from_step=51) == [51.0]
    assert parsed == 51


@pytest.mark.parametrize("num_again", [0, 3, 5, 20])
async def test_a_ledger_that_redis_has_lost_is_read_from_its_beginning(world: World, num_again: int) -> None:
    world.append(*(line(step, loss=1.0) for step in range(1, 11)))
    assert await world.losses() == [1.0] * 10
    with Redis.from_url(world.redis.url) as direct:
        direct.ltrim(KEYS.ledger, 0, 4)
    world.append(*(line(step, loss=2.0) for step in range(6, 6 + num_again)))
    assert await world.losses() == [1.0] * 5 + [2.0] * num_again


async def test_points_are_the_means_of_the_known_values_of_neighbours(world: World) -> None:
    rng = np.random.default_rng(0)
    values: list[float | None] = [None if rng.random() < 0.4 else float(rng.normal()) for _ in range(103)]
    values[20:40] = [None] * 20
    lines = [line(step, loss=value, **({"late": 1.0} if step > 90 else {})) for step, value in enumerate(values, 1)]
    world.append(*lines)
    found = await world.reader.read(max_points=10, from_step=2)
    assert (found.num_steps, found.num_steps_per_point, found.first_steps) == (102, 11, list(range(2, 104, 11)))
    assert (found.steps, found.at_s) == ([*range(12, 104, 11), 103], [100.0 + step for step in found.steps])
    for first, last, mean in zip(found.first_steps, found.steps, found.values["loss"], strict=True):
        known = [value for value in values[first - 1 : last] if value is not None]
        assert mean == (pytest.approx(np.mean(known)) if known else None)
    assert None in found.values["loss"]
    assert found.values["late"] == [None] * 8 + [1.0] * 2
    everything = await world.reader.read(max_points=103)
    assert everything.values["loss"] == values


async def test_sums_that_no_float_can_hold_are_unknown(world: World) -> None:
    world.append(line(1, loss=1.7e308), line(2, loss=1.7e308), line(3, loss=1.0))
    assert await world.losses(max_points=2) == [None, 1.0]


async def test_the_number_of_metrics_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MAX_NAMES", 3)
    world.append(*(line(step, loss=1.0, **{f"made up {step}": 1.0}) for step in range(1, 9)))
    found = await world.reader.read()
    assert (found.names, found.values["loss"]) == (["loss", "made up 1", "made up 2"], [1.0] * 8)

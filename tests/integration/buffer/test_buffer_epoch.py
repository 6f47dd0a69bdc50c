"""Two buffer processes over one Redis: the one that started last owns the run, the other one can remove nothing."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry
from tba_buffer.index.log_follower import Compactor, read_head
from tba_buffer.service import Buffer

from tba.api import BatchRequest, LineageRequest
from tba.clients import BufferClient
from tba.clients.service_client import ServiceClient
from tba.errors import SupersededError, UnavailableError
from tba.versions import PolicyVersion
from tests.support.buffer import make_payloads, make_prompts
from tests.support.buffer_fixtures import ServeBuffer, StartService


async def test_the_older_process_removes_nothing_and_serves_nothing(start_service: StartService) -> None:
    # without upkeep, which would notice the newer process before it is told
    old = await start_service(buffer={"max_rollouts": 10, "UPKEEP_S": 3600.0})
    lineage = await old.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    await old.writer.push(make_payloads(["train-0"], per_prompt=10))
    new = await start_service(num_prompts=0)
    assert (old.context.epoch.number, new.context.epoch.number) == (1, 2)

    await new.writer.push(make_payloads(["train-1"], per_prompt=3))
    with pytest.raises(SupersededError, match="a newer buffer process owns run"):
        await old.evictor.enforce()
    index = await new.view.catch_up()
    assert (index.num_live, (await new.context.counters()).get("evicted:max_rollouts")) == (13, None)

    request = BatchRequest(trainer_id="t", lineage=lineage.lineage, step=1, token=lineage.token)
    with pytest.raises(SupersededError, match="newer buffer process"):
        await old.drawer.draw(request)
    with pytest.raises(UnavailableError, match="newer buffer process"):
        await old.writer.push(make_payloads(["train-1"]))
    assert "newer buffer process owns run 'test' (this one has epoch 1)" in str(await old.ready())
    assert await new.ready() is None
    assert (await new.drawer.draw(request)).body


async def test_the_older_process_stores_nothing(start_service: StartService) -> None:
    old, new = await start_service(buffer={"UPKEEP_S": 3600.0}), await start_service(num_prompts=0)
    with pytest.raises(SupersededError, match="push of 4 rollouts was refused: a newer buffer process owns run"):
        await old.writer.push(make_payloads(["train-0"]))
    assert (await new.view.catch_up()).num_live == 0


async def test_the_older_process_switches_to_no_checkpoint(start_service: StartService) -> None:
    old = await start_service()
    await old.writer.push(make_payloads(["train-0"], per_prompt=10))
    index = await old.view.catch_up()
    new = await start_service(num_prompts=0)
    with pytest.raises(SupersededError, match="a newer buffer process owns run"):
        await Compactor(old.context, min_events=1).keep_up(index)
    assert (await read_head(new.context)).generation == 0
    assert await new.context.redis.xlen(new.context.keys.log) == 1


async def test_an_idle_older_process_is_soon_not_ready(serve_buffer: ServeBuffer) -> None:
    client = serve_buffer().with_prompts(1)
    serve_buffer()
    deadline_s = time.monotonic() + 30
    while (answer := push_problem(client)) is None:  # the upkeep asks every second
        assert time.monotonic() < deadline_s
    assert "newer buffer process" in answer
    with pytest.raises(UnavailableError, match="newer buffer process"):
        ServiceClient(client.base_url, retry_s=0)._call("GET", "/readyz")


def push_problem(client: BufferClient) -> str | None:
    try:
        client.push(make_payloads(["train-0"]))
    except UnavailableError as error:
        return str(error)
    return None


async def test_the_older_process_adds_no_prompts_and_starts_no_lineage(start_service: StartService) -> None:
    old, new = await start_service(num_prompts=0), await start_service(num_prompts=0)
    with pytest.raises(SupersededError, match="a newer buffer process owns run"):
        await old.catalog.upload(make_prompts(1))
    with pytest.raises(SupersededError, match="a newer buffer process owns run"):
        await old.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    keys = new.context.keys
    assert await new.context.redis.exists(keys.prompts, keys.prompt_order, keys.lineages, keys.run) == 0


async def test_what_another_process_added_is_known_to_the_next_push(start_service: StartService) -> None:
    buffer = await start_service(num_prompts=0)
    other = Buffer(buffer.context.recipe, CollectorRegistry())
    other.context.epoch.number = buffer.context.epoch.number  # as if it had written just before it was superseded
    await other.catalog.upload(make_prompts(2))
    lineage = await other.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    payloads = make_payloads(["train-1", "nobody"], per_prompt=1, version=PolicyVersion(lineage.lineage, 0))
    outcomes, _ = await buffer.writer.push(payloads)
    assert [outcome.outcome for outcome in outcomes] == ["new", "refused"]
    assert "'nobody' was never uploaded" in str(outcomes[1].reason)
    await other.stop()


@pytest.mark.parametrize("found", [None, 1])
async def test_a_redis_that_counts_fewer_starts_has_lost_data(start_service: StartService, found: int | None) -> None:
    _, buffer = await start_service(num_prompts=0), await start_service(num_prompts=0)
    await buffer.context.redis.flushall()
    if found is not None:
        await buffer.context.redis.set(buffer.context.keys.epoch, found)
    says = r"Redis has lost data of this run.*load a saved buffer into a new run"
    with pytest.raises(UnavailableError, match=says) as refused:
        await buffer.catalog.upload(make_prompts(1))
    assert not isinstance(refused.value, SupersededError)
    assert "Redis has lost data" in str(await buffer.ready())

"""Order, uses and weights of draws over REST, across kill -9, void batches, resumes and compactions of the log."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry
from tba_buffer.index.log_follower import Compactor
from tba_buffer.sampling.mop import draw_slots
from tba_buffer.service import Buffer

from tba.api import LineageReply, LineageRequest
from tba.clients import BufferClient
from tba.errors import BusyError
from tba.wire import Batch
from tests.support.buffer import Stack, begin_run, make_payloads, make_recipe
from tests.support.buffer_fixtures import ServeBuffer, later
from tests.support.index_values import fingerprint
from tests.support.leases import draw, make_step
from tests.support.redis_process import RedisProcess

NUM_PROMPTS = 10
ALL_PROMPTS = [f"train-{number}" for number in range(NUM_PROMPTS)]


def filled(serve_buffer: ServeBuffer, *, per_prompt: int = 4, **sampling: object) -> tuple[BufferClient, LineageReply]:
    """A run with batches of three slots of two, by default replay alone."""
    defaults = {"prompts_per_batch": 3, "group_size": 2, "most_on_policy_prob": 0.0, "min_size_to_sample": 4}
    return serve_buffer(sampling={**defaults, **sampling}, trainer={"num_steps": 10_000}).begin(
        NUM_PROMPTS, per_prompt=per_prompt
    )


def prompts_of(batch: Batch) -> list[str]:
    return [group.prompt_id for group in batch.groups]


def spread(uses: Counter[str]) -> int:
    """The most uses of a prompt minus the fewest."""
    num = [uses[prompt] for prompt in ALL_PROMPTS]
    return max(num) - min(num)


def test_epochs_go_on_over_kills_of_the_buffer(stack: Stack) -> None:
    """The recipe of the stack draws half of its slots as recent; before a publication both pools hold all prompts."""
    client = stack.client
    lineage = begin_run(client, NUM_PROMPTS, per_prompt=4)
    uses = {"recent": Counter[str](), "replay": Counter[str]()}
    for step in range(1, 25):
        for group in make_step(client, lineage, step).groups:
            uses[group.source][group.prompt_id] += 1
        if step % 6 == 0:
            stack.buffer.kill()
            stack.buffer.start()
        # not one: a prompt that the other pool has used in a batch waits for the next one
        assert all(spread(each) <= 2 for each in uses.values())
    assert sum(each.total() for each in uses.values()) == 24 * 4


@pytest.mark.parametrize("prioritise", ["within", "across"])
def test_a_rebuilt_index_draws_what_one_that_never_stopped_draws(
    serve_buffer: ServeBuffer, redis: RedisProcess, prioritise: str
) -> None:
    sampling = {"most_on_policy_prob": 0.4, "prioritise": prioritise, "reward_inverse_temperature": 1.0, "max_uses": 3}
    thread_client, lineage = filled(serve_buffer, **sampling)
    for step in range(1, 9):
        if step == 5:
            draw(thread_client, lineage, step)
            later(thread_client, 3600.0)  # void: drawn again
        make_step(thread_client, lineage, step)
    sections = {"prompts_per_batch": 3, "group_size": 2, "min_size_to_sample": 4, **sampling}
    recipe = make_recipe(buffer={"redis_url": redis.url}, sampling=sections)

    async def compare() -> None:
        live, rebuilt = Buffer(recipe, CollectorRegistry()), Buffer(recipe, CollectorRegistry())
        try:
            index = await live.view.catch_up()
            await live.context.redis.hset(live.context.keys.log_checkpoint, "attempts", 0)
            live.context.epoch.number = int(await live.context.redis.get(live.context.keys.epoch) or 0)
            await Compactor(live.context, min_events=1).keep_up(index)
            assert await live.context.redis.hget(live.context.keys.log_checkpoint, "num_draw_pieces") == b"1"
            other = await rebuilt.view.catch_up()
            assert fingerprint(other) == fingerprint(index)
            for seed in range(50):
                one, two = (draw_slots(each, recipe.sampling, seed) for each in (index, other))
                assert [s.prompt for s in one] == [s.prompt for s in two]
                assert [index.rollout_ids(s.rows) for s in one] == [other.rollout_ids(s.rows) for s in two]
        finally:
            await live.stop()
            await rebuilt.stop()

    asyncio.run(compare())


def test_void_batches_and_abandoned_steps_give_back_what_they_took(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer, per_prompt=2, max_uses=1, min_size_to_sample=2)
    uses = Counter[str]()
    for step in (1, 2):
        uses.update(prompts_of(make_step(client, lineage, step)))
    assert client.stats().num_used_up == 12
    draw(client, lineage, 3)
    later(client, 3600.0)
    again = make_step(client, lineage, 3)  # the first one is void
    assert client.stats().num_used_up == 18
    assert not uses.keys() & set(prompts_of(again))
    # back to step 1: steps 2 and 3 were for nothing
    resumed = client.new_lineage(LineageRequest(trainer_id="t", parent="1-1"))
    assert client.stats().num_used_up == 6
    others = [prompt for step in (2, 3) for prompt in prompts_of(draw(client, resumed, step))]
    assert len(set(others)) == 6
    # one prompt is left, for one slot; a batch of three takes it three times
    draw(client, resumed, 4)
    with pytest.raises(BusyError) as caught:
        draw(client, resumed, 5)
    assert caught.value.wait == "used-up"
    client.push(make_payloads(ALL_PROMPTS[:1], per_prompt=4))
    assert prompts_of(draw(client, resumed, 5)) == ["train-0"] * 3


def test_draws_at_once_never_use_a_rollout_too_often(serve_buffer: ServeBuffer) -> None:
    client, lineage = filled(serve_buffer, max_uses=2, prompts_per_batch=2)
    batches: list[Batch] = []
    waits = set[str]()

    def one(step: int) -> None:
        try:
            batches.append(draw(client, lineage, step))
        except BusyError as busy:
            waits.add(busy.wait)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(1, 40)))
    assert waits == {"used-up"}
    uses = Counter(rollout_id for batch in batches for rollout_id in {r.rollout_id for r in batch.rollouts})
    assert max(uses.values()) == 2
    used_up = {rollout_id for rollout_id, num in uses.items() if num == 2}
    assert client.stats().num_used_up == len(used_up)
    # it waits only where nothing can be drawn: fewer than four rollouts are left, or no prompt has two for a slot
    left = Counter(dict.fromkeys(ALL_PROMPTS, 4))
    left.subtract({r.rollout_id: r.prompt_id for b in batches for r in b.rollouts if r.rollout_id in used_up}.values())
    assert left.total() < 4 or max(left.values()) < 2, left

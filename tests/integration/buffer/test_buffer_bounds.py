"""Every bound of the buffer over a real Redis: exact numbers, counted by reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from redis.exceptions import OutOfMemoryError
from tba_buffer.index.rollout_index import Index
from tba_buffer.scoring.rollout_scorer import ScoredRollout
from tba_buffer.service import Buffer

from tba.api import AckRequest, BatchRequest, LineageRequest, VersionRequest
from tba.errors import UnavailableError
from tba.versions import START, LineageTree, PolicyVersion
from tba.wire import Rollout, decode_batch, encode_rollout
from tests.support.buffer import make_rollout
from tests.support.buffer_fixtures import StartService, copy_of, go_back

Start = Callable[..., Awaitable[Buffer]]


@pytest.fixture
def start(start_service: StartService) -> Start:
    """Call it with settings of the buffer section."""
    return lambda **settings: start_service(buffer=settings)


async def push(buffer: Buffer, *rollouts: Rollout) -> list[str]:
    outcomes, _ = await buffer.writer.push([encode_rollout(rollout) for rollout in rollouts])
    return [outcome.outcome for outcome in outcomes]


async def stored(buffer: Buffer) -> list[bytes]:
    """Ids in the order of arrival; Redis and the index agree on them."""
    index = await buffer.view.catch_up()
    ids = index.rollout_ids(index.live_rows())
    assert set(await buffer.context.redis.hkeys(buffer.context.keys.payloads)) == set(ids)
    return ids


async def evicted(buffer: Buffer) -> dict[str, int]:
    counters = await buffer.context.counters()
    return {name.removeprefix("evicted:"): num for name, num in counters.items() if name.startswith("evicted:")}


async def store_score(buffer: Buffer, before: Rollout, after: Rollout) -> None:
    """Store a score as the background scorer does."""
    index = await buffer.view.catch_up()
    rows = index.live_rows()
    position = int(index.column("position", rows)[index.rollout_ids(rows).index(before.rollout_id)])
    scored = [ScoredRollout(position, before, len(encode_rollout(before)), after, encode_rollout(after))]
    async with buffer.context.mutation_lock:
        await buffer.scoring_worker._scorer.store(scored)
    await buffer.scoring_worker._scorer.enforce_limits(scored)


async def start_lineage(buffer: Buffer, parent: str = "0-0", *, announce: str | None = None) -> None:
    """A trainer starts, and publishes a version that others may start from."""
    lineage = await buffer.lineages.new(LineageRequest(trainer_id="t", parent=parent))
    if announce is not None:
        await buffer.lineages.publish(VersionRequest(version=announce, token=lineage.token))


async def test_of_nearly_the_same_responses_the_better_one_stays_also_after_a_restart(start: Start) -> None:
    buffer = await start(near_duplicate_share=0.25, max_rollouts=1000)

    def near(number: int, reward: float | None, prompt: str = "train-0") -> Rollout:
        tokens = np.array([1, 2, 3, 4, 5, 6, 7, number], dtype=np.int32)
        return make_rollout(prompt, num_tokens=8, response_tokens=tokens, reward=reward)

    first, other_prompt = near(10, 0.5), near(10, 0.1, "train-1")
    far = make_rollout(num_tokens=8, response_tokens=np.arange(100, 108, dtype=np.int32), reward=0.0)
    await push(buffer, first, other_prompt, far, near(11, 0.5))  # equal rewards: the older stays
    assert await stored(buffer) == [first.rollout_id, other_prompt.rollout_id, far.rollout_id]
    better, pending = near(12, 0.75), near(13, None)
    await push(buffer, better, pending)  # without a reward it is not compared
    left = [other_prompt.rollout_id, far.rollout_id, better.rollout_id, pending.rollout_id]
    assert await stored(buffer) == left
    await buffer.stop()
    again = await start(near_duplicate_share=0.25, max_rollouts=1000)
    await push(again, near(14, 0.7))
    assert await stored(again) == left
    assert await evicted(again) == {"near_duplicate": 3}


def of_tokens(first: int, last: int, reward: float) -> Rollout:
    """Far from every one with other tokens; near to one that differs in the last."""
    tokens = np.array([*range(first, first + 7), last], dtype=np.int32)
    return make_rollout(num_tokens=8, response_tokens=tokens, reward=reward)


@pytest.mark.parametrize("is_near", [False, True])
async def test_what_redis_has_lost_is_near_to_nothing_and_what_stands_in_its_place_is_compared(
    start: Start, is_near: bool
) -> None:
    """Its log positions are given out again, to others."""
    buffer = await start(near_duplicate_share=0.25, max_rollouts=1000)
    earlier = await copy_of(buffer.context.redis)
    await push(buffer, *(of_tokens(100 * n, 0, 5.0) for n in range(1, 5)))
    await go_back(buffer.context.redis, earlier)
    await buffer.recovery.accept("operator", None)
    others = [of_tokens(1100, n, 5.0) if is_near else of_tokens(100 * n, 0, 5.0) for n in range(11, 15)]
    await push(buffer, *others)
    again = [of_tokens(100 * n, 0, 1.0) for n in range(1, 5)]
    await push(buffer, *again)
    assert await stored(buffer) == [rollout.rollout_id for rollout in (*others[: 1 if is_near else 4], *again)]


async def test_what_was_found_near_before_redis_lost_data_goes_from_no_other_place(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await start(UPKEEP_S=3600.0, near_duplicate_share=0.25, max_rollouts=1000)
    near = buffer.evictor._near_duplicates
    assert near is not None

    async def find(index: Index) -> NDArray[np.int64]:
        await buffer.view.reread()
        return index.column("position", index.live_rows()).astype(np.int64)

    monkeypatch.setattr(near, "find", find)
    await push(buffer, rollout := of_tokens(100, 0, 5.0))
    assert await stored(buffer) == [rollout.rollout_id]


async def test_an_eviction_that_is_under_way_when_redis_loses_data_takes_no_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = await start(UPKEEP_S=3600.0, deduplicate=True)
    run = buffer.context.scripts.run
    earlier = await copy_of(buffer.context.redis)
    same, other = [of_tokens(100, 0, 1.0) for _ in range(2)], of_tokens(200, 0, 1.0)

    async def evict_after_a_loss(name: str, *payloads: bytes, **args: Any) -> Any:
        if name == "evict":
            monkeypatch.setattr(buffer.context.scripts, "run", run)
            with monkeypatch.context() as patch:
                patch.setattr(buffer.evictor, "record_added", lambda num_new, num_bytes: False)
                await go_back(buffer.context.redis, earlier)
                await buffer.recovery.accept("operator", None)
                await push(buffer, other)  # takes the position of the one that is to go
        return await run(name, *payloads, **args)

    monkeypatch.setattr(buffer.context.scripts, "run", evict_after_a_loss)
    with pytest.raises(UnavailableError, match="try again"):
        await push(buffer, *same)
    assert await stored(buffer) == [other.rollout_id]


async def test_a_near_duplicate_goes_when_its_score_arrives(start: Start) -> None:
    buffer = await start(near_duplicate_share=0.25, max_rollouts=1000)
    kept, late = make_rollout(reward=0.5), make_rollout(reward=None)
    await push(buffer, kept, late)
    assert await stored(buffer) == [kept.rollout_id, late.rollout_id]
    await store_score(buffer, late, late.with_reward(0.25, "addition-1"))
    assert await stored(buffer) == [kept.rollout_id]


async def test_rollouts_that_are_too_old_go_when_they_arrive_and_when_the_trainer_moves_on(start: Start) -> None:
    buffer = await start(max_policy_age_steps=4)
    await start_lineage(buffer, announce="1-10")
    await start_lineage(buffer, "1-10", announce="2-13")
    rollouts = [make_rollout(version=PolicyVersion(*version)) for version in ((1, 5), (1, 6), (1, 9), (2, 13))]
    await push(buffer, *rollouts)  # the trainer stands at 2-10
    assert await stored(buffer) == [rollout.rollout_id for rollout in rollouts[1:]]
    await buffer.context.redis.hset(buffer.context.keys.run, "step", 11)
    await buffer.evictor.enforce()
    assert await stored(buffer) == [rollout.rollout_id for rollout in rollouts[2:]]
    await start_lineage(buffer, "2-13")
    await buffer.context.redis.hset(buffer.context.keys.run, "step", 17)
    await buffer.evictor.enforce()
    assert await stored(buffer) == [rollouts[3].rollout_id]
    await start_lineage(buffer, "1-10")  # this history left lineage 1 at step 10: 2-13 counts from there
    await buffer.evictor.enforce()
    assert await stored(buffer) == [rollouts[3].rollout_id]
    await buffer.context.redis.hset(buffer.context.keys.run, "step", 15)
    await buffer.evictor.enforce()
    assert await stored(buffer) == []
    assert await evicted(buffer) == {"policy_age": 4}


async def test_what_an_ack_makes_too_old_is_gone_when_it_is_answered(start: Start) -> None:
    buffer = await start(UPKEEP_S=3600.0, max_policy_age_steps=0)
    lineage = await buffer.lineages.new(LineageRequest(trainer_id="t", parent="0-0"))
    await push(buffer, *(make_rollout(f"train-{i % 4}") for i in range(16)))
    request = BatchRequest(trainer_id="t", lineage=1, step=1, token=lineage.token)
    batch = decode_batch((await buffer.drawer.draw(request)).body)
    assert len(await stored(buffer)) == 16
    await buffer.ledger.ack(batch.batch_id, AckRequest(lineage=1, step=1, token=lineage.token))
    assert await stored(buffer) == []


async def test_no_age_is_counted_from_a_lineage_whose_parent_is_not_known_yet(start: Start) -> None:
    buffer = await start(max_policy_age_steps=4)
    await start_lineage(buffer, announce="1-90")
    await start_lineage(buffer, "1-90")
    rollout = make_rollout(version=PolicyVersion(1, 88))
    buffer.lineages.tree = LineageTree({1: START})  # as between the start of lineage 2 and its being read again
    await push(buffer, rollout)
    assert await stored(buffer) == [rollout.rollout_id]


async def test_a_push_during_an_enforcement_is_not_forgotten(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = await start(max_rollouts=10)
    await push(buffer, *(make_rollout() for _ in range(5)))
    level, pushed = buffer.view.catch_up, []

    async def level_and_push() -> Any:
        index = await level()
        if not pushed:  # after the enforcement has read the log
            pushed.append(True)
            await push(buffer, *(make_rollout() for _ in range(3)))
        return index

    monkeypatch.setattr(buffer.view, "catch_up", level_and_push)
    await buffer.evictor.enforce()
    await push(buffer, *(make_rollout() for _ in range(3)))
    assert len(await stored(buffer)) == 10


async def test_a_lower_cap_is_kept_from_the_start_on(start: Start) -> None:
    buffer = await start()
    rollouts = [make_rollout() for _ in range(20)]
    await push(buffer, *rollouts)
    await buffer.stop()
    again = await start(max_rollouts=12)
    assert await stored(again) == [rollout.rollout_id for rollout in rollouts[8:]]


async def test_pushes_at_once_share_enforcements_and_end_within_the_caps(start: Start) -> None:
    buffer = await start(max_rollouts=50)
    scripts, calls = buffer.context.scripts, []
    run = scripts.run
    scripts.run = lambda name, *payloads, **args: (calls.append(name), run(name, *payloads, **args))[1]  # type: ignore[method-assign]
    rollouts = [[make_rollout() for _ in range(8)] for _ in range(40)]
    await asyncio.gather(*(push(buffer, *some) for some in rollouts))
    ids = await stored(buffer)
    assert len(ids) == 50
    assert (await evicted(buffer))["max_rollouts"] == 270
    assert calls.count("push") == 40
    assert calls.count("evict") < 30


async def test_an_eviction_that_fails_half_way_is_completed_by_the_next(start: Start) -> None:
    buffer = await start(ROLLOUTS_PER_CALL=2, max_rollouts=100, deduplicate=True)
    tokens = [np.arange(1, 4, dtype=np.int32)] * 9
    await push(buffer, make_rollout())
    scripts, calls = buffer.context.scripts, 0
    run = scripts.run

    async def failing(name: str, *payloads: bytes, **args: Any) -> Any:
        nonlocal calls
        calls += name == "evict"
        if name == "evict" and calls in (2, 3):
            raise UnavailableError("Redis is gone")
        return await run(name, *payloads, **args)

    scripts.run = failing  # type: ignore[method-assign]
    rollouts = [make_rollout(response_tokens=some) for some in tokens]
    with pytest.raises(UnavailableError, match="gone"):
        await push(buffer, *rollouts)
    scripts.run = run  # type: ignore[method-assign]
    await buffer.evictor.enforce()
    assert await stored(buffer) == [rollouts[-1].rollout_id]
    assert (await evicted(buffer))["duplicate_tokens"] == 9


async def test_a_push_that_is_repeated_after_its_eviction_is_a_duplicate(start: Start) -> None:
    """The eviction itself is repeated too, as redis-py does when it finds its connection dead."""
    buffer = await start(max_rollouts=8)
    scripts, calls = buffer.context.scripts, []
    run = scripts.run

    async def recording(name: str, *payloads: bytes, **args: Any) -> Any:
        if name == "evict":
            calls.append(args)
        return await run(name, *payloads, **args)

    scripts.run = recording  # type: ignore[method-assign]
    rollouts = [make_rollout() for _ in range(9)]
    await push(buffer, *rollouts)
    before, (gone, gone_before) = await stored(buffer), (buffer.context.keys.gone, buffer.context.keys.gone_before)
    assert await push(buffer, rollouts[0]) == ["duplicate"]
    assert await run("evict", **calls[0]) == 1
    assert await stored(buffer) == before
    store = buffer.context.redis
    await store.rename(gone, gone_before)  # as evict.lua does it when there are many
    assert await push(buffer, rollouts[0]) == ["duplicate"]
    await store.delete(gone_before)
    assert await push(buffer, rollouts[0]) == ["new"]
    after = await stored(buffer)
    assert await run("evict", **calls[0]) == 1
    assert await stored(buffer) == after
    assert after[-1] == rollouts[0].rollout_id


async def test_what_was_pushed_before_a_rescoring_is_forgotten_with_the_rollout(start: Start) -> None:
    buffer = await start(max_rollouts=8)
    rollouts = [make_rollout() for _ in range(9)]
    await push(buffer, *rollouts[:8])
    client, key = buffer.context.redis, buffer.context.keys.originals
    await client.hset(key, mapping={rollout.rollout_id: "digest" for rollout in rollouts[:2]})
    await push(buffer, rollouts[8])
    assert await client.hkeys(key) == [rollouts[1].rollout_id]


async def test_a_redis_that_is_out_of_memory_still_evicts(start: Start) -> None:
    buffer = await start(max_policy_age_steps=0)
    await start_lineage(buffer)
    await push(buffer, *(make_rollout() for _ in range(10)))
    client, keys = buffer.context.redis, buffer.context.keys
    await client.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await client.hset(keys.run, "step", 1)
        # the trainer moves on: a script may write anything once it has removed something
        step = "redis.call('DEL', 'nothing') return redis.call('HSET', KEYS[1], 'step', 1)"
        await client.eval(step, 1, keys.run)
        # as behind a new connection, before anything is written over it
        await buffer.context.durability.check()
        await buffer.evictor.enforce()
    finally:
        await client.config_set("maxmemory", 0)
    assert await stored(buffer) == []
    assert (await evicted(buffer))["policy_age"] == 10

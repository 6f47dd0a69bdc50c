"""The scorer with real worker processes: whatever a reward does, an item ends with a number or a reason."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from tba_reward.metrics import Metrics
from tba_reward.registry import Example, Registry, Reward, load_registry
from tba_reward.scoring import Scorer

from tba.api import ScoreItem, ScoreResult
from tba.errors import BusyError
from tests.support.reward_plugin import misbehave

PLUGIN = "tests.support.reward_plugin"


def item(response: str, *, task: str = "slow", **data: Any) -> ScoreItem:
    return ScoreItem(item_id=f"{task}-{response}", task=task, prompt="", response=response, data=data)


def make_scorer(registry: Registry, metrics: CollectorRegistry | None = None, **changes: Any) -> Scorer:
    settings = {"num_workers": 2, "item_timeout_s": 1.0, "max_pending": 64, **changes}
    return Scorer(registry, Metrics(metrics or CollectorRegistry()), **settings)


@pytest_asyncio.fixture
async def scorer() -> AsyncIterator[Scorer]:
    scorer = make_scorer(load_registry([PLUGIN]))
    yield scorer
    await asyncio.to_thread(scorer.close)


def reasons(results: list[ScoreResult]) -> list[str | None]:
    for result in results:
        assert (result.reward is None) != (result.error is None), "exactly one of reward and error"
        assert (result.reward is None) == (result.reward_version is None)
    return [None if result.error is None else result.error.reason for result in results]


async def test_every_way_to_fail_is_a_reason_and_never_a_number(scorer: Scorer) -> None:
    cases = {
        "fine": None,
        "raise": "exception",
        "exit": "exception",  # SystemExit must not end the service
        "timeout": "exception",  # the scorer's own TimeoutError is not our deadline
        "bad_data": "bad_data",
        "nan": "not_finite",
        "inf": "not_finite",
        "text": "exception",
        "none": "exception",
    }
    for task in ("slow", "inline"):
        results = await scorer.score([item(response, task=task) for response in cases])
        assert reasons(results) == list(cases.values()), task
        assert [result.item_id for result in results] == [f"{task}-{response}" for response in cases]
        assert results[0].reward == 0.5
        details = {case: result.error.detail for case, result in zip(cases, results, strict=True) if result.error}
        assert details["raise"] == "StubbornError: broken scorer"
        assert details["bad_data"] == "no such thing"
        assert details["text"] == "the reward is '1.0', not a number"


async def test_a_scorer_that_hangs_is_killed_and_the_others_are_scored(scorer: Scorer, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    results = await scorer.score([item("fine"), item("hang", pid_file=str(pid_file)), item("fine"), item("hang")])
    assert reasons(results) == [None, "timeout", None, "timeout"]
    assert results[1].error is not None
    assert results[1].error.detail == "no result after 1 s; the worker was killed"
    assert not Path(f"/proc/{pid_file.read_text()}").exists(), "the process is gone"
    assert reasons(await scorer.score([item("fine")] * 4)) == [None] * 4, "new workers took over"


async def test_a_scorer_that_ends_its_process_is_an_exception(scorer: Scorer) -> None:
    results = await scorer.score([item("crash"), item("fine")])
    assert reasons(results) == ["exception", None]
    assert results[0].error is not None
    assert results[0].error.detail == "the worker died with exit code 7"
    assert reasons(await scorer.score([item("fine")])) == [None]


async def test_an_unknown_task_names_the_known_ones_and_spoils_nothing(scorer: Scorer) -> None:
    results = await scorer.score([item("1", task="nope"), item("1", task="exact", answer="1")])
    assert reasons(results) == ["unknown_task", None]
    assert results[0].error is not None
    assert "known: addition, exact, gsm8k" in results[0].error.detail
    assert results[1].reward == 1.0
    assert results[1].reward_version == "exact-1"


async def test_fast_items_of_a_large_batch_keep_their_order(scorer: Scorer) -> None:
    items = [item(str(n), task="addition", answer=str(n - n % 2)) for n in range(1000)]
    results = await scorer.score(items)
    assert [result.reward for result in results] == [1.0, 0.0] * 500
    assert [result.item_id for result in results] == [one.item_id for one in items]


async def test_the_event_loop_runs_on_while_a_large_batch_is_scored(scorer: Scorer) -> None:
    num_turns = 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await scorer.score([item("1", task="addition", answer="1")] * 1000)
    task.cancel()
    assert num_turns >= 1000 // 64


async def test_slow_rewards_run_outside_the_service_and_fast_ones_inside(scorer: Scorer) -> None:
    slow, fast = await scorer.score([item("pid"), item("pid", task="inline")])
    assert fast.reward == os.getpid()
    assert slow.reward != os.getpid()


async def test_more_than_max_pending_is_refused_and_accepted_again_later() -> None:
    scorer = make_scorer(load_registry([PLUGIN]), max_pending=3, item_timeout_s=5.0)
    try:
        first = asyncio.create_task(scorer.score([item("sleep", for_s=0.5)] * 3))
        await asyncio.sleep(0)
        with pytest.raises(BusyError, match=r"3 completions wait .*reward\.num_workers") as caught:
            await scorer.score([item("fine")])
        assert caught.value.wait == "reward-workers"
        assert reasons(await scorer.score([item("1", task="exact", answer="1")])) == [None], "fast ones are not held up"
        assert reasons(await first) == [None] * 3
        assert reasons(await scorer.score([item("fine")])) == [None]
    finally:
        await asyncio.to_thread(scorer.close)


async def test_a_cancelled_batch_frees_its_workers() -> None:
    scorer = make_scorer(load_registry([PLUGIN]), num_workers=1, item_timeout_s=60.0, max_pending=4)
    try:
        task = asyncio.create_task(scorer.score([item("hang")] * 4))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        results = await asyncio.wait_for(scorer.score([item("fine")] * 4), timeout=30)
        assert reasons(results) == [None] * 4
    finally:
        await asyncio.to_thread(scorer.close)


async def test_results_are_counted_by_task_and_reason() -> None:
    metrics = CollectorRegistry()
    scorer = make_scorer(load_registry([PLUGIN]), metrics)
    try:
        await scorer.score([item("fine"), item("nan"), item("x", task="typo-1"), item("x", task="typo-2")])
    finally:
        await asyncio.to_thread(scorer.close)

    def value(name: str, **labels: str) -> float | None:
        return metrics.get_sample_value(name, labels)

    assert value("tba_reward_verifications_total", task="slow", result="scored") == 1
    assert value("tba_reward_verifications_total", task="slow", result="not_finite") == 1
    assert value("tba_reward_verifications_total", task="unknown", result="unknown_task") == 2
    assert value("tba_reward_seconds_count", task="slow") == 2
    assert value("tba_reward_pending") == 0


async def test_the_check_scores_every_example_where_it_will_run(scorer: Scorer) -> None:
    waiting = await scorer.ready()
    assert waiting is not None
    assert "slow: its example is being scored" in waiting
    await scorer.check()
    assert await scorer.ready() is None
    assert set(scorer.health.values()) == {"ok"}


async def test_a_reward_that_gives_0_to_everything_is_found_by_its_example() -> None:
    registry = Registry()
    for task, response, reward in [("good", "fine", 0.5), ("broken", "fine", 1.0), ("raises", "raise", 1.0)]:
        example = Example(prompt="", response=response, data={}, reward=reward)
        registry.add(Reward(task=task, version="1", function=misbehave, example=example, fast=True))
    scorer = make_scorer(registry)
    await scorer.check()
    assert await scorer.ready() == (
        "broken: its example scored 0.5, not 1.0; raises: its example failed (exception: StubbornError: broken scorer)"
    )
    scorer.close()

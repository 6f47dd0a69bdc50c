"""Kind `python` in real worker processes: what hangs, dies or cannot be loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tba_reward.model_server.client import ModelPool
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorer import Item, Scorer
from tba_reward.scorers import Tools, build_scorer

from tba.config.reward import PythonSpec
from tests.support.reward_scorers import verdict

MODULE = "tests.support.trl_rewards"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tools() -> AsyncIterator[Tools]:
    pool = WorkerPool(num_workers=2, max_memory_bytes=None, start_timeout_s=60.0)
    yield Tools(pool=pool, models=ModelPool())
    await pool.close()


async def started(tools: Tools, function: str, timeout_s: float = 20.0, **spec: Any) -> Scorer:
    spec |= {"function": f"{MODULE}:{function}", "timeout_s": timeout_s}
    scorer = build_scorer(PythonSpec(kind="python", **spec), tools)
    await scorer.start()
    return scorer


async def scored(tools: Tools, function: str, *responses: str, timeout_s: float = 20.0) -> list[float | str]:
    items = [Item(prompt="a question", response=response, data={"answer": "7"}) for response in responses]
    scorer = await started(tools, function, timeout_s)
    return [verdict(outcome) for outcome in await scorer.score(items)]


async def test_a_call_holds_a_batch(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_reward.scorers.python.BATCH_ITEMS", 2)
    assert await scored(tools, "whole_call", *"abcde") == [2.0] * 4 + [1.0]


@pytest.mark.parametrize(("how", "reason"), [("hang", "too_slow"), ("wait", "timeout")])
async def test_a_batch_that_hangs_waits_or_crashes_is_taken_apart(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    if how == "wait":
        monkeypatch.setattr("tba_reward.process_pool.pool.WALL_SLACK_S", 5.0)
    found = await scored(tools, "misbehaves_anywhere", "good", how, "good", "crash", "good", timeout_s=1.0)
    assert found == [1.0, reason, 1.0, "crashed", 1.0]


async def test_what_a_function_does_wrong_costs_its_own_item_alone(tools: Tools) -> None:
    responses = ("raise", "good", "nothing", "two", "text", "nan", "crash", "hang", "good")
    found = await scored(tools, "misbehaves", *responses, timeout_s=1.0)
    assert found == ["exception", 1.0, *["exception"] * 3, "not_finite", "crashed", "too_slow", 1.0]


@pytest.mark.parametrize(("function", "said"), [("no_such", "no_such"), ("needs_state", "trainer_state")])
async def test_a_function_that_cannot_be_used_shows_in_the_health(tools: Tools, function: str, said: str) -> None:
    assert said in (await started(tools, function)).health()
    assert await scored(tools, function, "a") == ["exception"]
    assert (await started(tools, "judge")).health() == "ok"

"""A batch of completions: grouped by task, answered in order, bounded in number and time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client import CollectorRegistry
from tba_reward.composite_reward import BROKEN_ITEMS, CompositeReward, RewardComponent
from tba_reward.metrics import Metrics
from tba_reward.model_server.client import ModelPool
from tba_reward.scorer import Failure, InlineScorer, Item, Outcome, Params
from tba_reward.scorers import Tools, math
from tba_reward.service import RewardService

from tba.api import ScoreError, ScoreItem, ScoreResult
from tba.config.reward import HttpSpec, MathSpec, RewardModelSpec
from tba.errors import BrokenRewardError, BusyError, UnavailableError
from tests.support.reward_faults import misbehave
from tests.support.reward_scorers import ScriptedScorer, composition, verdict
from tests.support.waits import DEADLINE_S


def item(n: int, *, task: str = "t", response: str = "r") -> ScoreItem:
    return ScoreItem(item_id=f"{task}-{n}", task=task, prompt="p", response=response)


def scoring(*tasks: Any, metrics: Metrics | None = None, **settings: Any) -> RewardService:
    settings = {"max_pending": 100, "request_timeout_s": 60.0, **settings}
    return RewardService({task.task: task for task in tasks}, metrics or Metrics(CollectorRegistry()), **settings)


def reasons(results: list[ScoreResult]) -> list[str | None]:
    for result in results:
        assert (result.reward is None) == (result.reward_version is None) == (result.parts is None)
    return [None if result.error is None else result.error.reason for result in results]


async def asked(scorer: ScriptedScorer, number: int) -> None:
    async with asyncio.timeout(30):
        while len(scorer.asked) < number:
            await asyncio.sleep(0)


async def test_items_of_all_tasks_come_back_in_order_with_version_and_parts() -> None:
    one = composition({"a": (ScriptedScorer(lambda item: float(item.response)), {"weight": 2.0})}, task="one")
    two = composition({"b": (ScriptedScorer(Failure("ambiguous", "which?")), {})}, task="two")
    service = scoring(one, two)
    broken = ScoreResult(item_id="x", error=ScoreError(reason="malformed", detail="no"))
    items = [
        item(0, task="two"),
        item(1, task="one", response="3"),
        item(2, task="nope"),
        broken,
        item(4, task="one", response="4"),
    ]
    results = await service.score(items)
    assert [result.item_id for result in results] == ["two-0", "one-1", "nope-2", "x", "one-4"]
    assert reasons(results) == ["ambiguous", None, "unknown_task", "malformed", None]
    assert [result.reward for result in results] == [None, 6.0, None, None, 8.0]
    assert (results[1].reward_version, results[1].parts) == (one.version, {"a": 3.0})
    assert results[2].error is not None
    assert results[2].error.detail == "no reward for task 'nope'; known: one, two"


async def test_more_than_may_be_in_work_is_refused_and_accepted_again_later() -> None:
    slow, fast = ScriptedScorer(1.0), ScriptedScorer(1.0)
    slow.gate.clear()
    service = scoring(
        composition({"a": (slow, {})}, task="t"),
        composition({"a": (fast, {})}, task="fast", is_inline=True),
        max_pending=3,
    )
    first = asyncio.create_task(service.score([item(n) for n in range(4)]))  # one request may be larger
    await asked(slow, 4)
    with pytest.raises(BusyError, match=r"4 completions are already being scored.*reward\.num_workers") as caught:
        await service.score([item(9)])
    assert (caught.value.wait, caught.value.retry_after_s) == ("reward-workers", 1.0)
    assert reasons(await service.score([item(0, task="fast")] * 50)) == [None] * 50, "what waits for nothing is taken"
    slow.gate.set()
    assert reasons(await first) == [None] * 4
    assert reasons(await service.score([item(9)])) == [None]


async def test_a_request_that_takes_too_long_is_refused_and_frees_its_place() -> None:
    scorer = ScriptedScorer(1.0)
    scorer.gate.clear()
    service = scoring(composition({"a": (scorer, {})}), request_timeout_s=1.0, max_pending=1)
    with pytest.raises(UnavailableError, match="1 items were not all scored within 1 s"):
        await service.score([item(0)])
    scorer.gate.set()
    assert reasons(await service.score([item(0)])) == [None]


async def test_the_service_is_ready_when_every_task_that_it_needs_is() -> None:
    good, bad, other = ScriptedScorer(1.0), ScriptedScorer(1.0), ScriptedScorer(1.0)
    bad.problem = "its model is gone"
    service = scoring(
        composition({"a": (good, {})}, task="good"),
        composition({"a": (good, {}), "b": (bad, {})}, task="bad"),
        composition({"a": (other, {})}, task="idle", is_required=False),
    )
    assert await service.ready() == "good: idle; bad: idle"
    service.start()
    while (await service.ready()) != "bad: b: its model is gone":
        await asyncio.sleep(0)
    assert other.num_starts == 0, "what no recipe names starts with its first item"
    assert service.tasks["idle"].health == "idle"
    assert reasons(await service.score([item(0, task="idle")])) == [None]
    assert (other.num_starts, service.tasks["idle"].health) == (1, "ok")
    bad.problem = "ok"
    assert await service.ready() is None
    await service.close()
    assert good.is_closed
    assert bad.is_closed


def judged(scorer: ScriptedScorer, *, task: str = "judged") -> CompositeReward:
    spec = HttpSpec(kind="http", url="http://127.0.0.1:9/v1/score")
    part = RewardComponent(task, "http", spec, scorer, Metrics(CollectorRegistry()))
    return CompositeReward(task, [part], is_required=True)


async def test_a_dead_judge_makes_its_tasks_not_ready_and_not_the_service() -> None:
    judge, other = ScriptedScorer(1.0), ScriptedScorer(1.0)
    judge.problem = "no connection"
    service = scoring(judged(judge), composition({"a": (other, {})}, task="other"))
    service.start()
    while service.away() is None or await service.ready() is not None:
        await asyncio.sleep(0)
    assert service.away() == "judged: http: no connection"
    assert service.tasks["judged"].health == "http: no connection"
    other.problem = "its model is gone"
    assert await service.ready() == "other: a: its model is gone"
    judge.problem = other.problem = "ok"
    assert (await service.ready(), service.away()) == (None, None)
    await service.close()


async def test_a_model_that_worked_and_is_started_again_makes_its_tasks_not_ready_and_not_the_service() -> None:
    scorer = ScriptedScorer(1.0)
    spec = RewardModelSpec(kind="reward_model", model="m")
    part = RewardComponent("t", "reward_model", spec, scorer, Metrics(CollectorRegistry()))
    scorer.problem = "lacks weights of score"
    service = scoring(CompositeReward("t", [part], is_required=True))
    part.start()
    await part.wait_started()
    assert await service.ready() == "t: reward_model: lacks weights of score", "it never worked"
    await service.close()
    scorer.problem = "ok"
    part = RewardComponent("t", "reward_model", spec, scorer, Metrics(CollectorRegistry()))
    service = scoring(CompositeReward("t", [part], is_required=True))
    await part.wait_started()
    scorer.problem = "was killed by SIGKILL"
    assert (await service.ready(), service.away()) == (None, "t: reward_model: was killed by SIGKILL")
    await service.close()


async def test_a_scorer_that_raises_for_every_item_is_broken_until_it_scores_one() -> None:
    def raises(item: Item) -> Outcome:
        return Failure("exception", f"KeyError: {item.response}")

    scorer = ScriptedScorer(raises)
    service = scoring(composition({"python": (scorer, {})}))
    await service.score([item(n, response=f"r{n}") for n in range(BROKEN_ITEMS - 1)])
    await service.score([item(n, response="r0") for n in range(100)])
    assert await service.ready() is None, "the same item again says nothing new"
    await service.score([item(0, response="the last one")])
    sentence = f"task t: python: it raised for each of the first {BROKEN_ITEMS} different items: KeyError: the last one"
    with pytest.raises(BrokenRewardError, match=sentence):
        await service.ready()
    assert "KeyError" in service.tasks["t"].health
    scorer.answer = lambda item: 0.0
    await service.score([item(0)])
    assert await service.ready() is None
    scorer.answer = raises
    await service.score([item(n, response=f"r{n}") for n in range(2 * BROKEN_ITEMS)])
    assert await service.ready() is None, "one that has scored is not broken: what it raises fails its items"


@pytest.mark.parametrize("reason", ["abstained", "bad_data", "timeout"])
async def test_only_what_raises_for_every_item_is_broken(reason: Any) -> None:
    scorer = ScriptedScorer(lambda item: Failure(reason, "so it is"))
    service = scoring(composition({"python": (scorer, {})}))
    await service.score([item(n, response=f"r{n}") for n in range(2 * BROKEN_ITEMS)])
    assert await service.ready() is None


async def test_results_are_counted_by_task_and_reason() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    scorer = ScriptedScorer(lambda item: 1.0 if item.response == "fine" else Failure("timeout", "late"))
    service = scoring(composition({"a": (scorer, {})}, metrics=metrics), metrics=metrics)
    items = [item(0, response="fine"), item(1, response="x"), item(2, task="typo-1"), item(3, task="typo-2")]
    await service.score(items)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("tba_reward_verifications_total", task="t", result="scored") == 1
    assert value("tba_reward_verifications_total", task="t", result="timeout") == 1
    assert value("tba_reward_verifications_total", task="unknown", result="unknown_task") == 2
    assert value("tba_reward_seconds_count", task="t") == 1
    assert value("tba_reward_scores_total", task="t", scorer="a", result="timeout") == 1
    assert value("tba_reward_pending") == 0


INLINE = InlineScorer(misbehave, {}, version="1")


async def test_a_rule_that_takes_long_inline_holds_up_nothing_else() -> None:
    answered, main = threading.Event(), threading.current_thread()

    def rule(item: Item, params: Params) -> float:
        assert threading.current_thread() is not main
        return float(answered.wait(DEADLINE_S))

    scorer = InlineScorer(rule, {}, version="1")
    asyncio.get_running_loop().call_soon(answered.set)  # a health check, say
    assert await scorer.score([Item(prompt="", response="")]) == [1.0]


@pytest.mark.parametrize(
    ("outcome", "health"),
    [
        (1.0, "ok"),
        (0.0, "its example scored 0.0, not 1.0"),
        (Failure("exception", "no grammar"), "its example failed (exception: no grammar)"),
    ],
)
async def test_a_release_of_a_package_that_grades_otherwise_is_found_by_an_example(
    outcome: Outcome, health: str
) -> None:
    def score(rule: object, items: list[Item], timeout_s: float) -> list[Outcome]:
        assert scorer.health() == "its example was not scored yet"
        return [outcome] * len(items)

    pool = AsyncMock(score=AsyncMock(side_effect=score), health=Mock(return_value="ok"))
    scorer = math.build(MathSpec(kind="math"), Tools(pool=pool, models=ModelPool()))
    await scorer.start()
    assert scorer.health() == health


async def test_a_rule_that_fails_inline_is_a_reason_too() -> None:
    hows = ["fine", "raise", "exit", "bad_data", "ambiguous", "nan", "text"]
    outcomes = await INLINE.score([Item(prompt="", response=how) for how in hows])
    expected = [0.5, "exception", "exception", "bad_data", "ambiguous", "not_finite", "exception"]
    assert [verdict(outcome) for outcome in outcomes] == expected

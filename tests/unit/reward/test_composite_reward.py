"""Tasks of the reward service, and rewards that are made of several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tba_reward import composite_reward, service
from tba_reward.composite_reward import CHUNK_ITEMS, CompositeReward, ItemReward, ScoreCache, content_key
from tba_reward.metrics import Metrics
from tba_reward.model_server.client import ModelPool
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorer import Failure, Item, Outcome
from tba_reward.scorers import Tools

from tba.config import Recipe, parse_recipe
from tba.config.reward import BUILT_IN_TASKS, RewardSection, TaskReward
from tba.errors import ConfigError
from tests.support.reward_scorers import ScriptedScorer, composition, item, verdict

# ---- The reward of a task from the scores of its components ---------------------------------------------------------


UNKNOWN = Failure("timeout", "too slow")


async def one(task: Any, response: str = "r") -> ItemReward:
    (scored,) = await task.score([item(response)])
    return scored


async def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    task = composition({"a": (ScriptedScorer(0.5), {"weight": 2.0}), "b": (ScriptedScorer(3.0), {"weight": -0.5})})
    scored = await one(task)
    assert (scored.outcome, scored.parts) == (-0.5, {"a": 0.5, "b": 3.0})


async def test_any_unknown_part_makes_the_reward_unknown_and_is_named() -> None:
    for first, second in [(UNKNOWN, 1.0), (1.0, UNKNOWN)]:
        task = composition({"a": (ScriptedScorer(first), {}), "b": (ScriptedScorer(second), {"weight": 0.001})})
        scored = await one(task)
        name = "a" if first is UNKNOWN else "b"
        assert scored.outcome == Failure("timeout", f"{name}: too slow")
    alone = composition({"a": (ScriptedScorer(UNKNOWN), {})})
    assert (await one(alone)).outcome == UNKNOWN, "one component needs no name"


async def test_an_item_that_does_not_pass_a_gate_is_asked_of_nobody_else() -> None:
    gate = ScriptedScorer(lambda item: 0.49 if item.response == "bad" else 0.5)
    second, rest = ScriptedScorer(1.0), ScriptedScorer(7.0)
    task = composition({"rest": (rest, {}), "gate": (gate, {"gate": 0.5}), "second": (second, {"gate": 1.0})})
    scored = await task.score([item("bad"), item("good"), item("bad")])
    assert [each.outcome for each in scored] == [0.0, 7.0, 0.0]
    assert [each.parts for each in scored][:2] == [{"gate": 0.49}, {"gate": 0.5, "second": 1.0, "rest": 7.0}]
    assert len(gate.asked) == 3
    assert [each.response for each in second.asked] == [each.response for each in rest.asked] == ["good"]


async def test_a_gate_counts_in_the_sum_only_with_a_weight() -> None:
    plain = composition({"g": (ScriptedScorer(0.8), {"gate": 0.5}), "a": (ScriptedScorer(1.0), {})})
    weighted = composition({"g": (ScriptedScorer(0.8), {"gate": 0.5, "weight": 10.0}), "a": (ScriptedScorer(1.0), {})})
    assert (await one(plain)).outcome == 1.0
    assert (await one(weighted)).outcome == 9.0


async def test_an_unknown_gate_is_unknown_not_closed() -> None:
    rest = ScriptedScorer(1.0)
    task = composition({"g": (ScriptedScorer(UNKNOWN), {"gate": 0.5}), "a": (rest, {})})
    assert (await one(task)).outcome == Failure("timeout", "g: too slow")
    assert rest.asked == []


async def test_a_score_or_a_sum_beyond_the_bound_of_numbers_is_unknown() -> None:
    for score, weight in ((1e308, 1.0), (-1e16, 1.0), (1e12, 1e6)):
        task = composition({"a": (ScriptedScorer(score), {"weight": weight}), "b": (ScriptedScorer(1.0), {})})
        assert verdict((await one(task)).outcome or 0.0) == "too_large"


class Broken(ScriptedScorer):
    """Breaks the rule that a scorer never raises, or that it answers for every item."""

    async def score(self, items: Any) -> list[Outcome]:
        if items[0].response == "raise":
            raise KeyError("a defect")
        return [1.0] * (len(items) + 1)


@pytest.mark.parametrize(("response", "detail"), [("raise", "KeyError: 'a defect'"), ("few", "2 scores for 1 items")])
async def test_a_defect_of_a_scorer_is_a_reason(response: str, detail: str) -> None:
    outcome = (await one(composition({"a": (Broken(1.0), {})}), response)).outcome
    assert isinstance(outcome, Failure)
    assert outcome.reason == "exception"
    assert detail in outcome.detail


async def test_a_version_changes_with_whatever_changes_the_reward() -> None:
    def version(scorer_version: str = "v1", **changes: Any) -> str:
        other = ScriptedScorer(1.0, version="other")
        scorers = {"a": (ScriptedScorer(1.0, version=scorer_version), changes), "b": (other, {})}
        return composition(scorers).version

    versions = [version(), version("v2"), version(weight=2.0), version(gate=0.5)]
    assert len(set(versions)) == 4
    assert all(each.startswith("t@") and len(each) == 14 for each in versions)
    assert version() == version(timeout_s=3.0)


async def test_a_part_that_does_not_start_is_unreachable_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composite_reward, "RESTART_S", 0.0)
    scorer = ScriptedScorer(1.0)
    scorer.start_errors = [OSError("no such model")]
    task = composition({"a": (scorer, {})})
    assert task.health == "idle"
    scored = await one(task)
    assert scored.outcome == Failure("unreachable", "the scorer did not start: OSError: no such model")
    while task.health != "ok":
        await asyncio.sleep(0)
    assert (await one(task)).outcome == 1.0
    assert scorer.num_starts == 2
    await task.close()
    assert scorer.is_closed


def cached(scorer: ScriptedScorer, *, max_items: int = 10) -> Callable[[list[Item]], Awaitable[list[Outcome]]]:
    cache = ScoreCache(max_items, Metrics(CollectorRegistry()))
    return lambda items: cache.score(scorer, items)


async def test_the_same_content_is_asked_for_once() -> None:
    scorer = ScriptedScorer(lambda item: float(item.response))
    cache = cached(scorer)
    assert await cache([item("1"), item("2"), item("1")]) == [1.0, 2.0, 1.0]
    assert await cache([item("2"), item("3")]) == [2.0, 3.0]
    assert [each.response for each in scorer.asked] == ["1", "2", "3"]


async def test_what_was_scored_before_a_request_was_given_up_is_not_asked_for_again() -> None:
    """The second chunk hangs until the request is cancelled."""

    class HalfStuck(ScriptedScorer):
        async def score(self, items: Sequence[Item]) -> list[Outcome]:
            self.asked += items
            if any(each.response == "stuck" for each in items):
                await self.gate.wait()
            return [1.0] * len(items)

    scorer = HalfStuck(1.0)
    scorer.gate.clear()
    cache = cached(scorer, max_items=1000)
    items = [item(str(number)) for number in range(CHUNK_ITEMS)]
    task = asyncio.ensure_future(cache([*items, item("stuck")]))
    async with asyncio.timeout(30):
        while len(scorer.asked) <= CHUNK_ITEMS:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await cache(items) == [1.0] * CHUNK_ITEMS
    assert len(scorer.asked) == CHUNK_ITEMS + 1


async def test_a_failure_is_never_kept() -> None:
    answers: list[Outcome] = [UNKNOWN, 1.0]
    scorer = ScriptedScorer(lambda item: answers.pop(0))
    cache = cached(scorer)
    assert await cache([item(), item()]) == [UNKNOWN, UNKNOWN], "twice in a batch is asked once"
    assert await cache([item()]) == [1.0]
    assert await cache([item()]) == [1.0]


async def test_a_new_version_of_a_scorer_is_asked_again() -> None:
    scorer = ScriptedScorer(1.0)
    cache = cached(scorer)
    await cache([item()])
    scorer.version, scorer.answer = "v2", lambda item: 2.0
    assert await cache([item()]) == [2.0]


async def test_the_cache_is_bounded_and_keeps_what_was_used_last() -> None:
    scorer = ScriptedScorer(lambda item: float(item.response))
    cache = cached(scorer, max_items=2)
    for responses in (["1", "2"], ["1"], ["3"], ["1"], ["2"]):
        await cache([item(response) for response in responses])
    assert [each.response for each in scorer.asked] == ["1", "2", "3", "2"]


def test_the_key_depends_on_everything_that_a_score_may_depend_on() -> None:
    base = {"prompt": "p", "response": "r", "data": {"a": 1, "b": 2}, "finish_reason": "stop"}
    changes = [{}, {"prompt": "q"}, {"response": "s"}, {"data": {"a": 1}}, {"finish_reason": "length"}]
    shifted = {"prompt": "", "response": "pr"}
    keys = [content_key("v", Item(**{**base, **change})) for change in [*changes, shifted]]
    keys.append(content_key("w", Item(**base)))
    assert len(set(keys)) == len(keys)
    assert content_key("v", Item(**{**base, "data": {"b": 2, "a": 1}})) == keys[0]


# ---- The tasks of a service, and their settings in a recipe ---------------------------------------------------------


MINIMAL = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"generator": "addition"}}


def recipe(reward: dict[str, Any]) -> Recipe:
    return parse_recipe({**MINIMAL, "reward": reward}, where="test")


def build(**entries: list[dict[str, Any]]) -> dict[str, CompositeReward]:
    section = recipe({"tasks": {task: {"scorers": scorers} for task, scorers in entries.items()}}).reward
    return build_section(section)


def build_section(section: RewardSection) -> dict[str, CompositeReward]:
    pool = WorkerPool(num_workers=1, max_memory_bytes=None, start_timeout_s=1.0)
    tools, metrics = Tools(pool=pool, models=ModelPool()), Metrics(CollectorRegistry())
    return service.build_tasks(section, tools, ScoreCache(9, metrics), metrics)


def test_built_in_tasks_need_no_entry_and_those_of_worker_processes_start_with_their_first_item() -> None:
    found = build()
    required = {task: task_reward.is_required for task, task_reward in found.items()}
    assert required.items() >= {"addition": True, "exact": True, "gsm8k": True}.items()
    assert set(required) <= set(service.BUILT_IN)
    assert not required.get("math", False)


def test_an_entry_takes_the_place_of_the_built_in_task_and_is_needed() -> None:
    found = build(addition=[{"kind": "last_number"}], mine=[{"kind": "format", "pattern": "x"}])
    assert found["addition"].version != build()["addition"].version
    assert found["mine"].is_required, "although it needs worker processes"
    assert not found["mine"].is_inline
    assert found["addition"].is_inline


@pytest.fixture
def without_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the kind `exact` cannot be built."""

    def build(spec: Any, tools: Any) -> None:
        raise ConfigError("the package abacus is not installed")

    monkeypatch.setattr("tba_reward.scorers.exact.build", build)


@pytest.mark.usefixtures("without_exact")
def test_a_built_in_task_that_cannot_be_built_here_is_left_out_and_one_of_the_recipe_is_refused() -> None:
    assert "addition" not in build()
    with pytest.raises(ConfigError, match=r"reward\.tasks\.mine: the package abacus is not installed"):
        build(mine=[{"kind": "exact"}])


@pytest.mark.parametrize(
    ("scorers", "sentence"),
    [
        ([], "scorers"),
        ([{"kind": "exact", "weight": 0.0}], "every weight is 0"),
        ([{"kind": "exact", "gate": 0.5}], "every weight is 0"),
        ([{"kind": "exact", "timeout_s": 0}], "timeout_s"),
    ],
)
def test_what_a_recipe_says_wrongly_is_named(scorers: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe({"tasks": {"t": {"scorers": scorers}}})
    assert sentence in str(caught.value)


def test_two_scorers_of_a_kind_have_names_and_versions_of_their_own() -> None:
    task = TaskReward.model_validate(
        {
            "scorers": [
                {"kind": "exact"},
                {"kind": "exact", "field": "other", "weight": 0.5, "timeout_s": 2.0},
                {"kind": "exact", "weight": 3.0},
                {"kind": "python", "function": "tests.support.trl_rewards:contains"},
            ]
        }
    )
    first, other, again, python = build_section(RewardSection(tasks={"t": task}))["t"].components
    assert first.version == again.version, "how a score is used is no part of what it is"
    assert first.version != other.version
    assert [each.name for each in (first, other, again, python)] == ["exact", "exact-2", "exact-3", "contains"]
    assert other.weight == 0.5


def test_recipes_know_the_built_in_tasks() -> None:
    assert set(service.BUILT_IN) == set(BUILT_IN_TASKS)

"""The tasks of a service, and their settings in a recipe."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tba_reward import service
from tba_reward.metrics import Metrics
from tba_reward.model_server.client import ModelPool
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorers import Tools
from tba_reward.tasks import CompositeReward, ScoreCache

from tba.config import Recipe, parse_recipe
from tba.config.reward import BUILT_IN_TASKS, RewardSection, TaskReward
from tba.errors import ConfigError

MINIMAL = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"generator": "addition"}}


def recipe(reward: dict[str, Any]) -> Recipe:
    return parse_recipe({**MINIMAL, "reward": reward}, where="test")


def build(**entries: list[dict[str, Any]]) -> dict[str, CompositeReward]:
    section = recipe({"tasks": {task: {"scorers": scorers} for task, scorers in entries.items()}}).reward
    return build_section(section)


def build_section(section: RewardSection) -> dict[str, CompositeReward]:
    pool = WorkerPool(num_workers=1, max_memory_bytes=None, start_timeout_s=1.0)
    tools = Tools(pool=pool, models=ModelPool(), item_timeout_s=1.0)
    return service.build_tasks(section, tools, ScoreCache(0), Metrics(CollectorRegistry()))


def test_built_in_tasks_need_no_entry_and_those_of_worker_processes_start_with_their_first_item() -> None:
    found = build()
    required = {task: task_reward.is_required for task, task_reward in found.items()}
    assert required.items() >= {"addition": True, "exact": True, "gsm8k": True, "make_n": True}.items()
    assert set(required) <= set(service.BUILT_IN)
    assert not required.get("math", False)


@pytest.mark.parametrize("task", ["addition", "exact", "gsm8k", "make_n"])
async def test_the_example_of_a_built_in_task_scores_what_it_says(task: str) -> None:
    (component,) = build()[task].components
    assert component.health == "idle"
    await component.wait_started()
    assert component.health == "ok"
    await component.close()


def test_an_entry_takes_the_place_of_the_built_in_task_and_is_needed() -> None:
    found = build(addition=[{"kind": "exact"}], mine=[{"kind": "format", "pattern": "x"}])
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
        ([{"kind": "magic"}], "magic"),
        ([{"kind": "exact", "colour": 1}], "colour"),
        ([{"kind": "exact"}, {"kind": "exact"}], "two scorers are called 'exact'; give one of them another `name`"),
        ([{"kind": "exact", "weight": 0.0}], "every weight is 0"),
        ([{"kind": "exact", "gate": 0.5}], "every weight is 0"),
        ([{"kind": "exact", "timeout_s": 0}], "timeout_s"),
        ([{"kind": "exact", "name": "a b"}], "name"),
    ],
)
def test_what_a_recipe_says_wrongly_is_named(scorers: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe({"tasks": {"t": {"scorers": scorers}}})
    assert sentence in str(caught.value)


def test_the_plugins_of_an_older_release_are_no_more() -> None:
    assert recipe({"plugins": []}).reward == RewardSection()
    with pytest.raises(ConfigError, match=r"reward\.plugins is no more; give each task an entry in reward\.tasks"):
        recipe({"plugins": ["mine"]})


def test_two_scorers_of_a_kind_have_versions_of_their_own() -> None:
    task = TaskReward.model_validate(
        {
            "scorers": [
                {"kind": "exact"},
                {"kind": "exact", "name": "number", "compare": "integer", "weight": 0.5, "timeout_s": 2.0},
                {"kind": "exact", "name": "again", "weight": 3.0},
            ]
        }
    )
    first, number, again = build_section(RewardSection(tasks={"t": task}))["t"].components
    assert first.version == again.version, "how a score is used is no part of what it is"
    assert first.version != number.version
    assert (number.spec.factor, number.name) == (0.5, "number")


def test_recipes_know_the_built_in_tasks() -> None:
    assert set(service.BUILT_IN) == set(BUILT_IN_TASKS)

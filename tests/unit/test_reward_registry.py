"""Which rewards a service has, and what it says about one that cannot be loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tba_reward.registry import Example, Registry, Reward, load_registry
from tba_reward.rewards.exact import score_text

from tba.errors import ConfigError

EXAMPLE = Example(prompt="", response="a", data={"answer": "a"}, reward=1.0)


def test_the_built_in_rewards_are_found_by_their_files() -> None:
    registry = load_registry([])
    assert registry.tasks == ["addition", "exact", "gsm8k", "make_n"]
    assert all(reward.fast and reward.version.startswith(reward.task) for reward in registry)


@pytest.mark.parametrize("task", ["addition", "exact", "gsm8k", "make_n"])
def test_every_built_in_example_is_worth_what_it_says(task: str) -> None:
    reward = load_registry([]).get(task)
    assert reward is not None
    example = reward.example
    assert reward.function(example.prompt, example.response, example.data) == example.reward != 0


def test_a_plugin_adds_to_them() -> None:
    registry = load_registry(["tests.support.reward_plugin"])
    assert registry.tasks == ["addition", "exact", "gsm8k", "inline", "make_n", "slow"]


def test_an_unknown_task_has_no_reward() -> None:
    assert load_registry([]).get("nothing") is None


def test_a_task_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="'exact' is registered twice"):
        load_registry([]).add(Reward(task="exact", version="x", function=score_text, example=EXAMPLE))


def test_an_example_worth_0_proves_nothing() -> None:
    example = Example(prompt="", response="b", data={"answer": "a"}, reward=0.0)
    with pytest.raises(ConfigError, match="worth something other than 0"):
        Registry().add(Reward(task="x", version="x-1", function=score_text, example=example))


def test_a_function_that_a_worker_cannot_import_is_refused_unless_it_is_fast() -> None:
    def local(prompt: str, response: str, data: object) -> float:
        return 1.0

    registry = Registry()
    with pytest.raises(ConfigError, match="not a function at the top level"):
        registry.add(Reward(task="x", version="x-1", function=local, example=EXAMPLE))
    registry.add(Reward(task="x", version="x-1", function=local, example=EXAMPLE, fast=True))
    assert registry.tasks == ["x"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, r"'broken_plugin' cannot be imported \(ModuleNotFoundError"),
        ("raise RuntimeError('no GPU')", r"cannot be imported \(RuntimeError: no GPU\)"),
        ("x = 1", r"does not define `register\(registry\)`"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, message: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
    if source is not None:
        (tmp_path / "broken_plugin.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_registry(["broken_plugin"])

"""Prompts and scores of reasoning-gym: all of its data sets, rules that can be cheated, and a recipe end to end."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tba_reward.scorer import Item, outcome_of
from tba_reward.scorers.reasoning_gym import score

from tba.api import ScoreItem
from tba.clients import RewardClient
from tba.config import Recipe, parse_recipe
from tba.config.data import REFUSED_GYMS
from tba.errors import ConfigError
from tba_cli.prompts.columns import validated
from tba_cli.prompts.reader import prompts_of
from tests.support.reward_process import start_reward
from tests.support.reward_scorers import verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, so that it is imported in the tests


def gym(name: str | None = "chain_sum", **changes: Any) -> Recipe:
    part = {"task": "t", "reasoning_gym": name, "num_rows": 20, "template": "{question}", **changes}
    data = {"sets": [{key: value for key, value in part.items() if value is not None}], "num_heldout": 3}
    return parse_recipe({"run": {"name": "r"}, "model": {"path": "m"}, "data": data}, where="test")


def made(name: str, **options: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A data set, its first entry, and what of that is in a prompt's data."""
    from reasoning_gym.factory import create_dataset

    from tba_cli.prompts.reasoning_gym import plain

    dataset = create_dataset(name, seed=0, size=10, **options)
    entry = dataset[0]
    return dataset, entry, json.loads(json.dumps({**entry, "options": options}, default=plain, allow_nan=False))


def scored(answer: str, data: dict[str, Any], *, ends: str = "stop", **changes: Any) -> float | str:
    item = Item(prompt="", response=answer, data=copy.deepcopy(data), finish_reason=ends)
    return verdict(outcome_of(score, item, {"extract": "whole", "partial": False, **changes}))


def test_every_data_set_pays_its_own_answers_in_full_and_junk_nothing() -> None:
    from reasoning_gym.factory import DATASETS

    assert len(DATASETS) == 106
    for name in DATASETS.keys() - REFUSED_GYMS - {"composite"}:
        dataset, entry, data = made(name)
        validated({"prompt_id": "p", "task": "t", "text": entry["question"], "data": data})
        gold = entry["answer"]
        if gold is not None:
            assert scored(f"so <answer>\n{gold}\n</answer>.", data, extract="tag") == 1.0, name
        assert {scored(junk, data) for junk in ("zzz", "nan", "", "[]", "x+1")} <= {0.0, "ambiguous"}, name
        for answer in (gold or "", "0", "{}"):  # JSON has taken nothing from the entry that the rule reads
            try:
                own = min(dataset.score_answer(answer, copy.deepcopy(entry)), 1.0)
            except (KeyError, TypeError, ValueError):
                own = "ambiguous"
            assert scored(answer, data, partial=True) == own, name


def test_neither_an_answer_nor_data_of_a_client_runs_as_code(tmp_path: Path) -> None:
    path = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(path)!r}).touch()"
    literals = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "number_sorting")
    for name in (*literals, "bitwise_arithmetic", "countdown", "polynomial_multiplication", "simple_integration"):
        data = made(name)[2]
        for answer in (code, f"S({code!r})", "eval(chr(49))", "ｅval(1)"):
            assert scored(answer, data, partial=True) in (0.0, 0.01, 0.05), (name, answer)
        facts = data["metadata"] | {"problem": code, "integrand": code}
        for changed in (data | {"answer": code}, data | {"metadata": facts}):
            assert scored("[1]", changed) in (0.0, "bad_data"), name
    assert not path.exists()


def test_what_rules_take_for_an_answer_and_is_none() -> None:
    for name in REFUSED_GYMS:
        assert scored("0", {"question": "?", "answer": "0", "metadata": {"source_dataset": name}}) == "bad_data"
    data = made("number_sorting")[2]
    assert scored(json.dumps([float("nan")] * len(data["metadata"]["sorted_numbers"])), data) == 0.0
    data = made("gcd")[2]
    assert scored(f"maybe {data['answer']}", data) == 0.0 < float(scored(f"maybe {data['answer']}", data, partial=True))
    facts = made("simple_integration")[2]["metadata"]
    assert scored(f"Integral({facts['integrand']}, {facts['variable']})", made("simple_integration")[2]) == 0.0


def test_who_is_to_blame_if_a_rule_raises() -> None:
    data = made("prime_factorization")[2]
    assert [scored("two", data), scored("two", data | {"answer": "two"})] == ["ambiguous", "bad_data"]
    for broken in ({}, {**data, "metadata": None}, {**data, "options": {"nope": 1}}, {**data, "metadata": {}}):
        assert scored("2", broken) == "bad_data"
    data = made("decimal_arithmetic", min_num_decimal_places=1, max_num_decimal_places=1)[2]
    near = str(float(data["answer"]) + 0.05)
    assert [scored(near, data), scored(near, data | {"options": {}})] == [1.0, 0.0], "the rule depends on the options"


@pytest.mark.parametrize(
    ("response", "extract", "value"),
    [
        ("7 - 5 = {}.", "last_number", 1.0),
        ("7 - 5 = {}.0", "last_number", 1.0),
        ("7 - 5 = 1" + 40 * "0", "last_number", 0.0),
        ("{}", "tag", 0.0),
        ("<answer>0</answer> no: <answer> {} </answer> I think", "tag", 1.0),
        ("<think><answer>{}</answer></think>", "tag", 0.0),
        ("<answer>{}", "tag", 0.0),
    ],
)
def test_where_the_answer_is(response: str, extract: str, value: float) -> None:
    data = made("chain_sum")[2]
    assert scored(response.format(data["answer"]), data, extract=extract) == value
    assert scored(f"<answer>{data['answer']}", data, extract="tag", ends="stop_string") == 1.0


def test_a_recipe_that_asks_for_what_there_is_not_is_refused() -> None:
    from tba_cli.prompts.reasoning_gym import entries

    refused: list[dict[str, Any]] = [{"name": "puzzle24"}, {"name": "composite"}, {"options": {"seed": None}}]
    for changes in (*refused, {"dataset": "d"}, {"train": "train"}, {"name": None, "dataset": "d.jsonl"}):
        with pytest.raises(ConfigError):
            gym(**changes)
    for name, option, message in (
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"terms": 2}, "'terms'; it takes .*max_terms, min_digits"),
        ("chain_sum", {"min_terms": 0}, "min_terms must be positive"),
    ):
        with pytest.raises(ConfigError, match=message):
            entries(name, option, 3)
    assert entries("list_functions", {}, 6) == entries("list_functions", {}, 6), "it has a seed"


def test_a_recipe_from_the_library_to_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = gym("isomorphic_strings", data={"index": "metadata.source_index"})
    prompts = prompts_of(recipe)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert prompts_of(recipe) == prompts, "the order of its sets is the same"
    assert sum(prompt.split == "heldout" for prompt in prompts) == 3
    tasks = {"t": {"scorers": [{"kind": "reasoning_gym", "extract": "whole"}]}}
    with start_reward(tmp_path, num_workers=1, tasks=tasks) as service:
        service.wait_ready()
        answers = [{"response": one.data["answer"], "data": one.data} for one in prompts]
        items = [ScoreItem(item_id=str(n), task="t", prompt="?", **answer) for n, answer in enumerate(answers)]
        assert {result.reward for result in RewardClient(service.url).score(items).results} == {1.0}
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError(\"No module named 'reasoning_gym'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        prompts_of(gym())

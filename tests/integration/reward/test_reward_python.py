"""Kind `python`: reward functions with TRL's signature, in real worker processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import ValidationError
from tba_reward.model_server.client import ModelPool
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorer import Failure, Item, Outcome, Scorer
from tba_reward.scorers import Tools, build_scorer

from tba.config.reward import PythonSpec
from tba.errors import ConfigError

MODULE = "tests.support.trl_rewards"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tools() -> AsyncIterator[Tools]:
    pool = WorkerPool(num_workers=2, max_memory_bytes=None, start_timeout_s=60.0)
    yield Tools(pool=pool, models=ModelPool())
    await pool.close()


async def started(
    tools: Tools, function: str, timeout_s: float = 20.0, *, spec: dict[str, Any] | None = None
) -> Scorer:
    scorer = build_scorer(PythonSpec(kind="python", function=function, timeout_s=timeout_s, **spec or {}), tools)
    await scorer.start()
    return scorer


async def scored(
    tools: Tools, function: str, *items: Item, timeout_s: float = 20.0, spec: dict[str, Any] | None = None
) -> list[Outcome]:
    return await (await started(tools, f"{MODULE}:{function}", timeout_s, spec=spec)).score(items)


def item(response: str = "a fine answer", **data: object) -> Item:
    return Item(prompt="a question", response=response, data=data)


async def test_columns_are_the_keys_of_the_data_and_none_is_an_abstention(tools: Tools) -> None:
    first, second, third = await scored(
        tools, "contains", item(word="fine", other=1), item(word="bad"), item(word="", prompts="not this one")
    )
    assert (first, second) == (1.0, 0.0)
    assert isinstance(third, Failure)
    assert third.reason == "abstained"


async def test_a_column_that_the_data_lacks_is_bad_data(tools: Tools) -> None:
    (outcome,) = await scored(tools, "contains", item())
    assert isinstance(outcome, Failure)
    assert outcome.reason == "bad_data"
    assert "'word'" in outcome.detail


async def test_a_function_without_kwargs_gets_what_it_names(tools: Tools) -> None:
    assert await scored(tools, "no_kwargs", item("four", unknown=1), item("four", scale=0.5)) == [4.0, 2.0]


async def test_finish_reasons_come_along_when_the_function_names_them(tools: Tools) -> None:
    cut = Item(prompt="", response="x", finish_reason="length")
    assert await scored(tools, "sees_finish", item(), cut) == [0.0, 1.0]


async def test_async_functions_arrays_and_callable_objects(tools: Tools) -> None:
    assert await scored(tools, "later", item()) == [0.25]
    assert await scored(tools, "numpy_scores", item(), item()) == [0.5, 0.5]
    assert await scored(tools, "judge", item("four")) == [4.0]


async def test_a_call_holds_a_batch_and_one_item_that_it_cannot_take_fails_alone(tools: Tools) -> None:
    good = [item(f"fine {n}", answer="7") for n in range(5)]
    assert await scored(tools, "whole_call", *good) == [5.0] * 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tba_reward.scorers.python.BATCH_ITEMS", 2)
        assert await scored(tools, "whole_call", *good) == [2.0] * 4 + [1.0]
    outcomes = await scored(tools, "whole_call", *good[:3], item("bad", answer="7"), *good[3:])
    assert outcomes[:3] + outcomes[4:] == [1.0] * 5, "asked again, item by item"
    assert isinstance(outcomes[3], Failure)
    assert (outcomes[3].reason, outcomes[3].detail) == ("exception", "ValueError: a bad completion")


@pytest.mark.parametrize(("shape", "got"), [("list", "list of 1"), ("number", "float"), ("array", "ndarray of 1")])
async def test_one_number_for_a_batch_fails_the_whole_call_and_is_not_taken_for_each_item(
    tools: Tools, shape: str, got: str
) -> None:
    outcomes = await scored(tools, "one_for_all", *[item(f"{n}") for n in range(4)], spec={"kwargs": {"shape": shape}})
    for outcome in outcomes:
        assert isinstance(outcome, Failure)
        assert outcome.reason == "exception"
        assert outcome.detail.startswith(f"{MODULE}:one_for_all got 4 completions and returned a {got}: ")


async def test_items_with_other_columns_are_other_calls(tools: Tools) -> None:
    items = [item("a", answer="7"), item("b", answer="8", unit="m"), item("c", answer="9"), item("d")]
    *first, last = await scored(tools, "whole_call", *items)
    assert first == [2.0, 1.0, 2.0]
    assert isinstance(last, Failure)
    assert last.reason == "bad_data"


@pytest.mark.parametrize(("how", "reason"), [("hang", "too_slow"), ("wait", "timeout")])
async def test_a_batch_that_hangs_waits_or_crashes_is_taken_apart(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    if how == "wait":
        monkeypatch.setattr("tba_reward.process_pool.pool.WALL_SLACK_S", 5.0)
    items = [item(r) for r in ("good", how, "good", "crash", "good")]
    outcomes = await scored(tools, "misbehaves_anywhere", *items, timeout_s=1.0)
    reasons = [o.reason if isinstance(o, Failure) else o for o in outcomes]
    assert reasons == [1.0, reason, 1.0, "crashed", 1.0]


async def test_completion_ids_are_the_tokens_that_the_client_sent(tools: Tools) -> None:
    sent = Item(prompt="", response="four", response_tokens=[5, 6, 7])
    with_tokens, without = await scored(tools, "num_tokens", sent, item("four"))
    assert with_tokens == 3.0
    assert isinstance(without, Failure)
    assert without.reason == "bad_data"
    assert "response_tokens" in without.detail


async def test_completions_and_prompts_are_messages_where_the_data_has_them(tools: Tools) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    items = [item("<think>so</think>7", prompt=chat), item("7", prompt=chat)]
    assert await scored(tools, "think_format", *items) == [1.0, 0.0]
    assert await scored(tools, "last_question", *items) == [4.0, 4.0]
    assert await scored(tools, "only_completions", item("text", prompt="no list"), item("7")) == [4.0, 1.0]


async def test_arguments_come_from_the_recipe(tools: Tools) -> None:
    spec = {"kwargs": {"threshold": 4, "scale": 0.5}}
    assert await scored(tools, "at_least", item("four"), item("six"), spec=spec) == [0.5, 0.0]
    (outcome,) = await scored(tools, "at_least", item("four", threshold=9), spec=spec)
    assert outcome == 0.5, "the recipe comes before the data"


async def test_a_function_takes_what_it_names_and_can_log(tools: Tools) -> None:
    assert await scored(tools, "only_completions", item("four", extra=1), item("seven", extra=1)) == [4.0, 5.0]
    assert await scored(tools, "logs", item("four")) == [1.0]


@pytest.mark.parametrize(
    ("function", "spec", "sentence"),
    [
        ("needs_state", {}, "it needs 'trainer_state', which only TRL's trainer has"),
        ("only_completions", {"kwargs": {"treshold": 4}}, "it takes no argument 'treshold'"),
    ],
)
async def test_what_a_function_can_never_be_called_with_shows_in_the_health(
    tools: Tools, function: str, spec: dict[str, Any], sentence: str
) -> None:
    assert sentence in (await started(tools, f"{MODULE}:{function}", spec=spec)).health()


@pytest.mark.parametrize(
    ("kwargs", "sentence"), [({"prompts": 1}, "the service itself passes"), ({"x": {1, 2}}, "must be JSON values")]
)
async def test_arguments_that_could_not_be_passed_are_refused(kwargs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        PythonSpec(kind="python", function="m:f", kwargs=kwargs)


async def test_what_a_function_does_wrong_costs_its_own_item_alone(tools: Tools) -> None:
    items = [item(r) for r in ("raise", "good", "nothing", "two", "text", "nan", "crash", "hang", "good")]
    outcomes = await scored(tools, "misbehaves", *items, timeout_s=1.0)
    reasons = [o.reason if isinstance(o, Failure) else o for o in outcomes]
    assert reasons == ["exception", 1.0, *["exception"] * 3, "not_finite", "crashed", "too_slow", 1.0]


async def test_a_function_that_is_not_there_shows_in_the_health(tools: Tools) -> None:
    scorer = await started(tools, f"{MODULE}:no_such")
    assert "no_such" in scorer.health()
    (outcome,) = await scorer.score([item()])
    assert isinstance(outcome, Failure)
    assert "no_such" in outcome.detail
    assert (await started(tools, f"{MODULE}:judge")).health() == "ok"


async def test_a_module_that_is_not_there_is_a_config_error(tools: Tools) -> None:
    for name in ("no_such_module:f", "tests.support.no_such:f", "tests.support.trl_rewards.deeper:f"):
        with pytest.raises(ConfigError, match="there is no module"):
            build_scorer(PythonSpec(kind="python", function=name), tools)


async def test_the_version_changes_with_the_file(tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rewards.py").write_text("raise SystemExit('the service must not import this')\n")
    spec = PythonSpec(kind="python", function="own_rewards:f")
    before = build_scorer(spec, tools).version
    assert build_scorer(spec, tools).version == before
    (tmp_path / "own_rewards.py").write_text("def f(**_): return [1.0]\n")
    assert build_scorer(spec, tools).version != before

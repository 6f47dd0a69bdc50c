"""Kind `python`: reward functions with TRL's signature, in real worker processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import pytest_asyncio
from tba_reward.models.process import ModelPool
from tba_reward.scorers import python
from tba_reward.scorers.base import Failure, Item, Outcome, Scorer, Tools
from tba_reward.tasks import build_scorer
from tba_reward.workers.pool import WorkerPool

from tba.config.reward import PythonSpec
from tba.errors import ConfigError

MODULE = "tests.support.trl_rewards"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tools() -> AsyncIterator[Tools]:
    pool = WorkerPool(num_workers=2, max_memory_bytes=None, start_timeout_s=60.0)
    yield Tools(pool=pool, models=ModelPool(), item_timeout_s=20.0)
    await pool.close()


async def started(tools: Tools, function: str, timeout_s: float | None = None) -> Scorer:
    scorer = build_scorer(PythonSpec(kind="python", function=function, timeout_s=timeout_s), tools)
    await scorer.start()
    return scorer


async def scored(tools: Tools, function: str, *items: Item, timeout_s: float | None = None) -> list[Outcome]:
    return await (await started(tools, f"{MODULE}:{function}", timeout_s)).score(items)


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


async def test_what_a_function_does_wrong_costs_its_own_item_alone(tools: Tools) -> None:
    items = [item(r) for r in ("raise", "good", "nothing", "two", "text", "nan", "crash", "hang", "good")]
    outcomes = await scored(tools, "misbehaves", *items, timeout_s=2.0)
    reasons = [o.reason if isinstance(o, Failure) else o for o in outcomes]
    assert reasons == ["exception", 1.0, "exception", "exception", "exception", "not_finite", "crashed", "timeout", 1.0]


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


async def test_entry_points_name_functions(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("judge", f"{MODULE}:judge", python.ENTRY_POINT_GROUP)
    monkeypatch.setattr(python, "entry_points", lambda group: EntryPoints([entry]).select(group=group))
    scorer = await started(tools, "judge")
    assert await scorer.score([item("four")]) == [4.0]
    with pytest.raises(ConfigError, match=r"'jugde' is neither .* \(known: judge\)"):
        build_scorer(PythonSpec(kind="python", function="jugde"), tools)


async def test_the_version_changes_with_the_file_and_the_revision(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rewards.py").write_text("raise SystemExit('the service must not import this')\n")
    spec = PythonSpec(kind="python", function="own_rewards:f")
    before = build_scorer(spec, tools).version
    assert build_scorer(spec, tools).version == before
    assert build_scorer(spec.model_copy(update={"revision": "2"}), tools).version != before
    (tmp_path / "own_rewards.py").write_text("def f(**_): return [1.0]\n")
    assert build_scorer(spec, tools).version != before

"""Kind `math` in real worker processes: an item that hangs costs its own deadline; wrong is 0, unknown is not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tba_reward.model_server.client import ModelPool
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorer import OK, Failure, Item, Scorer
from tba_reward.scorers import Tools, build_scorer

from tba.config.reward import MathSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")
POISON = r"\boxed{9^{9^{9^{9}}} + \sqrt{2}}"
ENDLESS = r"\boxed{" + "(" * 200 + "x" + ")" * 200 + "}"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def scorer() -> AsyncIterator[Scorer]:
    pool = WorkerPool(num_workers=2, max_memory_bytes=4 * 1024**3, start_timeout_s=60.0)
    scorer = build_scorer(MathSpec(kind="math", timeout_s=3.0), Tools(pool=pool, models=ModelPool()))
    await scorer.start()
    yield scorer
    await pool.close()


def item(response: str, gold: object = "4") -> Item:
    return Item(prompt="2+2?", response=response, data={"answer": gold})


async def test_it_works_in_worker_processes(scorer: Scorer) -> None:
    """In a thread math-verify's own timeouts break it, and a naive service gives 0 for everything."""
    assert scorer.health() == OK
    items = [item(rf"\boxed{{{n}}}", gold) for n, gold in [("4", "4"), ("5", "4"), ("2x", "x+x"), (r"\frac12", "0.5")]]
    assert await scorer.score(items) == [1.0, 0.0, 1.0, 1.0]


async def test_answers_that_never_end_cost_only_themselves(scorer: Scorer) -> None:
    items = [item(r"\boxed{4}"), item(POISON), item(ENDLESS), *[item(rf"\boxed{{{n}}}") for n in range(8)]]
    right, poison, endless, *others = await scorer.score(items)
    assert isinstance(poison, Failure)
    assert poison.reason in ("too_slow", "out_of_memory", "crashed")
    assert endless == 0.0 or (isinstance(endless, Failure) and endless.reason in ("too_slow", "ambiguous"))
    assert [right, *others] == [1.0, 0, 0, 0, 0, 1.0, 0, 0, 0]


async def test_what_cannot_be_told_is_no_number(scorer: Scorer) -> None:
    outcomes = await scorer.score([item(r"\boxed{\frac{1}{}}"), item(r"\boxed{4}", None), item(r"\boxed{x}", "{" * 50)])
    assert [o.reason if isinstance(o, Failure) else o for o in outcomes] == ["ambiguous", "bad_data", "bad_data"]

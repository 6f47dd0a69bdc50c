"""Worker processes: an item ends with a number or a reason for every fault of a rule, and no other item fails."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from tba_reward.process_pool.job import WorkerRule
from tba_reward.process_pool.pool import WorkerPool
from tba_reward.scorer import Failure, Item, Outcome

from tests.support.reward_scorers import verdict

RULE = WorkerRule(function="tests.support.reward_faults:misbehave")
COUNT = "tests.support.reward_faults:num_loaded"
MEMORY_BYTES = 1 << 30
LONG_S = 60.0

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def losses() -> list[str]:
    return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(losses: list[str]) -> AsyncIterator[WorkerPool]:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    pool = WorkerPool(num_workers=2, max_memory_bytes=MEMORY_BYTES, start_timeout_s=LONG_S, on_loss=losses.append)
    yield pool
    await pool.close()


def item(response: str, **data: Any) -> Item:
    return Item(prompt="", response=response, data=data)


def verdicts(outcomes: list[Outcome]) -> list[float | str]:
    return [verdict(outcome) for outcome in outcomes]


async def until(what: str, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("how", "reason", "detail"),
    [
        ("fine", None, ""),
        ("raise", "exception", "StubbornError: broken scorer"),
        ("exit", "exception", "SystemExit: 3"),
        ("timeout", "exception", "TimeoutError: the scorer's own timeout"),
        ("bad_data", "bad_data", "no such thing"),
        ("ambiguous", "ambiguous", "this or that"),
        ("surrogate", "exception", "ValueError: lone ? surrogate"),
        ("nan", "not_finite", "the score is nan"),
        ("inf", "not_finite", "the score is -inf"),
        ("text", "exception", "the score is '1.0', not a number"),
        ("none", "exception", "the score is None, not a number"),
        ("print", None, ""),
        ("fork", None, ""),
        ("crash", "crashed", "the worker died (exit code 7)"),
        ("segfault", "crashed", "the worker died (killed by SIGSEGV)"),
        ("eat", "out_of_memory", f"it needs more than {MEMORY_BYTES} bytes of memory"),
    ],
)
async def test_every_way_to_fail_has_its_reason_and_the_others_are_scored(
    pool: WorkerPool, how: str, reason: str | None, detail: str
) -> None:
    outcomes = await pool.score(RULE, [item("fine"), item(how), *[item("fine")] * 20], LONG_S)
    assert verdicts(outcomes) == [0.5, reason or 0.5, *[0.5] * 20]
    if isinstance(failure := outcomes[1], Failure):
        assert failure.detail == detail


async def test_one_that_hangs_is_killed_at_its_deadline_and_what_was_behind_it_is_scored(
    pool: WorkerPool, losses: list[str], tmp_path: Path
) -> None:
    losses.clear()
    pids = tmp_path / "pids"
    items = [item("fine"), item("hang", pid_file=str(pids)), *[item("fine")] * 50, item("hang", pid_file=str(pids))]
    outcomes = await pool.score(RULE, items, 0.5)
    assert verdicts(outcomes) == [0.5, "too_slow", *[0.5] * 50, "too_slow"]
    assert losses == ["too_slow"] * 2
    hung = [int(pid) for pid in pids.read_text().split()]
    await until("they are gone", lambda: not any(map(is_running, hung)))


async def test_a_deadline_is_cpu_time_and_waiting_takes_none(pool: WorkerPool) -> None:
    """On a busy machine, the item takes longer than its deadline by the clock on the wall."""
    assert await pool.score(RULE, [item("sleep", for_s=3.0)], 2.0) == [0.5]


async def test_one_that_waits_for_ever_is_killed_by_the_clock_on_the_wall(
    pool: WorkerPool, losses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses.clear()
    monkeypatch.setattr("tba_reward.process_pool.pool.WALL_SLACK_S", 0.5)
    (outcome,) = await pool.score(RULE, [item("sleep", for_s=10 * LONG_S)], 0.5)
    assert isinstance(outcome, Failure)
    assert outcome.reason == "timeout"
    assert re.fullmatch(r"no result after [0-9.]+ s, 0\.[0-9]+ s of CPU time; the worker was killed", outcome.detail)
    assert losses == ["timeout"]


async def test_what_lies_behind_a_slow_item_is_taken_by_a_worker_that_has_nothing_to_do(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """Both hang for longer than this test; nothing waits for that."""
    pid_file = str(tmp_path / "pids")
    hanging = asyncio.create_task(pool.score(RULE, [item("hang", pid_file=pid_file)], LONG_S))
    await until("it hangs", lambda: Path(pid_file).exists() and bool(Path(pid_file).read_text()))
    async with asyncio.timeout(LONG_S / 2):
        assert await pool.score(RULE, [item("fine")] * 40, LONG_S) == [0.5] * 40
    assert not hanging.done()
    hanging.cancel()


async def test_while_batches_hang_other_workers_take_their_place_and_none_is_left_over(
    pool: WorkerPool, tmp_path: Path
) -> None:
    rule = WorkerRule(function="tests.support.reward_faults:misbehave_together", batch_items=4)
    assert await pool.score(rule, [item("fine")], LONG_S) == [0.5]
    hanging = []
    for number in range(3):  # more than there are workers
        pid_file = tmp_path / f"{number}"
        batch = [item("fine"), Item(prompt=f"{number}", response="hang", data={"pid_file": str(pid_file)})]
        hanging.append(asyncio.create_task(pool.score(rule, batch, LONG_S)))
    async with asyncio.timeout(LONG_S / 2):
        while not all((tmp_path / f"{number}").exists() for number in range(3)):
            await asyncio.sleep(0.01)
        assert await pool.score(rule, [item("fine")] * 9, LONG_S) == [0.5] * 9
    assert not any(task.done() for task in hanging)
    for task in hanging:
        task.cancel()
    await until("those that hung are gone, and two and a spare one are left", lambda: len(pool._workers) == 3)


async def test_a_prompt_that_hangs_again_and_again_fails_without_a_worker_until_it_does_not(
    pool: WorkerPool, losses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tba_reward.process_pool.pool.WALL_SLACK_S", 3.0)
    rule = WorkerRule(function="tests.support.reward_faults:misbehave_together", batch_items=32)
    bad = [Item(prompt="bad", response="sleep", data={"for_s": 10 * LONG_S})] * 10
    losses.clear()
    outcomes = await pool.score(rule, [*bad, *[item("fine")] * 10], 0.5)
    assert verdicts(outcomes) == ["timeout"] * 10 + [0.5] * 10
    details = [outcome.detail for outcome in outcomes if isinstance(outcome, Failure)]
    not_asked = [detail for detail in details if detail == "not asked: the last 2 responses to 'bad' hung"]
    assert 0 < len(not_asked) <= 8
    losses.clear()
    assert verdicts(await pool.score(rule, bad, 0.5)) == ["timeout"] * 10
    assert not losses, "none of them was asked"
    pool._hung.clear()  # as after HUNG_S
    monkeypatch.setattr("tba_reward.process_pool.pool.WALL_SLACK_S", LONG_S)
    good = Item(prompt="bad", response="sleep", data={"for_s": 0.0})
    assert await pool.score(rule, [good], 0.5) == [0.5]


async def test_nobody_waits_for_a_batch_that_was_cancelled(pool: WorkerPool, tmp_path: Path) -> None:
    pid_file = str(tmp_path / "pids")
    task = asyncio.create_task(pool.score(RULE, [item("hang", pid_file=pid_file)] * 20, 10 * LONG_S))
    await until("both workers hang", lambda: Path(pid_file).exists() and Path(pid_file).read_text().count("\n") == 2)
    task.cancel()
    async with asyncio.timeout(LONG_S):
        assert await pool.score(RULE, [item("fine")] * 4, LONG_S) == [0.5] * 4


@pytest.mark.parametrize("how", ["child", "daemon", "stranger"])
async def test_what_a_rule_has_started_ends_with_its_worker(pool: WorkerPool, tmp_path: Path, how: str) -> None:
    pid_file = tmp_path / "pid"
    task = asyncio.create_task(pool.score(RULE, [item(how, child_file=str(pid_file))], 10 * LONG_S))
    await until("it has started a process", lambda: pid_file.exists() and bool(pid_file.read_text()))
    pid = int(pid_file.read_text())
    assert is_running(pid)
    task.cancel()
    await until("it is gone", lambda: not is_running(pid))


async def test_an_item_that_was_only_in_the_way_of_a_crash_is_scored_by_another_worker(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pid_file = str(tmp_path / "pids")
    task = asyncio.create_task(pool.score(RULE, [item("sleep", pid_file=pid_file, for_s=0.2), item("fine")], LONG_S))
    await until("it has begun", lambda: Path(pid_file).exists() and bool(Path(pid_file).read_text()))
    os.kill(int(Path(pid_file).read_text().split()[0]), signal.SIGKILL)
    assert await task == [0.5, 0.5]


async def test_an_item_that_cannot_be_sent_is_malformed(pool: WorkerPool) -> None:
    items = [item("\udc80"), item("fine"), item("fine", number=object()), item("fine", big=10**400)]
    assert verdicts(await pool.score(RULE, items, LONG_S)) == ["malformed", 0.5, "malformed", 0.5]


async def test_each_worker_loads_a_rule_once_and_before_its_first_item(pool: WorkerPool) -> None:
    rule = WorkerRule(function=COUNT, prepare="tests.support.reward_faults:prepare", params={"n": 1})
    assert pool.health(rule) == f"{COUNT} is not loaded yet"
    await pool.prepare(rule)
    assert pool.health(rule) == "ok"
    assert set(await pool.score(rule, [item("")] * 50, LONG_S)) == {1.0}


async def test_a_rule_that_takes_long_to_load_holds_up_no_other_one(pool: WorkerPool) -> None:
    slow = WorkerRule(function=RULE.function, prepare="tests.support.reward_faults:prepare", params={"load_s": 3.0})
    waiting = asyncio.create_task(pool.score(slow, [item("fine")], LONG_S))
    await asyncio.sleep(0)
    assert await pool.score(RULE, [item("fine")] * 4, LONG_S) == [0.5] * 4
    assert not waiting.done()
    assert await waiting == [0.5]


@pytest.mark.parametrize(
    ("function", "how", "sentence"),
    [
        ("no_such_module:f", None, "no_such_module:f could not be loaded: ModuleNotFoundError"),
        ("tests.support.reward_faults:nothing", None, "has no attribute 'nothing'"),
        ("tests.support.reward_faults:misbehave", "raise", "could not be loaded: StubbornError: broken scorer"),
        ("tests.support.reward_faults:misbehave", "exit", "could not be loaded: SystemExit: 3"),
        ("tests.support.reward_faults:misbehave", "crash", "exit code 7 while it was loaded"),
    ],
)
async def test_a_rule_that_cannot_be_loaded_says_why_and_leaves_the_others_alone(
    pool: WorkerPool, function: str, how: str | None, sentence: str
) -> None:
    prepare = None if how is None else "tests.support.reward_faults:prepare_badly"
    rule = WorkerRule(function=function, prepare=prepare, params={"how": how})
    await pool.prepare(rule)
    assert sentence in pool.health(rule)
    (outcome,) = await pool.score(rule, [item("fine")], LONG_S)
    assert isinstance(outcome, Failure)
    assert outcome.reason == "exception"
    assert sentence in outcome.detail
    assert await pool.score(RULE, [item("fine")], LONG_S) == [0.5]


async def test_a_rule_that_hangs_while_it_is_loaded_has_a_deadline_of_its_own(tmp_path: Path) -> None:
    pool = WorkerPool(num_workers=1, max_memory_bytes=None, start_timeout_s=2.0)
    rule = WorkerRule(
        function=RULE.function, prepare="tests.support.reward_faults:prepare_badly", params={"how": "hang"}
    )
    await pool.prepare(rule)
    assert pool.health(rule) == f"{RULE.function} was not loaded within 2 s"
    assert verdicts(await pool.score(rule, [item("fine")], LONG_S)) == ["exception"]
    await pool.close()


@pytest.mark.nightly
async def test_many_batches_of_good_and_bad_items_at_once_each_end_as_they_must(pool: WorkerPool) -> None:
    expected = {"fine": 0.5, "raise": "exception", "nan": "not_finite", "crash": "crashed", "hang": "too_slow"}
    draw = random.Random(1)
    batches = [draw.choices(list(expected), weights=[80, 10, 5, 5, 0], k=60) for _ in range(5)]
    for batch in batches[:3]:
        batch[draw.randrange(60)] = "hang"
    scored = await asyncio.gather(*(pool.score(RULE, [item(how) for how in batch], 0.5) for batch in batches))
    for batch, outcomes in zip(batches, scored, strict=True):
        assert verdicts(outcomes) == [expected[how] for how in batch]


async def test_the_spare_worker_takes_the_place_of_a_killed_one_at_once(tmp_path: Path) -> None:
    """The new spare takes three seconds to load its rule."""
    pool = WorkerPool(num_workers=1, max_memory_bytes=None, start_timeout_s=LONG_S)
    rule = WorkerRule(function=RULE.function, prepare="tests.support.reward_faults:prepare", params={"load_s": 3.0})
    await pool.prepare(rule)
    await until("the spare is warm", lambda: [worker.loaded for worker in pool._workers] == [{0}] * 2)
    task = asyncio.create_task(pool.score(rule, [item("hang"), item("fine")], 0.5))
    async with asyncio.timeout(3.0):
        assert verdicts(await task) == ["too_slow", 0.5]
    await pool.close()


async def test_workers_that_end_at_once_are_a_problem_that_is_named_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spare one is killed before it gets anything to do."""
    pool = WorkerPool(num_workers=1, max_memory_bytes=None, start_timeout_s=LONG_S)
    monkeypatch.setattr("tba_reward.process_pool.pool.RESTART_S", 0.2)
    await pool.prepare(RULE)
    await until("both are warm", lambda: [len(worker.loaded) for worker in pool._workers] == [1, 1])
    spare = pool._workers[1]
    assert spare._process is not None
    spare._process.kill()
    await until("it is named", lambda: pool.health(RULE).startswith("worker processes end at once (killed by SIGKILL"))
    assert await pool.score(RULE, [item("fine")], LONG_S) == [0.5]
    assert pool.health(RULE) == "ok"
    await pool.close()


async def test_a_process_that_cannot_be_started_is_a_problem_that_is_named_and_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WorkerPool(num_workers=1, max_memory_bytes=None, start_timeout_s=LONG_S)
    with monkeypatch.context() as patch:
        patch.setattr("tba_reward.process_pool.pool.RESTART_S", 0.01)
        patch.setattr("sys.executable", "/nowhere/python")
        task = asyncio.create_task(pool.score(RULE, [item("fine")], LONG_S))
        await until("it is named", lambda: pool.health(RULE).startswith("worker processes cannot be started: "))
    assert await task == [0.5]
    assert pool.health(RULE) == "ok"
    await pool.close()


async def test_a_pool_that_is_closed_leaves_no_process_and_no_item_without_an_answer(tmp_path: Path) -> None:
    pool = WorkerPool(num_workers=1, max_memory_bytes=None, start_timeout_s=LONG_S)
    pid_file = tmp_path / "pids"
    task = asyncio.create_task(pool.score(RULE, [item("hang", pid_file=str(pid_file))] * 3, LONG_S))
    await until("it hangs", lambda: pid_file.exists() and bool(pid_file.read_text()))
    await pool.close()
    assert verdicts(await task) == ["unreachable"] * 3, "nothing is wrong with the items: they may be asked again"
    assert not is_running(int(pid_file.read_text()))
    assert verdicts(await pool.score(RULE, [item("fine")], LONG_S)) == ["unreachable"]

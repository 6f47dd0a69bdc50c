"""Episodes in a searcher's loop: leases, rewards, evaluations and drains, with a real buffer, engine and workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tba_searcher.episodes import runner
from tba_searcher.generation import delivery

from tba.api import Prompt
from tba.api.rollouts import RolloutDetail
from tests.support.buffer_fixtures import ServeBuffer
from tests.support.chat_tokenizers import make_talking_model
from tests.support.leases import request_eval
from tests.support.reward_server import RewardServer
from tests.support.searcher_loop import LoopWorld, start_loop_world

PLAYED = "tests.support.environments"
ECHO = {"environment": f"{PLAYED}:Echo", "settings": {"turns": 2}, "truncated_reward": 0.0}
SCORED = {"port": 0, "tasks": {"scored": {"scorers": [{"kind": "exact"}]}}}
SEARCHER = {"num_slots": 8, "max_prompt_tokens": 200, "max_response_tokens": 20}


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talking_model(tmp_path_factory.mktemp("talking") / "model")


@pytest.fixture
def make_world(
    tmp_path: Path, serve_buffer: ServeBuffer, reward: RewardServer, talking: Path
) -> Callable[..., LoopWorld]:
    return partial(start_loop_world, tmp_path, serve_buffer, reward, talking)


def prompts_of(num: int, task: str = "talk", *, split: Any = "train", **data: Any) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{task}-{split}-{n}", task=task, text="hello", data={"seed": n, **data}, split=split)
        for n in range(num)
    ]


@asynccontextmanager
async def running(world: LoopWorld) -> AsyncIterator[Callable[..., Any]]:
    """Run the loop; yield a function that waits for a condition."""
    assert world.loop.episodes is not None
    await world.loop.episodes.start()
    task = asyncio.create_task(world.loop.run())

    async def wait(condition: Callable[[], Any], timeout_s: float = 90.0) -> Any:
        async with asyncio.timeout(timeout_s):
            while not (found := await asyncio.to_thread(condition)):
                if task.done():
                    task.result()
                await asyncio.sleep(0.05)
            return found

    try:
        yield wait
    finally:
        world.stop.set()
        await task


def rollouts_of(world: LoopWorld, **query: Any) -> list[RolloutDetail]:
    found = world.client.list_rollouts(limit=100, **query).rollouts
    return [world.client.get_rollout(each.rollout_id) for each in found]


async def test_what_environment_and_scorers_pay_adds_up(make_world: Callable[..., LoopWorld], reward: RewardServer):
    reward.tasks = ["scored"]
    world = make_world(
        prompts=[*prompts_of(2), *prompts_of(2, "scored")],
        environments={"talk": ECHO, "scored": ECHO},
        reward=SCORED,
        searcher=SEARCHER,
    )
    async with running(world) as wait:
        found = await wait(lambda: len(each := rollouts_of(world)) >= 16 and each)
    for rollout in found:
        assert rollout.episode is not None
        paid = sum(each or 0.0 for each in rollout.episode.turn_rewards)
        assert rollout.reward == paid + (10.0 if rollout.task == "scored" else 0.0)
        if rollout.task == "scored":
            assert {part.name: part.score for part in rollout.reward_parts or []}["environment"] == paid
    assert {item["task"] for item in reward.asked} == {"scored"}


async def test_a_score_that_comes_later_is_added_to_what_the_environment_paid(
    make_world: Callable[..., LoopWorld], reward: RewardServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(delivery, "SCORE_RETRY_S", 0.2)
    reward.tasks = ["scored"]
    world = make_world(
        prompts=prompts_of(2, "scored"),
        environments={"scored": ECHO},
        reward={**SCORED, "url": reward.url},
        searcher=SEARCHER,
    )
    reward.leave()
    async with running(world) as wait:
        await wait(lambda: len(rollouts_of(world, status="pending")) >= 4)
        reward.come_back()
        found = await wait(lambda: len(each := rollouts_of(world, status="scored")) >= 4 and each)
    for rollout in found:
        assert rollout.reward == 10.0 + sum(each or 0.0 for each in rollout.episode.turn_rewards)


async def test_prompts_that_cannot_be_played_cost_no_others(
    make_world: Callable[..., LoopWorld], reward: RewardServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "MAX_PAUSE_S", 0.05)
    broken = Prompt(prompt_id="broken", task="talk", text="x", data={"begin": "raise"})
    large = Prompt(prompt_id="large", task="talk", text="x", messages=[{"role": "user", "content": "long " * 200}])
    world = make_world(prompts=[broken, large, *prompts_of(2)], environments={"talk": ECHO}, searcher=SEARCHER)
    async with running(world) as wait:
        await wait(lambda: world.status.counts["episodes_failed_environment"] >= 12)
        await wait(lambda: world.status.counts["refused_prompts"] >= 1)
        await wait(lambda: len(rollouts_of(world)) >= 24)
    assert {rollout.prompt_id for rollout in rollouts_of(world)} == {"talk-train-0", "talk-train-1"}
    # the lease of an episode that failed went back, and was granted again
    assert world.status.counts["leases_returned"] >= 2
    assert world.status.num_unpushed == 0
    assert world.client.stats().leases["open"] == 0


async def test_a_drain_delivers_whole_episodes_and_gives_the_others_back(
    make_world: Callable[..., LoopWorld], reward: RewardServer
):
    world = make_world(
        prompts=prompts_of(4, sleep_s=0.3),
        environments={"talk": {**ECHO, "environment": f"{PLAYED}:Thread", "settings": {"turns": 4}, "max_turns": 4}},
        searcher={**SEARCHER, "drain_s": 1.5},
    )
    async with running(world) as wait:
        await wait(lambda: world.status.counts["generated_tokens"] > 20)
    found = rollouts_of(world)
    for rollout in found:
        assert rollout.episode is not None
        is_whole = rollout.episode.stop_condition in ("done", "max_response_tokens", "max_prompt_tokens", "max_turns")
        assert is_whole, rollout.episode
    assert world.client.stats().leases["open"] == 0
    assert world.loop.episodes is not None
    assert world.loop.episodes.num_open == 0


async def test_an_evaluation_plays_its_prompts_with_the_pinned_version(
    make_world: Callable[..., LoopWorld], reward: RewardServer
):
    world = make_world(
        prompts=[*prompts_of(2), *prompts_of(3, split="heldout")], environments={"talk": ECHO}, searcher=SEARCHER
    )
    asked = request_eval(world.client, world.lineage)
    async with running(world) as wait:
        done = await wait(lambda: (info := world.client.get_eval(asked.eval_id)).state == "done" and info)
    assert (done.mean_reward or 0.0) > 0
    assert done.num_unknown == 0

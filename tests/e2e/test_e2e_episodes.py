"""A run with an environment and a tool, whose worker and searcher are killed in the middle of episodes."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import MakePlace
from tests.support.chat_tokenizers import make_talking_model
from tests.support.e2e import RUN, Place, decode_all
from tests.support.environments import worker_pids
from tests.support.waits import until

ROOT = Path(__file__).parents[2]
PLAYED = "tests.support.environments"


@pytest.fixture(scope="module")
def place(make_place: MakePlace, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A finished run of 12 steps."""
    model = make_talking_model(tmp_path_factory.mktemp("model") / "talking")
    place = make_place(
        environ={"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        model={"path": str(model)},
        data={"generator": f"{PLAYED}:prompts", "num_train": 32, "num_heldout": 8},
        environments={
            "talk": {"environment": f"{PLAYED}:Parity", "settings": {"turns": 3}, "truncated_reward": 0.0},
            "sum": {"tools": [f"{PLAYED}:add"], "truncated_reward": 0.0},
        },
        reward={"port": 0, "tasks": {"sum": {"scorers": [{"kind": "exact"}]}}},
        searcher={"num_searchers": 1, "num_slots": 8, "max_prompt_tokens": 300, "max_response_tokens": 12},
        objective={"preset": "grpo"},
        trainer={"num_steps": 12, "sync_interval": 1, "checkpoint_interval": 6},
    )
    started = place.start()
    client = place.client()
    place.until("it trains", lambda info: info.step >= 2)
    # mid-episode: each takes at least 0.15 s, and new ones begin all the time
    os.kill(worker_of(place.pid("searcher-0")), signal.SIGKILL)
    place.until("it goes on", lambda info: info.step >= 5)
    os.kill(place.pid("searcher-0"), signal.SIGKILL)
    client.close()
    assert started.wait() == 0, started.err + started.out
    return place


def worker_of(searcher: int) -> int:
    """Wait until a searcher has workers of both tasks, and return one of the environment."""

    def found() -> int:
        pids = worker_pids(searcher)
        return next((pid for pid in pids if "talk" in Path(f"/proc/{pid}/cmdline").read_text()), 0)

    return until("a worker", found)


def test_every_stored_episode_is_whole(place: Place):
    rollouts = decode_all(place.rollouts(RUN))
    kinds = Counter[str]()
    for rollout in rollouts:
        episode = rollout.episode
        if episode is None:
            kinds[rollout.task] += 1
            continue
        kinds[f"{rollout.task} {episode.stop_condition}"] += 1
        if episode.stop_condition == "done":
            assert rollout.num_replies == 3
            assert len(episode.turn_rewards) == 3
            assert rollout.reward == sum(reward or 0.0 for reward in episode.turn_rewards)
        assert rollout.reward_status == "scored"
    assert kinds["talk done"] > 10
    assert kinds["sum no_tool_call"] > 10
    assert kinds["exact"] > 10
    ids = [rollout.episode.episode_id for rollout in rollouts if rollout.episode is not None]
    assert len(ids) == len(set(ids))


def test_the_killed_worker_cost_its_episodes_and_nothing_else(place: Place):
    assert [entry.step for entry in place.ledger()] == list(range(1, 13))
    assert "environment worker died" in place.log("searcher-0")
    assert "episode failed" in place.log("searcher-0")
    assert "searcher-0 died" in place.started[0].out


def test_evaluations_play_episodes_too(place: Place):
    lines = [line for line in place.started[0].out.splitlines() if line.endswith("on 8 held-out prompts")]
    assert any(line.startswith("mean reward") for line in lines)
    assert any(line.startswith("pass@1 greedy") for line in lines)


@pytest.mark.parametrize("words", [[], ["--model"]])
def test_one_episode_is_tried_by_hand_and_by_the_model(place: Place, words: list[str]):
    tried = place.tba("env", "try", "recipe.json", "--task", "talk", *words, typed="one\ntwo\nthree\n")
    assert tried.returncode == 0, tried.stderr
    _, _, tokens = tried.stdout.partition("\nreward: ")
    rows = [line.split(maxsplit=4) for line in tokens.splitlines()[1:]]
    assert {row[1] for row in rows if row[2] == "trained"} == {"policy"}
    assert words or tokens.startswith("3.0 (turns: 1.0, 1.0, 1.0)\n")
    assert words or [row[4] for row in rows[2::3]] == [f"'{text}<|im_end|>'" for text in ("one", "two", "three")]


def test_a_first_prompt_that_is_too_long_is_found_before_a_run(place: Place):
    checked = place.tba("config", "check", "recipe.json", "--set", "searcher.max_prompt_tokens=12")
    assert (checked.returncode, "its first prompt has" in checked.stdout) == (1, True), checked.stdout

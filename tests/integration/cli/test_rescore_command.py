"""`tba rescore` beside the real services: a reward gets a new version, and everything that is stored its new reward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tba.wire import encode_rollout
from tba_cli.main import main
from tests.support.buffer import Stack, make_prompts, make_rollout, start_stack
from tests.support.redis_process import free_port
from tests.support.reward_process import reward_of
from tests.support.scored_buffer import stored_rollouts
from tests.support.waits import until


@contextmanager
def reward_service(stack: Stack, value: int) -> Iterator[None]:
    """`python -m tba_reward` whose task `versioned` gives `value` to everything."""
    tasks = f'{{versioned = {{scorers = [{{kind = "format", pattern = "", weight = {value}}}]}}}}'
    with reward_of(stack.buffer.recipe_path, stack.recipe.reward_url, {"TBA_REWARD__TASKS": tasks}):
        yield


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    started = start_stack(tmp_path, reward={"port": free_port(), "num_workers": 1})
    yield started
    started.stop()


def test_a_new_version_of_a_reward_reaches_everything_that_is_stored(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = stack.client
    client.upload_prompts([p.model_copy(update={"task": "versioned"}) for p in make_prompts(4)])
    rollouts = [make_rollout(f"train-{i % 4}", task="versioned", reward=None) for i in range(300)]
    client.push([encode_rollout(rollout) for rollout in rollouts])

    def tba(*words: str) -> tuple[int, str]:
        code = main(["rescore", "--url", stack.buffer.url, *words])
        return code, capsys.readouterr().out

    def rewards() -> dict[float | None, str]:
        """Reward versions by reward."""
        return {r.reward: str(r.reward_version) for r in stored_rollouts(stack.redis).values()}

    with reward_service(stack, 1):
        until("all are scored", lambda: client.stats().num_scored == 300)
        first = rewards()
        assert list(first) == [1.0]
        assert first[1.0].startswith("versioned@")
    with reward_service(stack, 2):
        assert tba()[0] == 0
        until("it is done", lambda: "done after" in tba("--show")[1])
        _, out = tba("--show")
        assert "mean reward       1.0000      2.0000" in out
        second = rewards()
        assert list(second) == [2.0]
        assert second[2.0] not in first.values()
    code, out = tba("--task", "versioned", "--json")  # no scorer runs: the job waits
    assert (code, json.loads(out)["state"]) == (0, "running")
    until("it says why", lambda: "does not answer" in tba("--show")[1])
    assert main(["rescore", "--url", stack.buffer.url, "--task", "gsm8k"]) == 2
    assert "no prompt of this run has the task 'gsm8k'" in capsys.readouterr().err
    assert rewards() == second

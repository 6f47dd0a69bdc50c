"""The reward service as a process, over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tba.api import ScoreItem
from tba.clients import RewardClient
from tests.support.redis_process import free_port

ROOT = Path(__file__).parents[3]
RECIPE = """
[run]
name = "demo"
[model]
path = "none"
[data]
generator = "addition"
[reward]
port = {port}
num_workers = 2
[reward.tasks.slow]
scorers = [{{kind = "python", function = "tests.support.reward_faults:reward", timeout_s = {timeout_s}}}]
"""


class Service:
    """`python -m tba_reward` on a free port."""

    def __init__(self, folder: Path, *sets: str, recipe: str = RECIPE, timeout_s: float = 1.0) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        (folder / "recipe.toml").write_text(recipe.format(port=port, timeout_s=timeout_s))
        self.log = folder / "log"
        arguments = [part for item in sets for part in ("--set", item)]
        paths = [str(ROOT), str(ROOT / "services" / "reward"), os.environ.get("PYTHONPATH", "")]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tba_reward", "--config", str(folder / "recipe.toml"), *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                cwd=folder,
                stderr=log,
            )

    def wait_ready(self, timeout_s: float = 180.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        last = "no answer"
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, self.log.read_text()
            try:
                answer = httpx2.get(f"{self.url}/readyz", timeout=60)
                if answer.status_code == 200:
                    return
                last = answer.text
            except httpx2.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready: {last}\n{self.log.read_text()}")

    def children(self) -> list[int]:
        """Pids of all processes below the service."""
        found, queue = [], [self.process.pid]
        while queue:
            pid = queue.pop()
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                below = [int(text) for text in path.read_text().split()]
                found += below
                queue += below
        return found


@contextmanager
def running(folder: Path, *sets: str, timeout_s: float = 1.0) -> Iterator[Service]:
    service = Service(folder, *sets, timeout_s=timeout_s)
    try:
        service.wait_ready()
        yield service
    finally:
        service.process.kill()
        service.process.wait()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("reward")) as service:
        yield service


def item(n: int, *, task: str = "addition", response: str = "12", **data: Any) -> dict[str, Any]:
    data = data or {"answer": "12"}
    return {"item_id": str(n), "task": task, "prompt": "6+6=", "response": response, "data": data}


def post(service: Service, body: Any, **arguments: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **arguments.pop("headers", {})}
    return httpx2.post(f"{service.url}/v1/score", content=content, headers=headers, timeout=60, **arguments)


def test_a_batch_is_scored_in_order_with_a_reward_or_a_reason_each(service: Service) -> None:
    items = [
        item(0),
        item(1, response="13"),
        item(2, task="nope"),
        item(3, task="slow", response="hang"),
        item(4, task="slow", response="nan"),
        item(5, task="gsm8k", answer="none"),
        item(6, task="exact", response="yes", answer="yes"),
        item(7, task="slow", response="crash"),
        item(8, response="x" * 1_000_001),
        {"item_id": "9", "task": "addition", "prompt": ""},
        item(10, answer="\ud800"),
        item(11, task="slow", response=""),
    ]
    answer = post(service, {"items": items})
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [result["item_id"] for result in results] == [str(n) for n in range(12)]
    assert [result["reward"] for result in results] == [1.0, 0.0, *[None] * 4, 1.0, *[None] * 4, 0.5]
    reasons = [result["error"] and result["error"]["reason"] for result in results]
    assert reasons[:7] == [None, None, "unknown_task", "too_slow", "not_finite", "bad_data", None]
    assert reasons[7:] == ["crashed", "too_long", "malformed", "malformed", None]
    assert results[0]["reward_version"].startswith("addition@")
    assert results[0]["parts"] == {"exact": 1.0}


def test_the_client_of_tba_understands_the_service(service: Service) -> None:
    client = RewardClient(service.url)
    reply = client.score([ScoreItem.model_validate(item(n)) for n in range(512)])
    assert [result.reward for result in reply.results] == [1.0] * 512


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        (b"{", 422, "JSON"),
        (b"\xff\xfe", 422, ""),
        (b"[]", 422, "body"),
        ({"items": []}, 422, "items"),
        ({"items": [item(0)], "extra": 1}, 422, "nothing else"),
        ({"items": [item(n) for n in range(1025)]}, 413, "1025 items, the limit is 1024"),
        ({"items": [item(0, response="x" * 2**24)]}, 413, "16777216"),
    ],
)
def test_a_request_that_is_wrong_as_a_whole_is_a_problem_document(
    service: Service, body: Any, status: int, detail: str
) -> None:
    answer = post(service, body)
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert set(problem) >= {"type", "title", "status", "detail"}
    assert problem["status"] == status
    assert re.search(detail, problem["detail"]), problem["detail"]


def test_every_reward_and_its_health_can_be_seen(service: Service) -> None:
    rewards = httpx2.get(f"{service.url}/v1/rewards", timeout=60).json()["rewards"]
    health = {reward["task"]: reward["health"] for reward in rewards if reward["task"] != "math"}
    assert health == dict.fromkeys(["addition", "exact", "gsm8k", "slow"], "ok")
    (scorer,) = next(reward["scorers"] for reward in rewards if reward["task"] == "slow")
    assert (scorer["name"], scorer["kind"], scorer["weight"], scorer["health"]) == ("reward", "python", 1.0, "ok")


def test_metrics_show_tasks_and_results(service: Service) -> None:
    post(service, {"items": [item(0), item(1, task="gsm8k", answer="none")]})
    text = httpx2.get(f"{service.url}/metrics", timeout=60).text
    assert 'tba_reward_verifications_total{result="scored",task="addition"}' in text
    assert 'tba_reward_verifications_total{result="bad_data",task="gsm8k"}' in text
    assert 'tba_reward_seconds_bucket{le="0.001",task="addition"}' in text
    assert 'tba_reward_scores_total{result="scored",scorer="exact",task="addition"}' in text


def test_a_client_that_hangs_up_frees_the_workers(tmp_path: Path) -> None:
    with running(tmp_path, "reward.num_workers=1", timeout_s=300) as service:
        hang = {"items": [item(n, task="slow", response="hang") for n in range(3)]}
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{service.url}/v1/score", json=hang, timeout=1.0)
        answer = post(service, {"items": [item(0, task="slow", response="fine")]})
        assert answer.json()["results"][0]["reward"] == 0.5


def test_a_scorer_that_cannot_be_loaded_keeps_the_service_unready_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_reward.py").write_text("raise RuntimeError('no GPU')\n")
    service = Service(tmp_path, 'reward.tasks.broken.scorers=[{kind = "python", function = "broken_reward:score"}]')
    try:
        deadline_s = time.monotonic() + 60
        detail = "no answer yet"
        while "no GPU" not in detail and time.monotonic() < deadline_s:
            try:
                answer = httpx2.get(f"{service.url}/readyz", timeout=60)
                assert answer.status_code == 503
                detail = answer.json()["detail"]
            except httpx2.TransportError:
                time.sleep(0.05)
        assert detail.startswith("broken: score: ")
        assert "could not be loaded: RuntimeError: no GPU" in detail  # another task may be starting still
        assert httpx2.get(f"{service.url}/livez", timeout=60).status_code == 200
        results = post(service, {"items": [item(0), item(1, task="broken")]}).json()["results"]
        assert results[0]["reward"] == 1.0, "the others are scored"
        assert results[1]["error"]["reason"] == "exception"
    finally:
        service.process.kill()
        service.process.wait()


def test_a_recipe_with_nothing_but_a_reward_section_is_enough_to_serve(tmp_path: Path) -> None:
    service = Service(tmp_path, recipe='[reward]\nport = {port}\ntasks.mine.scorers = [{{kind = "exact"}}]\n')
    try:
        service.wait_ready()
        results = post(service, {"items": [item(0, task="mine"), item(1)]}).json()["results"]
        assert [result["reward"] for result in results] == [1.0, 1.0]
        assert httpx2.get(f"{service.url}/version", timeout=60).json()["run"] == "reward"
    finally:
        service.process.kill()
        service.process.wait()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with functions of other people, and a judge that is away."""
    tasks = {
        "chat": 'kind="python", function="tests.support.trl_rewards:think_format"',
        "ids": 'kind="python", function="tests.support.trl_rewards:num_tokens"',
        "arguments": 'kind="python", function="tests.support.trl_rewards:at_least", kwargs={threshold=3}',
        "batch": 'kind="python", function="tests.support.trl_rewards:whole_call"',
        "broken": 'kind="python", function="tests.support.trl_rewards:raises_always"',
        "judged": f'kind="http", url="http://127.0.0.1:{free_port()}/v1/score"',
    }
    sets = [f"reward.tasks.{task}.scorers=[{{{spec}}}]" for task, spec in tasks.items()]
    with running(tmp_path_factory.mktemp("foreign"), *sets) as service:
        yield service


def test_reward_functions_of_trl_run_unchanged(foreign: Service) -> None:
    items = [
        item(0, task="chat", response="</think>7", prompt=[{"role": "user", "content": "6+1="}]),
        {**item(1, task="ids"), "response_tokens": [1, 2, 3]},
        item(2, task="arguments"),
        *(item(n, task="batch", response=f"r{n}") for n in range(3, 6)),
        {**item(6, task="ids"), "response_tokens": [-1]},
    ]
    results = post(foreign, {"items": items}).json()["results"]
    assert [result["reward"] for result in results] == [1.0, 3.0, 0.0, 3.0, 3.0, 3.0, None]
    assert results[6]["error"]["reason"] == "malformed"


def test_a_dead_judge_costs_its_task_alone(foreign: Service) -> None:
    note = httpx2.get(f"{foreign.url}/readyz", timeout=60).json()["note"]
    assert note.startswith("judged: http: no connection to 127.0.0.1")
    results = post(foreign, {"items": [item(0), item(1, task="judged")]}).json()["results"]
    assert results[0]["reward"] == 1.0
    assert results[1]["error"]["reason"] == "unreachable"


def test_a_function_that_raises_for_every_item_makes_the_service_not_ready_with_its_text(foreign: Service) -> None:
    results = post(foreign, {"items": [item(n, task="broken", response=f"r{n}") for n in range(40)]}).json()
    assert {result["error"]["detail"] for result in results["results"]} == {"KeyError: 'solutoin'"}
    answer = httpx2.get(f"{foreign.url}/readyz", timeout=60)
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:tba:problem:broken-reward")
    detail = answer.json()["detail"]
    assert detail.startswith("task broken: raises_always: it raised for each of the first 32 different")
    assert detail.endswith("KeyError: 'solutoin'")


def test_tokens_are_checked_by_role(tmp_path: Path) -> None:
    tokens = {role: f"{role}-0123456789abcdef" for role in ("searcher", "trainer", "viewer")}
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    with running(tmp_path, f"auth.tokens_file='{tmp_path}/tokens.json'", "reward.tasks={}") as service:
        body = {"items": [item(0)]}
        assert post(service, body).status_code == 401
        for role, status in [("searcher", 200), ("trainer", 403), ("viewer", 403)]:
            assert post(service, body, headers={"authorization": f"Bearer {tokens[role]}"}).status_code == status


def test_a_scorer_that_cannot_be_built_stops_the_service_with_one_sentence(tmp_path: Path) -> None:
    service = Service(tmp_path, 'reward.tasks.t.scorers=[{kind = "python", function = "no_such_module:f"}]')
    assert service.process.wait(timeout=60) == 2
    lines = service.log.read_text().splitlines()
    assert len(lines) == 1
    assert "reward.tasks.t: the function of reward kind 'python' 'no_such_module:f': there is no module" in lines[0]


@pytest.mark.parametrize(
    ("end", "response"), [(signal.SIGTERM, "fine"), (signal.SIGKILL, "hang"), (signal.SIGKILL, "stranger")]
)
def test_no_worker_outlives_the_service(tmp_path: Path, end: signal.Signals, response: str) -> None:
    pid_file, child_file = tmp_path / "pids", tmp_path / "child"
    files = {"pid_file": str(pid_file), "child_file": str(child_file)}
    awaited = child_file if response == "stranger" else pid_file

    def ask() -> None:
        with suppress(httpx2.TransportError):  # the service ends first
            post(service, {"items": [item(0, task="slow", response=response, **files)]})

    with running(tmp_path, timeout_s=300) as service:
        threading.Thread(target=ask, daemon=True).start()
        deadline_s = time.monotonic() + 60
        while not (awaited.exists() and awaited.read_text()):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        children = service.children()
        assert int(awaited.read_text()) in children
        assert len(children) >= 6, "two workers and a spare one, each with its guard"
        service.process.send_signal(end)
        code = service.process.wait(timeout=60)
        assert code in (0, -end), service.log.read_text()
        assert "Traceback" not in service.log.read_text()
        deadline_s = time.monotonic() + 60
        while (alive := [pid for pid in children if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert alive == []

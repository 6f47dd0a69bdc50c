"""The reward service as a process, over HTTP."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tba_reward.app import build_app

from tests.support.buffer import make_recipe
from tests.support.redis_process import free_port
from tests.support.reward_process import RewardProcess, start_reward
from tests.support.waits import until

FAULTS = {"kind": "python", "function": "tests.support.reward_faults:reward"}
TRL = "tests.support.trl_rewards"
SCORERS: dict[str, dict[str, Any]] = {
    "slow": {**FAULTS, "timeout_s": 1.0},
    "patient": {**FAULTS, "timeout_s": 300.0},
    "chat": {"kind": "python", "function": f"{TRL}:think_format"},
    "ids": {"kind": "python", "function": f"{TRL}:num_tokens"},
    "arguments": {"kind": "python", "function": f"{TRL}:at_least", "kwargs": {"threshold": 3}},
    "batch": {"kind": "python", "function": f"{TRL}:whole_call"},
    "broken": {"kind": "python", "function": f"{TRL}:raises_always"},
    "judged": {"kind": "http", "url": f"http://127.0.0.1:{free_port()}/v1/score"},
}
"""Functions of other people, and a judge that is away."""


def tasks(*names: str) -> dict[str, Any]:
    return {name: {"scorers": [SCORERS[name]]} for name in names}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardProcess]:
    with start_reward(tmp_path_factory.mktemp("reward"), num_workers=2, tasks=tasks(*SCORERS)) as service:
        service.wait_ready()
        yield service


def item(n: int, *, task: str = "addition", response: str = "12", **data: Any) -> dict[str, Any]:
    data = data or {"answer": "12"}
    return {"item_id": str(n), "task": task, "prompt": "6+6=", "response": response, "data": data}


def post(service: RewardProcess, body: Any, **arguments: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **arguments.pop("headers", {})}
    return httpx2.post(f"{service.url}/v1/score", content=content, headers=headers, timeout=60, **arguments)


def test_a_batch_is_scored_in_order_with_a_reward_or_a_reason_each(service: RewardProcess) -> None:
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


def test_every_reward_and_its_health_can_be_seen(service: RewardProcess) -> None:
    rewards = httpx2.get(f"{service.url}/v1/rewards", timeout=60).json()["rewards"]
    health = {reward["task"]: reward["health"] for reward in rewards}
    assert health.items() >= dict.fromkeys(["addition", "exact", "gsm8k", "slow"], "ok").items()
    (scorer,) = next(reward["scorers"] for reward in rewards if reward["task"] == "slow")
    assert (scorer["name"], scorer["kind"], scorer["weight"], scorer["health"]) == ("reward", "python", 1.0, "ok")
    assert "tba_reward_pending 0.0" in httpx2.get(f"{service.url}/metrics", timeout=60).text
    assert httpx2.get(f"{service.url}/version", timeout=60).json()["run"] == "reward", "a reward section is enough"


def test_a_client_that_hangs_up_frees_the_workers(service: RewardProcess) -> None:
    hang = {"items": [item(n, task="patient", response="hang") for n in range(130)]}  # three batches, two workers
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{service.url}/v1/score", json=hang, timeout=1.0)
    answer = post(service, {"items": [item(0, task="patient", response="fine")]})
    assert answer.json()["results"][0]["reward"] == 0.5


def test_reward_functions_of_trl_run_unchanged(service: RewardProcess) -> None:
    items = [
        item(0, task="chat", response="</think>7", prompt=[{"role": "user", "content": "6+1="}]),
        {**item(1, task="ids"), "response_tokens": [1, 2, 3]},
        item(2, task="arguments"),
        *(item(n, task="batch", response=f"r{n}") for n in range(3, 6)),
        {**item(6, task="ids"), "response_tokens": [-1]},
    ]
    results = post(service, {"items": items}).json()["results"]
    assert [result["reward"] for result in results] == [1.0, 3.0, 0.0, 3.0, 3.0, 3.0, None]
    assert results[6]["error"]["reason"] == "malformed"


def test_a_dead_judge_costs_its_task_alone(service: RewardProcess) -> None:
    note = httpx2.get(f"{service.url}/readyz", timeout=60).json()["note"]
    assert note.startswith("judged: http: no connection to 127.0.0.1")
    results = post(service, {"items": [item(0), item(1, task="judged")]}).json()["results"]
    assert results[0]["reward"] == 1.0
    assert results[1]["error"]["reason"] == "unreachable"


def test_a_function_that_raises_for_every_item_makes_the_service_not_ready_with_its_text(
    service: RewardProcess,
) -> None:
    results = post(service, {"items": [item(n, task="broken", response=f"r{n}") for n in range(40)]}).json()
    (told,) = {result["error"]["detail"] for result in results["results"]}
    assert re.fullmatch(r"KeyError: 'solutoin' \(trl_rewards\.py:\d+\)", told)
    answer = httpx2.get(f"{service.url}/readyz", timeout=60)
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:tba:problem:broken-reward")
    detail = answer.json()["detail"]
    assert detail.startswith("task broken: raises_always: it raised for each of the first 32 different")
    assert detail.endswith(told)


async def test_tokens_are_checked_by_role() -> None:
    tokens = {role: f"{role}-0123456789abcdef" for role in ("searcher", "trainer", "viewer")}
    transport = httpx2.ASGITransport(build_app(make_recipe(), tokens=tokens))
    async with httpx2.AsyncClient(transport=transport, base_url="http://reward") as client:
        for role, status in [(None, 401), ("searcher", 200), ("trainer", 403), ("viewer", 403)]:
            headers = {} if role is None else {"authorization": f"Bearer {tokens[role]}"}
            reply = await client.post("/v1/score", json={"items": [item(0)]}, headers=headers)
            assert reply.status_code == status


@pytest.mark.parametrize(
    ("end", "response"), [(signal.SIGTERM, "fine"), (signal.SIGKILL, "hang"), (signal.SIGKILL, "stranger")]
)
def test_no_worker_outlives_the_service(tmp_path: Path, end: signal.Signals, response: str) -> None:
    pid_file, child_file = tmp_path / "pids", tmp_path / "child"
    files = {"pid_file": str(pid_file), "child_file": str(child_file)}
    awaited = child_file if response == "stranger" else pid_file

    def ask() -> None:
        with suppress(httpx2.TransportError):  # the service ends first
            post(service, {"items": [item(0, task="patient", response=response, **files)]})

    with start_reward(tmp_path, num_workers=2, tasks=tasks("patient")) as service:
        service.wait_ready()
        threading.Thread(target=ask, daemon=True).start()
        until("it works", lambda: awaited.exists() and awaited.read_text())
        children = descendants(service.process.pid)
        assert int(awaited.read_text()) in children
        assert len(children) >= 6, "two workers and a spare one, each with its guard"
        service.process.send_signal(end)
        code = service.process.wait(timeout=60)
        assert code in (0, -end), service.log.read_text()
        assert "Traceback" not in service.log.read_text()
        until("all are gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))


def descendants(pid: int) -> list[int]:
    below = [int(text) for path in Path(f"/proc/{pid}/task").glob("*/children") for text in path.read_text().split()]
    return [*below, *(further for each in below for further in descendants(each))]

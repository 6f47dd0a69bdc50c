"""Extreme but well-typed numbers for every endpoint that writes, in valid bodies of every role: no answer is a server
error, and afterwards none of any GET is, also after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tba.api import BatchRequest, EvalRequest, VersionRequest
from tba.wire import encode_push, encode_rollout
from tests.support.buffer import begin_run, make_rollout, start_stack
from tests.support.buffer_reads import ask, read_everything
from tests.support.leases import lease

WHOLE = (0, 1, -1, 4097, 2**31, 2**32, 2**53 + 1, 10**15, 10**15 + 1, 2**63 - 1, -(2**63), 2**64 - 1)
LONG = (2**64, 2**80, -(2**80), 10**400, 10**999, 10**3999)
"""Only JSON can say them."""
BROKEN = (0.5, -0.5, 1e-308, 5e-324, 1e15, -1e15, 1.1e15, 1e100, 3.4e38, 1e308, -1e308, 1.7976931348623157e308)


def places(body: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all numbers in a body."""
    if isinstance(body, bool):
        return []
    if isinstance(body, int | float):
        return [path]
    items = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return [place for key, value in items for place in places(value, (*path, key))]


def put(body: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        body = body[key]
    body[path[-1]] = value


class World:
    """A buffer that is a process of its own, since hypothesis refuses threads that use `random` beside it, and
    valid bodies for it."""

    def __init__(self, folder: Path) -> None:
        sampling = {"min_size_to_sample": 1, "prompts_per_batch": 2, "group_size": 2}
        self.stack = start_stack(
            folder, store={"url": f"file://{folder / 'store'}"}, scaling={"backend": "local"}, sampling=sampling
        )
        self.client, self.url = self.stack.client, self.stack.buffer.url
        self.lineage = begin_run(self.client, 8, 4)
        self.client.push([encode_rollout(make_rollout(f"train-{i % 8}", reward=float(i))) for i in range(32)])
        self.num = 0

    def case(self, name: str) -> tuple[str, str, Any]:
        """Method, path and a new valid body; where the body is bytes on the wire, the document of it."""
        self.num += 1
        token, num = self.lineage.token, self.num
        match name:
            case "eval":
                return "POST", "/v1/evals", {"version": "0-0", "token": token, "num_prompts": 1}
            case "results":
                version = f"{self.lineage.lineage}-{num}"
                self.client.announce_version(VersionRequest(version=version, token=token))
                info = self.client.request_eval(EvalRequest(version=version, token=token, num_prompts=1))
                items = [
                    {
                        "lease_id": item.lease_id,
                        "rewards": [1.0] * item.num_rollouts,
                        "num_response_tokens": [5] * item.num_rollouts,
                        "distinct_1": 0.5,
                        "embedding_distance": 0.5,
                    }
                    for item in lease(self.client, 32).leases
                    if item.eval_id == info.eval_id
                ]
                body = {"searcher_id": "s1", "version": version, "results": items}
                return "POST", f"/v1/evals/{info.eval_id}/results", body
            case "push":
                document = msgpack.unpackb(encode_rollout(make_rollout()))
                return "POST", "/v1/rollouts", {**document, "ref_logprob": [-1.0, 0, 0]}
            case "searcher" | "trainer" | "launcher":
                gauges = {"loss": 1.0, "started_at_s": float(num), "waited_s:batch": 1.0}
                wait = {"name": "batch", "for_s": 1.0, "deadline_in_s": 1.0}
                body = {"schema": 1, "component_id": name, "kind": name, "run": "test", "state": "running"}
                return "POST", "/v1/heartbeats", {**body, "version": "0-0", "wait": wait, "gauges": gauges}
            case "settings":
                beta = {"kind": "wsd", "value": 0.1, "final": 0.05, "steps": 10, "warmup_steps": 1, "decay_steps": 2}
                values = {"learning_rate": 1e-3, "beta": beta, "eval_every_steps": 5, "sampling_temperature": 1.0}
                return "PATCH", "/v1/run/settings", {"settings": {**values, "most_on_policy_prob": 0.5}}
            case "searchers":
                return "PATCH", "/v1/run/searchers", {"num_searchers": 2}
            case "prompts":
                data = {"answer": 7, "list": [1, {"x": 0.5}]}
                prompt = {"prompt_id": f"p-{num}", "task": "addition", "text": "1+1=", "data": data}
                return "POST", "/v1/prompts", {"prompts": [prompt]}
            case "lease":
                return "POST", "/v1/leases", {"searcher_id": "s", "max_leases": 1, "request_id": f"r-{num}"}
            case "draw":
                body = {"trainer_id": "t", "lineage": self.lineage.lineage, "step": self.client.run().step + 1}
                return "POST", "/v1/batches", {**body, "token": token, "wait_s": 0.0}
            case "ack":
                step = self.client.run().step + 1
                request = BatchRequest(trainer_id="t", lineage=self.lineage.lineage, step=step, token=token, wait_s=5.0)
                batch = self.client.draw_batch(request)
                body = {"lineage": self.lineage.lineage, "step": step, "token": token, "settings_revision": 0}
                metrics = {"loss": 1.0, "step_s": 0.5, "wait_s": 0.5, "train_s": 1.0, "waited_s_total": 0.5}
                body |= {"metrics": metrics, "policy_ages": [0] * (len(batch.rollouts) - 1), "refused": {"size": 1}}
                return "POST", f"/v1/batches/{batch.batch_id}/ack", body
        raise AssertionError(name)


CASES = ("eval", "results", "push", "searcher", "trainer", "launcher", "settings", "searchers", "prompts")
CASES += ("lease", "draw", "ack")
ON_THE_WIRE = ("push", "searcher", "trainer", "launcher")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("numbers"))
    yield made
    made.stack.stop()


@pytest.mark.parametrize("name", CASES)
def test_no_number_of_any_size_makes_any_get_fail_now_or_after_a_restart(world: World, name: str) -> None:
    extremes = st.sampled_from(WHOLE + BROKEN if name in ON_THE_WIRE else WHOLE + BROKEN + LONG)

    @settings(max_examples=12, database=None, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.integers(0, 999), extremes), min_size=1, max_size=3))
    def check(changes: list[tuple[int, int | float]]) -> None:
        method, path, body = world.case(name)
        numbers = places(body)
        for at, value in changes:
            put(body, numbers[at % len(numbers)], value)
        sent = body
        if name in ON_THE_WIRE:
            packed: Any = msgpack.packb(body)
            sent = encode_push([packed]) if name == "push" else packed
        status, answer = ask(world.url, path, method, sent)
        assert status < 500, (body, answer)
        read_everything(world.url)

    check()
    world.stack.buffer.kill()
    world.stack.buffer.start()
    read_everything(world.url)
    assert ask(world.url, "/readyz")[0] == 200

"""Requests made from the OpenAPI document of the buffer: no answer is a server error or undocumented, every error is a
problem document, and afterwards what was stored is stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from schemathesis import Case
from tba_buffer.api.app import build_app

from tba.api import EvalRequest, LeaseRequest
from tests.support.buffer import make_payloads, make_prompts, make_recipe, start_lineage, start_stack
from tests.support.fuzz import fuzz, load_schema, operations

DOCUMENT = build_app(make_recipe(), None).openapi()
SCHEMA = load_schema(DOCUMENT)
NUM_STORED = 40
MSGPACK = (("/v1/rollouts", "post"), ("/v1/heartbeats", "post"))
ANSWERED = [case for case in operations(DOCUMENT) if case.id != "events"]
"""A stream has no end; test_buffer_events.py asks for it."""


class World:
    """A buffer that holds something of everything, and the values that name it.

    It is a process of its own: hypothesis does not bear threads that use `random` beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.stack = start_stack(folder, store={"url": f"file://{folder / 'store'}"})
        self.url, self.client = self.stack.buffer.url, self.stack.client
        self.client.upload_prompts(make_prompts(10, 4))
        self.values: dict[str, Any] = {}
        self.renew()
        self.client.push(make_payloads([f"train-{i}" for i in range(10)]))
        request = EvalRequest(
            version="0-0", num_prompts=2, num_samples=1, success_reward=1.0, timeout_s=60, token=self.values["token"]
        )
        self.values["eval_id"] = self.client.request_eval(request).eval_id
        leases = self.client.lease(LeaseRequest(searcher_id="s", max_leases=2)).leases
        self.values["lease_ids"] = [lease.lease_id for lease in leases]
        self.values["rollout_id"] = self.client.list_rollouts().rollouts[0].rollout_id

    def renew(self) -> None:
        """A new lineage: the run goes on whatever was commanded, and its token is the living one."""
        lineage = start_lineage(self.client)
        self.values.update(token=lineage.token, lineage=lineage.lineage, step=1, version="0-0", parent="0-0")
        self.values["prompt_id"] = "train-3"

    def put_known(self, case: Case) -> None:
        """Existing values for every parameter and field that has such a name."""
        for part in (case.path_parameters, case.query, case.body):
            if isinstance(part, dict):
                part.update({name: self.values[name] for name in part if name in self.values})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.stack.stop()


def do_not_wait(case: Case) -> None:
    """Long polls answer at once."""
    if isinstance(case.body, dict) and isinstance(case.body.get("wait_s"), int | float):
        case.body["wait_s"] = 0


@pytest.mark.parametrize(("path", "method"), ANSWERED)
def test_every_answer_is_documented_and_every_error_is_a_problem(world: World, path: str, method: str) -> None:
    world.renew()
    before = world.client.stats()
    fuzz(
        SCHEMA,
        path,
        method,
        base_url=world.url,
        max_examples=15,
        known=world.put_known,
        always=do_not_wait,
        anything_fits=(path, method) in MSGPACK,
    )
    after = world.client.stats()
    assert (after.num_rollouts, after.payload_bytes) == (before.num_rollouts, before.payload_bytes)
    assert after.num_rollouts == NUM_STORED
    assert world.client.get_rollout(world.values["rollout_id"]).rollout_id == world.values["rollout_id"]

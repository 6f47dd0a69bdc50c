"""Short calls of a buffer for tests: lease, fulfil a lease, request an evaluation, draw and ack a batch."""

from __future__ import annotations

from typing import Any

import pytest

from tba.api import AckRequest, BatchRequest, EvalReply, EvalRequest, Lease, LeaseReply, LeaseRequest, LineageReply
from tba.clients import BufferClient
from tba.errors import BusyError
from tba.wire import Batch, encode_rollout
from tests.support.buffer import make_rollout


def lease(client: BufferClient, max_leases: int = 4, searcher_id: str = "s1") -> LeaseReply:
    return client.lease(LeaseRequest(searcher_id=searcher_id, max_leases=max_leases))


def fulfil(client: BufferClient, lease: Lease, num: int | None = None, searcher_id: str = "s1") -> None:
    client.push(
        [
            encode_rollout(make_rollout(lease.prompt.prompt_id, visit_id=lease.visit_id, searcher_id=searcher_id))
            for _ in range(lease.num_rollouts if num is None else num)
        ]
    )


def request_eval(client: BufferClient, lineage: LineageReply, version: str = "0-0", num_prompts: int = 3) -> EvalReply:
    """Request an evaluation of a version; with the recipe of `make_recipe` it takes two samples per prompt."""
    return client.request_eval(EvalRequest(version=version, token=lineage.token, num_prompts=num_prompts))


def draw(client: BufferClient, lineage: LineageReply, step: int = 1, wait_s: float = 0.0) -> Batch:
    request = {"lineage": lineage.lineage, "step": step, "token": lineage.token, "wait_s": wait_s}
    return client.draw_batch(BatchRequest(trainer_id="t", **request))


def wait_of(client: BufferClient, lineage: LineageReply, step: int = 1, wait_s: float = 0.0) -> str:
    """What the draw of a step waits for."""
    with pytest.raises(BusyError) as caught:
        draw(client, lineage, step, wait_s)
    return caught.value.wait


def make_step(client: BufferClient, lineage: LineageReply, step: int = 1, **fields: Any) -> Batch:
    """Draw the batch of a step and ack it; `fields` are more fields of the ack. Return the batch."""
    batch = draw(client, lineage, step, wait_s=2.0)
    client.ack(batch.batch_id, AckRequest(lineage=lineage.lineage, step=step, token=lineage.token, **fields))
    return batch

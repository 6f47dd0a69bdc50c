"""Draw the batch of an optimizer step.

    read     run, counts and an index that is caught up with the log (run/state.py)
    wait     the reason to wait, if there is one (run/state.py)
    draw     slots by MOP, from the index, seeded (mop.py)
    record   draw.lua checks: active token, run running, no open batch for this step, limits of flow control. The
             payloads are read in the same round trip

Draws run one at a time, since each takes turns of prompts and uses of rollouts (index/draws.py) that the next one must
know. draw.lua adds the draw to the log, and refuses it if another process has recorded a draw since the read. A second
request for the same (lineage, step) gets its open batch. A batch past its deadline is void and never returned again. A
draw that must wait holds the request (a named wait in GET /v1/run) until `wait_s`, then answers 429. Everything that
may end a wait notifies `context.changed`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from tba.api import BatchRequest
from tba.errors import BusyError, ConflictError, FencedError, RunFailedError, RunOverError, UnavailableError
from tba.versions import PolicyVersion
from tba.wire import new_id
from tba_buffer.index.log import Drawn
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.rollouts.failures import FailureReader
from tba_buffer.rollouts.lost_payloads import lost_payload_error
from tba_buffer.run.components import Components
from tba_buffer.run.lineage import fenced, rollback_waits
from tba_buffer.run.state import FlowSettings, RunSnapshot, RunStateReader, draw_limits, sampling_wait
from tba_buffer.sampling.ledger import BatchRecord, GroupRecord, decode_record
from tba_buffer.sampling.mop import draw_slots, drawn_event
from tba_buffer.storage.context import Context, RunHash, needed
from tba_buffer.storage.redis_client import redis_errors

POLL_S = 0.5
RETRY_S = 0.25
RECORD_KEPT_S = 60.0
REDRAWS = 5
WAIT_SENTENCES = {
    "rollouts": "not enough scored rollouts are stored yet (sampling.min_size_to_sample)",
    "used-up": "too many of the stored rollouts were in sampling.max_uses batches, and fresh ones are awaited",
    "recent": "too few recent rollouts are stored for a batch (sampling.recent_shortage)",
    "samples-per-insert": "training is ahead of generation (sampling.samples_per_insert)",
    "alternate-generate": "this is the generating phase (sampling.alternate)",
    "run-paused": "the run is paused; resume it with `tba resume`",
    "eviction": "the drawn rollouts were evicted meanwhile",
    "overtaken": "other draws were recorded first",
    "void-batch": "the batch that was open for this step is void",
}


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """An encoded batch, and the counts of `BatchRecord.slots`; {} when an open batch is returned again."""

    body: bytes
    slots: dict[str, int]


class BatchDrawer:
    """Draws batches.

    Args:
        context: Redis and settings.
        catalog: gives the ids of prompts.
        run_state: reads the run and its index.
        components: show the wait of a held request.
        failures: counts the scores that failed, for the trainer's metrics.
    """

    def __init__(
        self,
        context: Context,
        *,
        catalog: Catalog,
        run_state: RunStateReader,
        components: Components,
        failures: FailureReader,
    ) -> None:
        self._context = context
        self._catalog = catalog
        self._drawing = asyncio.Lock()
        self._run_state = run_state
        self._components = components
        self._failures = failures
        self._flow = FlowSettings.of(context.recipe)
        self._deadline_s = context.recipe.buffer.batch_deadline_s

    async def draw(self, request: BatchRequest) -> DrawnBatch:
        """Return the batch for optimizer step `request.step`, waiting up to `wait_s`.

        Raises:
            BusyError: no batch can be drawn yet; `wait` names the reason.
            RunOverError: the run is stopping, done or failed.
            FencedError: a newer lineage owns the run.
            RollbackError: an operator has asked for a rollback.
            ConflictError: the step is acked already.
            UnavailableError: Redis did not answer, or has lost payloads.
        """
        context, owner = self._context, request.trainer_id
        deadline_s = time.monotonic() + request.wait_s  # the wall clock may jump
        with ExitStack() as held_waits:
            held = None
            while True:
                changed = context.changed.ticket  # before the attempt: a change during it ends the wait at once
                try:
                    async with self._drawing:
                        return await self._attempt(request)
                except BusyError as busy:
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        raise
                    if held is None or held.name != busy.wait:
                        held_waits.close()
                        held = held_waits.enter_context(
                            self._components.waiting(owner, busy.wait, deadline_s, kind="trainer")
                        )
                    await context.changed.wait(changed, min(left_s, POLL_S))

    async def _attempt(self, request: BatchRequest) -> DrawnBatch:
        drawn: DrawnBatch | str | UnavailableError = "eviction"
        for _ in range(REDRAWS):
            # a fresh read each time: the run may change between the read and draw.lua
            snapshot = await self._run_state.read()
            if snapshot.token != request.token or snapshot.lineage != request.lineage:
                raise _fenced(request)
            # before the state: a paused run rolls back too, and stays paused
            if snapshot.rollback is not None:
                raise rollback_waits(f"the draw for step {request.step}", snapshot.rollback)
            if snapshot.state != "running":
                raise _no_batches(snapshot.state)
            wait = sampling_wait(snapshot.counts, self._flow)
            if wait is None:
                drawn = await self._draw_new(request, snapshot)
            else:
                # a trainer whose reply was lost gets its batch although a new one would have to wait
                open_steps, step = self._context.keys.open_steps, f"{request.lineage}|{request.step}"
                with redis_errors("look for an open batch"):
                    member = await self._context.redis.hget(open_steps, step)
                if member is None:
                    raise _busy(wait)
                drawn = await self._return_open(member)
            if isinstance(drawn, DrawnBatch):
                return drawn
        raise drawn if isinstance(drawn, UnavailableError) else _busy(drawn)

    async def _draw_new(self, request: BatchRequest, snapshot: RunSnapshot) -> DrawnBatch | str | UnavailableError:
        """Draw and record a new batch.

        Returns:
            The new batch, or the open one of this step. Neither, if the run has changed since it was read: then the
            name of a wait, or the error for lost payloads, to raise if further attempts fail too.
        """
        keys, now = self._context.keys, self._context.clock()
        try:
            record, positions, event = self._slots(request, snapshot, now + self._deadline_s)
        except ValueError:  # evictions since the counts were read: no prompt can fill a slot any more
            return "rollouts"
        limits, slots = draw_limits(snapshot.counts, self._flow), record.slots()
        (outcome, *rest), payloads = await self._context.scripts.run_with(
            "draw",
            {
                "token": request.token,
                "lineage": request.lineage,
                "step": request.step,
                "batch_id": record.batch_id,
                "member": record.member,
                "deadline_s": record.deadline_s,
                "min_deadline_s": now + self._deadline_s / 2,
                "record": msgspec.msgpack.encode(record),
                "kept_ms": round((self._deadline_s + RECORD_KEPT_S) * 1000),
                "num_rollouts": record.num_rollouts,
                "log_position": record.log_position,
                "event": event.pack(),
                "slots": slots,
                "max_drawn": limits.max_drawn,
                "max_batches": limits.max_batches,
                "publications": limits.publications,
            },
            commands=[("HMGET", keys.payloads, *record.rollout_ids)],
        )
        match outcome:
            case b"ok" if None not in payloads:
                self._context.leasable.notify()  # there is room for more visits
                return DrawnBatch(record.body(payloads, await self._failures.reasons()), slots)
            case b"ok":  # payloads were evicted since the index was read, or are lost
                await self._run_state.void(record.member)
                return lost_payload_error((await self._run_state.read()).index, positions, payloads) or "eviction"
            case b"stale":
                return "overtaken"
            case b"open":
                return await self._return_open(rest[0])
            case b"fenced":
                raise _fenced(request)
            case b"state":
                raise _no_batches(RunHash(self._context, {b"state": rest[0]}).state)
            case b"acked":
                raise ConflictError(
                    f"no batch for step {request.step}: lineage {request.lineage} has acked its steps up to "
                    f"{int(rest[0])}"
                )
        return "alternate-generate" if self._flow.alternate else "samples-per-insert"  # b"flow"

    def _slots(
        self, request: BatchRequest, snapshot: RunSnapshot, deadline_s: float
    ) -> tuple[BatchRecord, NDArray[np.integer], Drawn]:
        """Draw a batch. Return its record, the log positions of its rollouts [num_rollouts], and its event for the log.

        Raises:
            ValueError: no prompt can fill a slot.
        """
        seed, index = secrets.randbits(63), snapshot.index
        settings = snapshot.settings.recipe.sampling
        slots = draw_slots(index, settings, seed)
        rows = np.concatenate([slot.rows for slot in slots])
        rollout_ids = iter(index.rollout_ids(rows))
        record = BatchRecord(
            batch_id=new_id("batch"),
            lineage=request.lineage,
            step=request.step,
            seed=seed,
            log_position=index.position,
            deadline_s=deadline_s,
            groups=[
                GroupRecord(
                    prompt_id=self._catalog.ids[slot.prompt],
                    source=slot.source,
                    fallback=slot.fallback,
                    rollout_ids=b"".join(islice(rollout_ids, len(slot.rows))),
                )
                for slot in slots
            ],
            most_on_policy_prob=settings.most_on_policy_prob,
            num_tokens=int(index.column("num_tokens", rows).sum(dtype="int64")),
        )
        event = drawn_event(index, slots, record.batch_id, PolicyVersion(request.lineage, request.step))
        return record, index.column("position", rows), event

    async def _return_open(self, member: bytes) -> DrawnBatch | str:
        """Return the open batch as drawn. If its deadline is near or payloads are gone, void it; return the wait."""
        # with less than half of it left the deadline is near: void the batch rather than return it once more
        keys, min_deadline_s = self._context.keys, self._context.clock() + self._deadline_s / 2
        wait = "void-batch"
        with redis_errors("read a batch"):
            batch_id = member.partition(b"|")[0].decode(errors="replace")
            raw = await self._context.redis.get(keys.batch(batch_id))
            record = raw and needed(keys.batch(batch_id), "batch", lambda: decode_record(raw))
            if record and record.deadline_s >= min_deadline_s:
                payloads = await self._context.redis.hmget(keys.payloads, record.rollout_ids)
                if None not in payloads:
                    return DrawnBatch(record.body(payloads, await self._failures.reasons()), {})
                wait = "eviction"
        await self._run_state.void(member)
        return wait


def _no_batches(state: str) -> BusyError | RunOverError:
    if state == "paused":
        return _busy("run-paused")
    if state == "failed":
        return RunFailedError("the run has failed: no new batches; GET /v1/run (`tba status`) says why")
    return RunOverError(f"the run {'was stopped' if state == 'stopping' else f'is {state}'}: no new batches")


def _busy(wait: str) -> BusyError:
    return BusyError(f"no batch now: {WAIT_SENTENCES[wait]}", retry_after_s=RETRY_S, wait=wait)


def _fenced(request: BatchRequest) -> FencedError:
    return fenced(f"the draw for step {request.step} of lineage {request.lineage}")

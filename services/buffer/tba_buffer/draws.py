"""Drawing batches.

    look     run, counts and a level index (glance.py, shared by draws at once)  ->  the wait, if any (flow.py)
    draw     slots by MOP, from the index, seeded (sampler.py)
    record   draw.lua: living token, run running, no open batch for this step, limits of flow control; and the payloads,
             in the same round trip

Draws of different steps run at once; draw.lua decides between those that cannot all be. A second request for the same
(lineage, step) is answered with the batch that is open for it. A batch past its deadline is void and never answered
again. A draw that must wait holds the request (a named wait in GET /v1/run) until `wait_s`, then answers 429; whatever
may end a wait notifies `context.changed`.
"""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tba.api import BatchRequest
from tba.errors import BusyError, ConflictError, FencedError, RunFailedError, RunOverError, UnavailableError
from tba.wire import new_id
from tba_buffer.batch_record import BatchRecord, GroupRecord
from tba_buffer.components import Components
from tba_buffer.context import Context
from tba_buffer.flow import DrawLimits, FlowSettings, draw_limits, sampling_wait
from tba_buffer.glance import Glance, Glances
from tba_buffer.lineage import fenced
from tba_buffer.lost_payloads import lost_error
from tba_buffer.prompts import Catalog
from tba_buffer.redis_link import redis_errors
from tba_buffer.run_state import read_state
from tba_buffer.sampler import DrawSettings, draw_slots
from tba_buffer.scoring import Scoring

POLL_S = 0.5
RETRY_S = 0.25
RECORD_KEPT_S = 60.0
REDRAWS = 5
WAIT_SENTENCES = {
    "rollouts": "not enough scored rollouts are stored yet (sampling.min_size_to_sample)",
    "samples-per-insert": "training is ahead of generation (sampling.samples_per_insert)",
    "alternate-generate": "this is the generating phase (sampling.alternate)",
    "run-paused": "the run is paused; resume it with `tba resume`",
    "eviction": "the drawn rollouts were evicted meanwhile, or could not be read",
    "void-batch": "the batch that was open for this step is void",
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """An encoded batch and how many slots of each kind it has; none when it is answered again."""

    body: bytes
    slots: dict[str, int]


class Draws:
    """Draws batches.

    Args:
        context: Redis and settings.
        catalog: names the prompts.
        glances: the run and its index.
        components: where held waits are shown.
        scoring: fails what cannot be read.
    """

    def __init__(
        self, context: Context, *, catalog: Catalog, glances: Glances, components: Components, scoring: Scoring
    ) -> None:
        self._context = context
        self._catalog = catalog
        self._glances = glances
        self._components = components
        self._scoring = scoring
        self._flow = FlowSettings.of(context.recipe)
        self._deadline_s = context.recipe.buffer.batch_deadline_s

    async def draw(self, request: BatchRequest) -> Drawn:
        """The batch for optimizer step `request.step`, waiting up to `wait_s`.

        Raises:
            BusyError: none can be drawn yet; `wait` names what is waited for.
            RunOverError: the run is stopping, done or failed.
            FencedError: a newer lineage owns the run.
            ConflictError: the step is acked already.
            UnavailableError: Redis did not answer, or has lost payloads.
        """
        context, owner = self._context, request.trainer_id
        deadline_s = time.monotonic() + request.wait_s  # the wall clock may jump
        with ExitStack() as held_waits:
            held = None
            while True:
                changed = context.changed.ticket()
                try:
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

    async def _attempt(self, request: BatchRequest) -> Drawn:
        drawn: Drawn | str | UnavailableError = "eviction"
        for _ in range(REDRAWS):
            glance = await self._glances.read()
            if glance.token != request.token or glance.lineage != request.lineage:
                raise _fenced(request)
            if glance.state != "running":
                raise _no_batches(glance.state)
            wait = sampling_wait(glance.counts, self._flow)
            if wait is None:
                drawn = await self._draw_anew(request, glance)
            elif (member := await self._open_member(request)) is not None:
                drawn = await self._answer_again(member)
            else:
                raise _busy(wait)
            if isinstance(drawn, Drawn):
                return drawn
        raise drawn if isinstance(drawn, UnavailableError) else _busy(drawn)

    async def _draw_anew(self, request: BatchRequest, glance: Glance) -> Drawn | str | UnavailableError:
        """A new batch, or the one that is open for this step; or, when the run has moved on since the glance, the name
        of the wait that this comes to if it goes on; or the error that it comes to, when payloads are lost."""
        keys, now = self._context.keys, self._context.clock()
        try:
            record, positions = self._slots(request, glance, now + self._deadline_s)
        except ValueError:  # no prompt can fill a slot any more
            return "rollouts"
        limits, slots = draw_limits(glance.counts, self._flow), record.slots()
        (verdict, *rest), payloads = await self._context.scripts.run_with(
            "draw",
            [
                keys.run,
                keys.counters,
                keys.open_batches,
                keys.batch(record.batch_id),
                keys.batches_since_mark,
                keys.open_steps,
                keys.settings,
                keys.settings_changes,
                keys.settings_effects,
            ],
            [
                request.token,
                request.lineage,
                request.step,
                record.member,
                record.deadline_s,
                now + self._deadline_s / 2,
                record.encode(),
                round((self._deadline_s + RECORD_KEPT_S) * 1000),
                record.num_rollouts,
                *_limit_args(limits),
                glance.live.revision,
                now,
                *(part for pair in slots.items() for part in pair),
            ],
            ("HMGET", keys.payloads, *record.rollout_ids),
        )
        match verdict:
            case b"ok" if None not in payloads:
                if await self._scoring.fail_unreadable(positions, payloads):
                    await self._glances.void(record.member)
                    return "eviction"
                return Drawn(record.body(payloads), slots)
            case b"ok":  # evicted since
                await self._glances.void(record.member)
                return lost_error((await self._glances.read()).index, positions, payloads) or "eviction"
            case b"open":
                return await self._answer_again(rest[0])
            case b"fenced":
                raise _fenced(request)
            case b"state":
                raise _no_batches(read_state(self._context, rest[0]))
            case b"acked":
                raise ConflictError(
                    f"no batch for step {request.step}: lineage {request.lineage} has acked its steps up to "
                    f"{int(rest[0])}"
                )
        return "alternate-generate" if self._flow.alternate else "samples-per-insert"  # b"flow"

    def _slots(
        self, request: BatchRequest, glance: Glance, deadline_s: float
    ) -> tuple[BatchRecord, NDArray[np.integer]]:
        """A batch of slots drawn now, and the log positions of its rollouts [num_rollouts].

        Raises:
            ValueError: no prompt can fill a slot.
        """
        seed, index = secrets.randbits(63), glance.index
        settings = DrawSettings.of(glance.live.recipe, step=request.step)
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
        )
        return record, index.column("position", rows)

    async def _open_member(self, request: BatchRequest) -> bytes | None:
        """The batch that is open for this step, as a member of `open_batches`."""
        with redis_errors("look for an open batch"):
            return await self._context.redis.hget(self._context.keys.open_steps, f"{request.lineage}|{request.step}")

    async def _answer_again(self, member: bytes) -> Drawn | str:
        """The open batch as it was drawn; a wait's name, and it is void, when it cannot be answered any more."""
        keys, worth_s = self._context.keys, self._context.clock() + self._deadline_s / 2
        lost = "void-batch"  # its deadline is near, or past
        with redis_errors("read a batch"):
            batch_id = member.partition(b"|")[0].decode(errors="replace")
            raw = await self._context.redis.get(keys.batch(batch_id))
            record = raw and self._context.read_or_note("batch", batch_id, lambda: BatchRecord.decode(raw))
            if record and record.deadline_s >= worth_s:
                payloads = await self._context.redis.hmget(keys.payloads, record.rollout_ids)
                if None not in payloads:
                    return Drawn(record.body(payloads), {})
                lost = "eviction"
        await self._glances.void(member)
        return lost


def _limit_args(limits: DrawLimits) -> list[int | str]:
    return ["" if limit is None else limit for limit in (limits.max_drawn, limits.max_batches, limits.marks)]


def _no_batches(state: str) -> BusyError | RunOverError:
    if state == "paused":
        return _busy("run-paused")
    if state == "failed":
        return RunFailedError("the run has failed: no new batches; GET /v1/run (`tba status`) says why")
    return RunOverError(f"the run is {state}: no new batches")


def _busy(wait: str) -> BusyError:
    return BusyError(f"no batch now: {WAIT_SENTENCES[wait]}", retry_after_s=RETRY_S, wait=wait)


def _fenced(request: BatchRequest) -> FencedError:
    return fenced(f"the draw for step {request.step} of lineage {request.lineage}")

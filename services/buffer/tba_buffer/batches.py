"""Drawing and acking batches.

    draw:  the wait, if any (flow.py)  ->  level index  ->  slots (sampler.py, seeded)  ->  payloads from Redis
           ->  draw.lua: living token, run running, record with deadline, counters  ->  the batch
    ack:   ack.lua: living token, open batch of this (lineage, step), next step of the lineage  ->  ledger line

A draw waits for searchers (the named wait of flow.py) until `wait_s`, then answers 429; everything that may end the
wait notifies `context.changed`. Drawing is serial: a second request for the same (lineage, step) is answered with the
batch that is open for it. A batch past its deadline is void and never answered again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgpack

from tba.api import AckRequest, BatchRequest
from tba.errors import BadRequestError, BusyError, ConflictError, RunOverError, VoidBatchError
from tba.wire import DrawnGroup, encode_batch, new_id
from tba_buffer.components import Components
from tba_buffer.context import Context
from tba_buffer.flow import FlowSettings, sampling_wait
from tba_buffer.flow_counts import read_flow_counts
from tba_buffer.index import Index
from tba_buffer.lineage import fenced
from tba_buffer.prompts import Catalog
from tba_buffer.redis_link import redis_errors
from tba_buffer.run_state import RunControl
from tba_buffer.sampler import MopSettings, Slot, draw_slots
from tba_buffer.view import IndexView

POLL_S = 0.5
RETRY_S = 0.25
RECORD_KEPT_S = 60.0
REDRAWS = 5
WAIT_SENTENCES = {
    "rollouts": "not enough scored rollouts are stored yet (sampling.min_size_to_sample)",
    "samples-per-insert": "training is ahead of generation (sampling.samples_per_insert)",
    "alternate-generate": "this is the generating phase (sampling.alternate)",
    "run-paused": "the run is paused; resume it with `tba resume`",
    "eviction": "the drawn rollouts were evicted meanwhile",
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """An encoded batch and how many slots of each kind it has; none when it is answered again."""

    body: bytes
    slots: dict[str, int]


class Batches:
    """Draws and acks.

    Args:
        context: Redis and settings.
        catalog: names the prompts.
        run: the state of the run.
        view: the index.
        components: where held waits are shown.
    """

    def __init__(
        self, context: Context, *, catalog: Catalog, run: RunControl, view: IndexView, components: Components
    ) -> None:
        self._context = context
        self._catalog = catalog
        self._run = run
        self._view = view
        self._components = components
        self._lock = asyncio.Lock()
        self._flow = FlowSettings.of(context.recipe)
        sampling = context.recipe.sampling
        self._mop = MopSettings(
            prompts_per_batch=sampling.prompts_per_batch,
            group_size=sampling.group_size,
            most_on_policy_prob=sampling.most_on_policy_prob,
            reward_inverse_temperature=sampling.reward_inverse_temperature,
            uniform_share=sampling.uniform_share,
        )

    async def draw(self, request: BatchRequest) -> Drawn:
        """The batch for optimizer step `request.step`, waiting up to `wait_s`.

        Raises:
            BusyError: none can be drawn yet; `wait` names what is waited for.
            RunOverError: the run is stopping, done or failed.
            FencedError: a newer lineage owns the run.
            UnavailableError: Redis did not answer.
        """
        clock, deadline = self._context.clock, self._context.clock() + request.wait_s
        with self._components.waiting(request.trainer_id, "batch", deadline) as held:
            while True:
                changed = self._context.changed.ticket()
                try:
                    async with self._lock:
                        return await self._attempt(request)
                except BusyError as busy:
                    held.name = busy.wait
                    left_s = deadline - clock()
                    if left_s <= 0:
                        raise
                    await self._context.changed.wait(changed, min(left_s, POLL_S))

    async def ack(self, batch_id: str, request: AckRequest) -> None:
        """Put the batch into the ledger as consumed by step (lineage, step); repeating it changes nothing.

        Raises:
            FencedError: a newer lineage owns the run.
            VoidBatchError: the batch is unknown, past its deadline, or was drawn for another step.
            ConflictError: the step has acked another batch, or a step was left out.
            BadRequestError: the number of policy ages is not the number of rollouts.
            UnavailableError: Redis did not answer.
        """
        keys, now = self._context.keys, self._context.clock()
        with redis_errors("read a batch"):
            raw = await self._context.redis.get(keys.batch(batch_id))
        record = None if raw is None else msgpack.unpackb(raw)
        rollout_ids: list[str] = [] if record is None else [rid.hex() for g in record["groups"] for rid in g["ids"]]
        if record is not None and request.policy_ages and len(request.policy_ages) != len(rollout_ids):
            raise BadRequestError(
                f"batch {batch_id} has {len(rollout_ids)} rollouts, the ack has {len(request.policy_ages)} policy ages"
            )
        line = {
            "lineage": request.lineage,
            "step": request.step,
            "batch_id": batch_id,
            "acked_at_s": now,
            "num_rollouts": len(rollout_ids),
            "rollout_ids": rollout_ids,
            "metrics": request.metrics,
        }
        ages = Counter(max(0, age) for age in request.policy_ages)
        member = _member(batch_id, len(rollout_ids), request.lineage, request.step)
        reply = await self._context.scripts.run(
            "ack",
            [
                keys.run,
                keys.counters,
                keys.open_batches,
                keys.ledger,
                keys.ledger_steps,
                keys.ages,
                keys.batch(batch_id),
            ],
            [
                request.token,
                request.lineage,
                request.step,
                batch_id,
                now,
                member,
                json.dumps(line),
                len(rollout_ids),
                *(part for pair in sorted(ages.items()) for part in pair),
            ],
        )
        _check_ack(reply, batch_id, request)
        self._context.changed.notify()

    async def _attempt(self, request: BatchRequest) -> Drawn:
        fields = await self._run.read()
        if fields.token != request.token or fields.lineage != request.lineage:
            raise fenced(f"the draw for step {request.step} of lineage {request.lineage}")
        self._check_state(fields.state)
        again = await self._open_batch(request)
        if again is not None:
            return again
        for _ in range(REDRAWS):
            index = await self._view.level()
            wait = sampling_wait(await read_flow_counts(self._context, index), self._flow)
            if wait is not None:
                raise _busy(wait)
            seed, position = secrets.randbits(63), index.position
            slots = self._slots(index, seed)
            groups = [(slot, index.rollout_ids(slot.rows)) for slot in slots]
            prompts = [self._catalog.ids[slot.prompt] for slot in slots]
            payloads = await self._payloads([rid for _, ids in groups for rid in ids])
            if payloads is not None:
                record = {
                    "batch_id": new_id("batch"),
                    "lineage": request.lineage,
                    "step": request.step,
                    "seed": seed,
                    "log_position": position,
                    "deadline_s": self._context.clock() + self._context.recipe.buffer.batch_deadline_s,
                    "groups": [
                        {"prompt_id": prompt, "source": slot.source, "fallback": slot.fallback, "ids": ids}
                        for prompt, (slot, ids) in zip(prompts, groups, strict=True)
                    ],
                }
                return await self._commit(request, record, payloads, _slot_counts(slots))
        raise _busy("eviction")

    def _slots(self, index: Index, seed: int) -> list[Slot]:
        sampling = self._context.recipe.sampling
        recent_rows, recent_prompts = index.recent_rows(sampling.recent_window, sampling.recent_versions)
        return draw_slots(index, recent_rows, recent_prompts, self._mop, seed)

    async def _commit(
        self, request: BatchRequest, record: dict[str, Any], payloads: list[bytes], slots: dict[str, int]
    ) -> Drawn:
        keys, lifetime_s = self._context.keys, self._context.recipe.buffer.batch_deadline_s + RECORD_KEPT_S
        batch_id = record["batch_id"]
        reply = await self._context.scripts.run(
            "draw",
            [keys.run, keys.counters, keys.open_batches, keys.batch(batch_id), keys.batches_since_mark],
            [
                request.token,
                record["deadline_s"],
                msgpack.packb(record),
                round(lifetime_s * 1000),
                _member(batch_id, len(payloads), request.lineage, request.step),
                len(payloads),
                *(part for pair in slots.items() for part in pair),
            ],
        )
        if reply == b"fenced":
            raise fenced(f"the draw for step {request.step} of lineage {request.lineage}")
        if reply != b"ok":
            self._check_state(reply.decode())
        return Drawn(_encode(record, payloads), slots)

    async def _open_batch(self, request: BatchRequest) -> Drawn | None:
        """The batch that is open for this step, if a request for it is repeated."""
        keys, now = self._context.keys, self._context.clock()
        suffix = f"|{request.lineage}|{request.step}"
        worth_s = now + self._context.recipe.buffer.batch_deadline_s / 2
        void_keys = [keys.open_batches, keys.counters, keys.batches_since_mark]
        member = await self._context.scripts.run("void", void_keys, [now, suffix, worth_s])
        if not member:
            return None
        with redis_errors("read a batch"):
            raw = await self._context.redis.get(keys.batch(member.decode().split("|")[0]))
        record = None if raw is None else msgpack.unpackb(raw)
        payloads = None if record is None else await self._payloads([r for g in record["groups"] for r in g["ids"]])
        if record is None or payloads is None:  # its rollouts are evicted: void it, and draw anew
            never_s = record["deadline_s"] + 1 if record else 1e15
            await self._context.scripts.run("void", void_keys, [now, suffix, never_s])
            return None
        return Drawn(_encode(record, payloads), {})

    async def _payloads(self, rollout_ids: list[bytes]) -> list[bytes] | None:
        """The stored bytes in order, or None if one was evicted since it was drawn."""
        with redis_errors("read rollouts"):
            payloads = await self._context.redis.hmget(self._context.keys.payloads, rollout_ids)
        return None if any(payload is None for payload in payloads) else payloads

    @staticmethod
    def _check_state(state: str) -> None:
        if state == "paused":
            raise _busy("run-paused")
        if state != "running":
            raise RunOverError(f"the run is {state}: no new batches")


def _member(batch_id: str, num_rollouts: int, lineage: int, step: int) -> str:
    return f"{batch_id}|{num_rollouts}|{lineage}|{step}"


def _busy(wait: str) -> BusyError:
    return BusyError(f"no batch now: {WAIT_SENTENCES[wait]}", retry_after_s=RETRY_S, wait=wait)


def _slot_counts(slots: list[Slot]) -> dict[str, int]:
    return {
        "total": len(slots),
        "recent": sum(slot.source == "recent" for slot in slots),
        "replay": sum(slot.source == "replay" for slot in slots),
        "fallback": sum(slot.fallback for slot in slots),
        "rollouts": sum(len(slot.rows) for slot in slots),
        "distinct_rollouts": sum(slot.num_distinct for slot in slots),
    }


def _encode(record: dict[str, Any], payloads: list[bytes]) -> bytes:
    left = iter(payloads)
    groups = [
        DrawnGroup(
            prompt_id=group["prompt_id"],
            source=group["source"],
            fallback=group["fallback"],
            payloads=[next(left) for _ in group["ids"]],
        )
        for group in record["groups"]
    ]
    return encode_batch(
        batch_id=record["batch_id"],
        deadline_s=record["deadline_s"],
        seed=record["seed"],
        log_position=record["log_position"],
        groups=groups,
    )


def _check_ack(reply: list[bytes], batch_id: str, request: AckRequest) -> None:
    match reply[0]:
        case b"ok":
            return
        case b"fenced":
            raise fenced(f"the ack of batch {batch_id} by step {request.step} of lineage {request.lineage}")
        case b"other":
            raise ConflictError(
                f"step {request.step} of lineage {request.lineage} has acked batch {reply[1].decode()} already; "
                f"batch {batch_id} was not added to the ledger"
            )
        case b"order":
            raise ConflictError(
                f"step {request.step} cannot be acked: the last acked step of lineage {request.lineage} is "
                f"{int(reply[1])}, and steps are acked in order"
            )
    raise VoidBatchError(
        f"batch {batch_id} is unknown, past its deadline, or was drawn for another step than {request.step}; "
        "draw a new one for this step"
    )

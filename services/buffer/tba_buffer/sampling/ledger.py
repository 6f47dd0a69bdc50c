"""Drawn batches in Redis, and the ledger: which step consumed which batch.

A BatchRecord is kept until some time after its deadline. It holds the ids of the rollouts; their stored bytes are put
on the wire as they are, and never encoded again.

The ledger is an append-only list of two kinds of lines, in the order of events.

    batch    step (lineage, step) consumed this batch (written by ack.lua)
    resume   a trainer started: its new lineage, and the version that it continues from (written by start_lineage.lua)

Lines are never changed. A resume has abandoned the batch lines outside the history of the active lineage, which follows
from the parents of lineages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from tba.api import AckRequest, FailedReason, LedgerEntry, LedgerLine, LedgerReply, ResumeEntry
from tba.errors import BadRequestError, ConflictError, VoidBatchError
from tba.versions import PolicyVersion
from tba.wire import Batch, Group, encode_batch
from tba.wire.batch import Source
from tba_buffer.eviction.evictor import Evictor
from tba_buffer.rollouts.trained_steps import MAX_TRAINED_STEPS, encode_trained
from tba_buffer.run.lineage import Lineages, fenced, rollback_waits
from tba_buffer.scoring.rollout_scorer import RolloutScorer
from tba_buffer.storage.context import Context, RunHash, needed
from tba_buffer.storage.redis_client import redis_errors

MAX_ENTRIES_PER_PAGE = 10_000
ID_BYTES = 16


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """One slot: its prompt, the pool that it drew from, and its rollout ids (16 bytes each), concatenated."""

    prompt_id: str
    source: Source
    fallback: bool
    rollout_ids: bytes


class BatchRecord(msgspec.Struct, frozen=True, array_like=True):
    """A drawn batch without its payloads. `seed`, `log_position` and `most_on_policy_prob` reproduce the draw."""

    # array_like: the order of the fields is the stored format, so new ones come last and have a default
    batch_id: str
    lineage: int
    step: int
    seed: int
    log_position: int
    deadline_s: float
    groups: list[GroupRecord]
    most_on_policy_prob: float
    num_tokens: int
    """Response tokens of all rollouts; repeated ones count as often as they occur."""

    @property
    def rollout_ids(self) -> list[bytes]:
        """The ids of all rollouts, group after group."""
        return _split(b"".join(group.rollout_ids for group in self.groups))

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts; repeated ones count as often as they occur."""
        return sum(len(group.rollout_ids) for group in self.groups) // ID_BYTES

    @property
    def member(self) -> str:
        """The text that stands for the batch in the Redis set `open_batches`."""
        return batch_member(self.batch_id, self.num_rollouts, self.lineage, self.step)

    def slots(self) -> dict[str, int]:
        """Count the slots of each kind, the rollouts, and the rollouts that are distinct within their slot."""
        ids = [_split(group.rollout_ids) for group in self.groups]
        return {
            "total": len(self.groups),
            "recent": sum(group.source == "recent" for group in self.groups),
            "replay": sum(group.source == "replay" for group in self.groups),
            "fallback": sum(group.fallback for group in self.groups),
            "rollouts": sum(map(len, ids)),
            "distinct_rollouts": sum(len(set(group)) for group in ids),
        }

    def body(self, payloads: Sequence[bytes], failed: Sequence[FailedReason]) -> bytes:
        """Encode the batch for the wire, from the stored bytes of its rollouts [num_rollouts]."""
        # payloads are in the order of `rollout_ids`: group after group
        # one without its id is damaged: it goes out empty, the trainer names its place, and `fail_damaged` finds it
        pairs = zip(self.rollout_ids, payloads, strict=True)
        left = iter([payload if rollout_id in payload else b"" for rollout_id, payload in pairs])
        groups = tuple(
            Group(each.prompt_id, each.source, each.fallback, tuple(islice(left, len(each.rollout_ids) // ID_BYTES)))
            for each in self.groups
        )
        return encode_batch(
            Batch(
                batch_id=self.batch_id,
                deadline_s=self.deadline_s,
                seed=self.seed,
                log_position=self.log_position,
                groups=groups,
                scores_failed={each.reason: each.num for each in failed},
            )
        )


decode_record = msgspec.msgpack.Decoder(BatchRecord).decode


def batch_member(batch_id: str, num_rollouts: int, lineage: int, step: int) -> str:
    """Return the text that stands for a batch in the Redis set `open_batches`."""
    return f"{batch_id}|{num_rollouts}|{lineage}|{step}"


def _split(rollout_ids: bytes) -> list[bytes]:
    return [rollout_ids[at : at + ID_BYTES] for at in range(0, len(rollout_ids), ID_BYTES)]


class BatchLedger:
    """Acks batches, and reads the ledger.

    Args:
        context: Redis and settings.
        lineages: the lineage table.
        evictor: evicts the rollouts that have become too old, before an ack is answered.
        scorer: stores the rollouts that the trainer could not read as failed.
    """

    def __init__(self, context: Context, lineages: Lineages, evictor: Evictor, scorer: RolloutScorer) -> None:
        self._context = context
        self._lineages = lineages
        self._evictor = evictor
        self._scorer = scorer

    async def ack(self, batch_id: str, request: AckRequest) -> None:
        """Add the batch to the ledger as consumed by step (lineage, step); a repeated request changes nothing.

        Raises:
            FencedError: a newer lineage owns the run.
            RollbackError: an operator has asked for a rollback.
            VoidBatchError: the batch is unknown, past its deadline, or was drawn for another step.
            ConflictError: the step has acked another batch, or a step was left out.
            BadRequestError: counts in the ack do not fit the batch, or it names rollouts that are not in the batch.
            UnavailableError: Redis did not answer, or answered with an error.
        """
        keys, now = self._context.keys, self._context.clock()
        with redis_errors("read a batch"):
            raw = await self._context.redis.get(keys.batch(batch_id))
        record = raw and needed(keys.batch(batch_id), "batch", lambda: decode_record(raw))
        num_rollouts = 0 if record is None else record.num_rollouts
        if record is not None:
            _check_counts(record, request)
            if request.unreadable:
                # before the ack, which may be repeated without the record
                await self._scorer.fail_damaged(record.rollout_ids[place] for place in request.unreadable)
        num_trained = 0 if request.skipped else num_rollouts - sum(request.refused.values())
        # the histogram of policy ages is about what was trained on, and a skipped step trained on nothing
        ages = Counter(max(0, age) for age in request.policy_ages if not request.skipped)
        counters = {f"trainer_refused:{reason}": number for reason, number in request.refused.items()}
        if request.skipped:
            counters[f"skipped:{request.skipped}"] = 1
        elif request.num_tokens:
            counters["tokens:trained"] = request.num_tokens
        # without a record the script finds that the batch was acked already, or is void, and uses no line
        line = {} if record is None else batch_line(record, request, acked_at_s=now)
        reply = await self._context.scripts.run(
            "ack",
            token=request.token,
            lineage=request.lineage,
            step=request.step,
            batch_id=batch_id,
            now_s=now,
            member=batch_member(batch_id, num_rollouts, request.lineage, request.step),
            line=json.dumps(line),
            num_trained=num_trained,
            # without a record the script writes nothing
            trained=b"" if record is None else encode_trained(request, acked_at_s=now),
            num_kept=MAX_TRAINED_STEPS,
            ages=ages,
            counts=counters,
        )
        _check_reply(reply, batch_id, request)
        # the draw for the next step may wait for this ack
        self._context.changed.notify()
        if self._evictor.record_step(PolicyVersion(request.lineage, request.step)):
            await self._evictor.enforce()

    async def read(self, *, after: int, limit: int) -> LedgerReply:
        """Return at most `limit` lines, the first with number `after`, counted from 0. `abandoned` is computed here.

        Raises:
            UnavailableError: Redis did not answer, or answered with an error.
        """
        context, limit = self._context, min(limit, MAX_ENTRIES_PER_PAGE)
        with redis_errors("read the ledger"):
            # one transaction: the lineage decides which of these lines are abandoned
            async with context.redis.pipeline(transaction=True) as pipe:
                pipe.lrange(context.keys.ledger, after, after + limit - 1)
                pipe.llen(context.keys.ledger)
                pipe.hgetall(context.keys.run)
                lines, num_lines, run = await pipe.execute()
        history = self._lineages.history(RunHash(context, run).lineage)
        entries = [
            needed(context.keys.ledger, f"line {number}", lambda line=line: _entry(line, history))
            for number, line in enumerate(lines, after)
        ]
        end = after + len(lines)
        return LedgerReply(entries=entries, next=end if lines and end < num_lines else None, num_lines=num_lines)


def _check_counts(record: BatchRecord, request: AckRequest) -> None:
    if request.num_tokens > record.num_tokens:
        raise BadRequestError(
            f"the ack of batch {record.batch_id} says {request.num_tokens} trained tokens, and the batch has "
            f"{record.num_tokens} sampled tokens"
        )
    num_rollouts, num_refused, num_ages = record.num_rollouts, sum(request.refused.values()), len(request.policy_ages)
    # policy ages are reported of the trained rollouts only
    if num_refused > num_rollouts or (num_ages and num_ages + num_refused != num_rollouts):
        raise BadRequestError(
            f"batch {record.batch_id} has {num_rollouts} rollouts, the ack has {num_ages} policy ages and "
            f"{num_refused} refused rollouts"
        )
    unreadable = set(request.unreadable)
    if len(unreadable) > num_refused or max(unreadable, default=0) >= max(1, num_rollouts):
        raise BadRequestError(
            f"`unreadable` of the ack of batch {record.batch_id} has {len(unreadable)} places; the batch has "
            f"{num_rollouts} rollouts, of which {num_refused} were refused"
        )
    if num_refused == num_rollouts and not request.skipped:
        raise BadRequestError(
            f"all {num_rollouts} rollouts of batch {record.batch_id} were refused, so its step must be a skipped one"
        )
    if request.trained is None:
        return
    ids = request.trained.rollout_ids
    strangers = set(ids) - {rollout_id.hex() for rollout_id in record.rollout_ids}
    if strangers or len(ids) + num_refused > num_rollouts:
        raise BadRequestError(
            f"`trained` of the ack of batch {record.batch_id} has {len(ids)} rollouts, {len(strangers)} of which are "
            f"not in the batch; the batch has {num_rollouts}, of which {num_refused} were refused"
        )


def _check_reply(reply: list[bytes], batch_id: str, request: AckRequest) -> None:
    match reply[0]:
        case b"ok":
            return
        case b"fenced":
            raise fenced(f"the ack of batch {batch_id} by step {request.step} of lineage {request.lineage}")
        case b"rollback":
            raise rollback_waits(f"the ack of step {request.step}", reply[1])
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


def batch_line(record: BatchRecord, request: AckRequest, *, acked_at_s: float) -> dict[str, Any]:
    """Return the line of an acked batch: a LedgerEntry without `abandoned`."""
    return {
        "kind": "batch",
        "lineage": record.lineage,
        "step": record.step,
        "batch_id": record.batch_id,
        "acked_at_s": acked_at_s,
        "seed": record.seed,
        "log_position": record.log_position,
        "slots": record.slots(),
        "num_rollouts": record.num_rollouts,
        "rollout_ids": [rollout_id.hex() for rollout_id in record.rollout_ids],
        "most_on_policy_prob": record.most_on_policy_prob,
        "settings_revision": request.settings_revision,
        "metrics": request.metrics,
        "skipped": request.skipped,
        "refused": request.refused,
    }


def _entry(line: bytes, history: Mapping[int, int]) -> LedgerLine:
    fields = json.loads(line)
    if fields.get("kind") == "resume":
        return ResumeEntry(**fields)
    return LedgerEntry(**fields, abandoned=fields["step"] > history.get(fields["lineage"], -1))

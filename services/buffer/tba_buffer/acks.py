"""Acking batches: ack.lua checks the living token, the open batch of this (lineage, step), and that it is the next step
of the lineage; then the batch is one line of the ledger (ledger.py)."""

from __future__ import annotations

import json
from collections import Counter

from tba.api import AckRequest
from tba.errors import BadRequestError, ConflictError, VoidBatchError
from tba.versions import PolicyVersion
from tba_buffer.batch_record import BatchRecord, batch_member
from tba_buffer.context import Context
from tba_buffer.evictor import Evictor
from tba_buffer.ledger import batch_line
from tba_buffer.lineage import fenced
from tba_buffer.redis_link import redis_errors


class Acks:
    """Acks batches.

    Args:
        context: Redis and settings.
        evictor: told where the trainer stands; what has become too old is gone before the ack is answered.
    """

    def __init__(self, context: Context, evictor: Evictor) -> None:
        self._context = context
        self._evictor = evictor

    async def ack(self, batch_id: str, request: AckRequest) -> None:
        """Put the batch into the ledger as consumed by step (lineage, step); repeating it changes nothing.

        Raises:
            FencedError: a newer lineage owns the run.
            VoidBatchError: the batch is unknown, past its deadline, or was drawn for another step.
            ConflictError: the step has acked another batch, or a step was left out.
            BadRequestError: the numbers of policy ages and of refused rollouts are not those of the batch.
            UnavailableError: Redis did not answer.
        """
        keys, now = self._context.keys, self._context.clock()
        with redis_errors("read a batch"):
            raw = await self._context.redis.get(keys.batch(batch_id))
        record = raw and self._context.read_or_note("batch", batch_id, lambda: BatchRecord.decode(raw))
        num_rollouts = 0 if record is None else record.num_rollouts
        if record is not None:
            _check_counts(record, request)
        num_trained = 0 if request.skipped else num_rollouts - sum(request.refused.values())
        # what a skipped step drew had no effect: the histogram of policy ages is about what was trained on
        ages = Counter(max(0, age) for age in request.policy_ages if not request.skipped)
        counters = {f"trainer_refused:{reason}": number for reason, number in request.refused.items()}
        if request.skipped:
            counters[f"skipped:{request.skipped}"] = 1
        # without a record the script finds that the batch was acked already, or is void: the line is not used
        line = {} if record is None else batch_line(record, request, acked_at_s=now)
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
                keys.open_steps,
                keys.settings,
                keys.settings_changes,
                keys.settings_effects,
            ],
            [
                request.token,
                request.lineage,
                request.step,
                batch_id,
                now,
                batch_member(batch_id, num_rollouts, request.lineage, request.step),
                json.dumps(line),
                num_trained,
                request.settings_revision,
                len(ages),
                *(part for pair in sorted(ages.items()) for part in pair),
                *(part for pair in sorted(counters.items()) for part in pair),
            ],
        )
        _check_reply(reply, batch_id, request)
        self._context.changed.notify()
        if self._evictor.note_step(PolicyVersion(request.lineage, request.step)):
            await self._evictor.enforce()


def _check_counts(record: BatchRecord, request: AckRequest) -> None:
    num_rollouts, num_refused, num_ages = record.num_rollouts, sum(request.refused.values()), len(request.policy_ages)
    if num_refused > num_rollouts or (num_ages and num_ages + num_refused != num_rollouts):
        raise BadRequestError(
            f"batch {record.batch_id} has {num_rollouts} rollouts, the ack has {num_ages} policy ages and "
            f"{num_refused} refused rollouts"
        )
    if num_refused == num_rollouts and not request.skipped:
        raise BadRequestError(
            f"all {num_rollouts} rollouts of batch {record.batch_id} were refused: its step is one that was skipped"
        )


def _check_reply(reply: list[bytes], batch_id: str, request: AckRequest) -> None:
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

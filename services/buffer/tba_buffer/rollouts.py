"""Push: every item gets its own outcome, the valid ones are stored in one atomic call, then it is acknowledged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tba.api import PushOutcome
from tba.errors import LimitError, SchemaVersionError, UnavailableError, WireError
from tba.versions import START
from tba.wire import Rollout, decode_rollout
from tba_buffer.context import Context
from tba_buffer.lineage import Lineages
from tba_buffer.log import pack_record
from tba_buffer.prompts import Catalog

OUTCOMES = {1: "new", 0: "duplicate", -1: "refused"}
CONFLICT = "conflict: this rollout id is stored with other bytes; every rollout needs its own id"


class Refused(Exception):
    """One item may not be stored; `code` is what it is counted under. Items that cannot be read have no id."""

    def __init__(self, code: str, detail: str, rollout_id: str | None = None) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.rollout_id = rollout_id


class Rollouts:
    """Stores pushes.

    Args:
        context: Redis and settings.
        catalog: the prompts that rollouts may answer.
        lineages: the lineages that may have made them.
    """

    def __init__(self, context: Context, catalog: Catalog, lineages: Lineages) -> None:
        self._context = context
        self._catalog = catalog
        self._lineages = lineages
        self.refuse_reason: str | None = None
        """Why Redis cannot keep what it would acknowledge, while that is so."""

    async def push(self, payloads: Sequence[bytes]) -> list[PushOutcome]:
        """Store the valid items; one outcome per item, in order.

        Raises:
            UnavailableError: Redis could not make them durable; nothing is acknowledged.
        """
        if self.refuse_reason is not None:
            raise UnavailableError(f"nothing is stored now: {self.refuse_reason}")
        outcomes: list[PushOutcome | None] = [None] * len(payloads)
        codes: Counter[str] = Counter()
        items: list[bytes | str] = []
        accepted: list[tuple[int, str]] = []
        for at, payload in enumerate(payloads):
            try:
                rollout, number = self._check(payload)
            except Refused as refused:
                codes[refused.code] += 1
                outcomes[at] = PushOutcome(rollout_id=refused.rollout_id, outcome="refused", reason=str(refused))
                continue
            record = pack_record(rollout, prompt_number=number, num_bytes=len(payload))
            items += [rollout.rollout_id, payload, record, rollout.visit_id]
            accepted.append((at, rollout.rollout_id.hex()))
        keys = self._context.keys
        results = await self._context.scripts.run(
            "push",
            [keys.payloads, keys.log, keys.counters, keys.marks, keys.visits, keys.leases, keys.lease_deadlines],
            [
                self._context.recipe.buffer.max_rollouts,
                len(accepted),
                len(codes),
                *items,
                *(part for pair in codes.items() for part in pair),
            ],
        )
        for (at, rollout_id), result in zip(accepted, results, strict=True):
            outcome = OUTCOMES[result]
            reason = CONFLICT if outcome == "refused" else None
            outcomes[at] = PushOutcome.model_construct(rollout_id=rollout_id, outcome=outcome, reason=reason)
        if any(result == 1 for result in results):
            self._context.changed.notify()
        return [outcome for outcome in outcomes if outcome is not None]

    def _check(self, payload: bytes) -> tuple[Rollout, int]:
        try:
            rollout = decode_rollout(payload)
        except LimitError as error:
            raise Refused("too-large", str(error)) from None
        except SchemaVersionError as error:
            raise Refused("schema-version", str(error)) from None
        except WireError as error:
            raise Refused("malformed", str(error)) from None
        rollout_id = rollout.rollout_id.hex()
        if rollout.run != self._context.run:
            detail = f"rollout {rollout_id} belongs to run {rollout.run!r}, this is {self._context.run!r}"
            raise Refused("wrong-run", detail, rollout_id)
        found = self._catalog.find(rollout.prompt_id)
        if found is None:
            detail = f"rollout {rollout_id}: prompt {rollout.prompt_id!r} was never uploaded"
            raise Refused("unknown-prompt", detail, rollout_id)
        number, prompt = found
        if prompt.split != "train":
            detail = f"rollout {rollout_id}: prompt {rollout.prompt_id!r} is held out and never trained on"
            raise Refused("heldout-prompt", detail, rollout_id)
        for span in rollout.version_spans:
            if span.version != START and not self._lineages.knows(span.version.lineage):
                detail = f"rollout {rollout_id}: no trainer ever made version {span.version}"
                raise Refused("unknown-lineage", detail, rollout_id)
        return rollout, number

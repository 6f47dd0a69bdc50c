"""Push: every item gets its own outcome, the valid ones are stored in one atomic call, then it is acknowledged."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from tba.errors import LimitError, SchemaVersionError, UnavailableError, WireError
from tba.wire import RolloutDocument, check_push
from tba_buffer import replica
from tba_buffer.context import Context
from tba_buffer.evictor import Evictor
from tba_buffer.lineage import Lineages
from tba_buffer.log import pack_record
from tba_buffer.prompts import Catalog
from tba_buffer.run_state import read_state, read_version

NEW = ord("n")
OUTCOMES = {"n": "new", "d": "duplicate", "c": "refused", "l": "refused"}
REASONS = {
    "c": "conflict: this rollout id is stored with other bytes; every rollout needs its own id",
    "l": "not-leased: its visit is leased, and never was to the searcher that it names (searcher_id)",
}
REFUSALS: dict[type[WireError], str] = {LimitError: "too-large", SchemaVersionError: "schema-version"}
UNKNOWN = {"unknown-prompt", "unknown-lineage"}


class ItemOutcome(msgspec.Struct, frozen=True, gc=False):
    """What became of one item; items that cannot be read have no id. The JSON is `tba.api.PushOutcome`."""

    rollout_id: str | None
    outcome: str
    reason: str | None = None


class Refused(Exception):
    """One item may not be stored; `code` is what it is counted under. Items that cannot be read have no id."""

    def __init__(self, code: str, detail: str, rollout_id: bytes | None = None) -> None:
        name = None if rollout_id is None else rollout_id.hex()
        super().__init__(f"{code}: {detail}" if name is None else f"{code}: rollout {name}: {detail}")
        self.code = code
        self.outcome = ItemOutcome(name, "refused", str(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """One outcome per item, in order, and where the run stands."""

    outcomes: list[ItemOutcome]
    latest_version: str | None
    run_state: str


class Rollouts:
    """Stores pushes.

    Args:
        context: Redis and settings.
        catalog: the prompts that rollouts may answer.
        lineages: the lineages that may have made them.
        evictor: keeps what is stored within the bounds, before a push is acknowledged.
    """

    def __init__(self, context: Context, catalog: Catalog, lineages: Lineages, evictor: Evictor) -> None:
        self._context = context
        self._catalog = catalog
        self._lineages = lineages
        self._evictor = evictor
        self._run = context.run
        keys = context.keys
        self._keys = (keys.payloads, keys.log, keys.counters, keys.originals)
        self._keys += (keys.visits, keys.leases, keys.lease_deadlines, keys.run)
        self._keys += (keys.replica, keys.gone, keys.gone_before, keys.unreadable)
        self._hashes_tokens = context.recipe.buffer.deduplicate

    @property
    def refuse_reason(self) -> str | None:
        """Why nothing is stored, while that is so: this process is not the owner, or Redis could not keep it."""
        return self._context.promise.problem or self._context.replica.refused

    async def push(self, payloads: Sequence[bytes]) -> PushResult:
        """Store the valid items; one outcome per item, in order.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis could not make them durable; nothing is acknowledged.
        """
        if self.refuse_reason is not None:
            raise UnavailableError(f"nothing is stored now: {self.refuse_reason}")
        refusals: dict[int, Refused] = {}
        accepted: list[int] = []
        ids: list[bytes] = []
        records: list[bytes] = []
        visits: dict[tuple[str, str], int] = {}
        visit_numbers: list[int] = []
        for at, place in enumerate(await self._places(check_push(payloads))):
            if isinstance(place, Refused):
                refusals[at] = place
                continue
            rollout, prompt = place
            accepted.append(at)
            ids.append(rollout.rollout_id)
            records.append(rollout_record(rollout, prompt, len(payloads[at]), hashes_tokens=self._hashes_tokens))
            visit_numbers.append(visits.setdefault((rollout.visit_id, rollout.searcher_id), len(visits)))
        codes = Counter(refused.code for refused in refusals.values())
        reply = await self._context.scripts.run(
            "push",
            self._keys,
            [
                len(accepted),
                len(visits),
                b"".join(records),
                struct.pack(f"<{len(visit_numbers)}H", *visit_numbers),
                self._context.replica.number,
                *(payloads[at] for at in accepted),
                *(visit_id for visit_id, _ in visits),
                *(searcher_id for _, searcher_id in visits),
                *(part for pair in codes.items() for part in pair),
            ],
        )
        if reply[0] == replica.SUPERSEDED:
            raise await replica.refusal(self._context, f"the push of {len(payloads)} rollouts")
        _, latest_version, run_state, results = reply
        stored = map(stored_outcome, ids, results.decode())
        outcomes = [refusals[at].outcome if at in refusals else next(stored) for at in range(len(payloads))]
        await self._added([len(payloads[at]) for at, result in zip(accepted, results, strict=True) if result == NEW])
        return PushResult(
            outcomes=outcomes,
            latest_version=read_version(self._context, "latest_version", latest_version or None),
            run_state=read_state(self._context, run_state),
        )

    async def _places(
        self, items: Sequence[RolloutDocument | WireError]
    ) -> list[tuple[RolloutDocument, int] | Refused]:
        """Where each item belongs, or why it does not.

        Nothing is refused as unknown before Redis was asked once more: the prompt or the lineage may have been added
        after this process last read them, by the process that owned the run before.
        """
        places = [self._try_place(item) for item in items]
        if any(isinstance(place, Refused) and place.code in UNKNOWN for place in places):
            await self._catalog.load()
            await self._lineages.load()
            places = [self._try_place(item) for item in items]
        return places

    def _try_place(self, item: RolloutDocument | WireError) -> tuple[RolloutDocument, int] | Refused:
        try:
            return self._place(item)
        except Refused as refused:
            return refused

    def _place(self, item: RolloutDocument | WireError) -> tuple[RolloutDocument, int]:
        """A rollout that belongs here, and the number of its prompt."""
        if isinstance(item, WireError):
            raise Refused(REFUSALS.get(type(item), "malformed"), str(item))
        rollout_id, knows = item.rollout_id, self._lineages.knows
        if item.run != self._run:
            raise Refused("wrong-run", f"belongs to run {item.run!r}, this is {self._run!r}", rollout_id)
        found = self._catalog.find(item.prompt_id)
        if found is None:
            raise Refused("unknown-prompt", f"prompt {item.prompt_id!r} was never uploaded", rollout_id)
        if found[1].split != "train":
            detail = f"prompt {item.prompt_id!r} is held out and never trained on"
            raise Refused("heldout-prompt", detail, rollout_id)
        for lineage, step, _, _ in item.version_spans:
            if (lineage or step) and not knows(lineage):
                raise Refused("unknown-lineage", f"no trainer ever made version {lineage}-{step}", rollout_id)
        return item, found[0]

    async def _added(self, sizes: list[int]) -> None:
        """Before a push that added rollouts of these sizes is acknowledged."""
        if not sizes:
            return
        self._context.changed.notify()
        if self._evictor.note(len(sizes), sum(sizes)):
            await self._evictor.enforce()


def stored_outcome(rollout_id: bytes, result: str) -> ItemOutcome:
    """What push.lua says of one item."""
    return ItemOutcome(rollout_id.hex(), OUTCOMES[result], REASONS.get(result))


def rollout_record(rollout: RolloutDocument, prompt: int, num_bytes: int, *, hashes_tokens: bool) -> bytes:
    """The record of a rollout for the log (log.py).

    Args:
        prompt: number of its prompt.
        num_bytes: size of its payload.
        hashes_tokens: whether `buffer.deduplicate` asks for a hash of its tokens.
    """
    return pack_record(
        rollout.rollout_id,
        reward=rollout.reward,
        version=rollout.version,
        prompt=prompt,
        num_bytes=num_bytes,
        num_tokens=len(rollout.response_tokens) // 4,
        token_hash=token_hash(rollout.response_tokens) if hashes_tokens else 0,
        status=rollout.reward_status,
    )


def token_hash(response_tokens: bytes) -> int:
    """What tells two responses apart (64 bits of BLAKE2b of the raw tokens); never 0, which means not hashed."""
    return int.from_bytes(blake2b(response_tokens, digest_size=8).digest(), "little") or 1

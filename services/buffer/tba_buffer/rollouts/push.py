"""Pushes: check every item, store the valid ones in one atomic call, then answer with one outcome per item."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from starlette.requests import Request

from tba.api import Prompt
from tba.config import Recipe
from tba.errors import BusyError, LimitError, SchemaVersionError, UnavailableError, WireError
from tba.wire import Episode, Rollout, decode_rollouts, int32_bytes
from tba_buffer.eviction.evictor import Evictor
from tba_buffer.index.log import pack_record
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.run.lineage import Lineages
from tba_buffer.storage.context import Context, RunHash

MAX_INFLIGHT_BYTES = 256 * 1024 * 1024
"""Most bytes of push bodies that are read or stored at once; storing a body takes about four times its size."""
RETRY_S = 0.5
NEW = ord("n")
OUTCOMES = {"n": "new", "d": "duplicate", "c": "refused", "l": "refused"}
REASONS = {
    "c": "conflict: this rollout id is stored with other bytes; every rollout needs its own id",
    "l": "not-leased: its visit was never leased to the searcher that it names (searcher_id)",
}
REFUSALS: dict[type[WireError], str] = {LimitError: "too-large", SchemaVersionError: "schema-version"}
UNKNOWN = {"unknown-prompt", "unknown-lineage"}


class ItemOutcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one item; damaged items have no id. The JSON is `tba.api.rollouts.PushOutcome`."""

    rollout_id: str | None
    outcome: str
    reason: str | None = None


class RefusedItem(NamedTuple):
    """An item that may not be stored, counted under `code`. A damaged item has no `rollout`."""

    code: str
    detail: str
    rollout: Rollout | None = None


class RolloutWriter:
    """Stores pushed rollouts.

    Args:
        context: Redis and settings.
        catalog: the prompts that rollouts may answer.
        lineages: the lineages whose versions may have sampled rollouts.
        evictor: evicts what exceeds the limits before a push is acknowledged.
    """

    def __init__(self, context: Context, catalog: Catalog, lineages: Lineages, evictor: Evictor) -> None:
        self._context = context
        self._catalog = catalog
        self._lineages = lineages
        self._evictor = evictor
        self._run = context.run
        self._hashes_tokens = context.recipe.buffer.deduplicate

    @property
    def refuse_reason(self) -> str | None:
        """Why pushes are refused: Redis is full or could lose them, or another process owns the run; else None."""
        return self._context.durability.problem or self._context.epoch.refused

    async def push(self, payloads: Sequence[bytes]) -> tuple[list[ItemOutcome], RunHash]:
        """Store the valid items. Return one outcome per item, in order, and a RunHash of state and sampling version.

        Raises:
            SupersededError: a newer buffer process owns the run.
            UnavailableError: Redis could not store them durably; nothing is acknowledged.
        """
        if self.refuse_reason is not None:
            raise UnavailableError(f"nothing is stored now: {self.refuse_reason}")
        refusals: dict[int, ItemOutcome] = {}
        codes: Counter[str] = Counter()
        accepted: list[int] = []
        ids: list[bytes] = []
        records: list[bytes] = []
        visits: dict[tuple[str, str], int] = {}
        visit_numbers: list[int] = []
        items = decode_rollouts(payloads)
        checked = [self._check_item(item) for item in items]
        # the process that owned the run before may have added the prompt or lineage since this one read them: an item
        # is refused as unknown only after Redis was asked once more
        if any(isinstance(each, RefusedItem) and each.code in UNKNOWN for each in checked):
            await self._catalog.load()
            await self._lineages.load()
            checked = [self._check_item(item) for item in items]
        # refused items do not stop the others: push.lua gets the accepted ones, and only counts the rest
        for at, each in enumerate(checked):
            if isinstance(each, RefusedItem):
                name = None if each.rollout is None else each.rollout.rollout_id.hex()
                where = "" if name is None else f"rollout {name}: "
                refusals[at] = ItemOutcome(name, "refused", f"{each.code}: {where}{each.detail}")
                codes[each.code] += 1
                continue
            rollout, prompt = each
            accepted.append(at)
            ids.append(rollout.rollout_id)
            records.append(rollout_record(rollout, prompt, len(payloads[at]), hashes_tokens=self._hashes_tokens))
            # push.lua looks up each (visit, searcher) once, however many rollouts it has
            visit_numbers.append(visits.setdefault((rollout.visit_id, rollout.searcher_id), len(visits)))
        sampling_version, run_state, results = await self._context.scripts.run(
            "push",
            *(payloads[at] for at in accepted),
            records=b"".join(records),
            visit_numbers=struct.pack(f"<{len(visit_numbers)}H", *visit_numbers),
            visit_ids=[visit_id for visit_id, _ in visits],
            searcher_ids=[searcher_id for _, searcher_id in visits],
            refused=codes,
        )
        # the reply has a letter for each accepted item: refused ones are put back between them
        letters = zip(ids, results.decode(), strict=True)
        stored = (ItemOutcome(each.hex(), OUTCOMES[letter], REASONS.get(letter)) for each, letter in letters)
        outcomes = [refusals[at] if at in refusals else next(stored) for at in range(len(payloads))]
        sizes = [len(payloads[at]) for at, result in zip(accepted, results, strict=True) if result == NEW]
        if sizes:
            self._context.changed.notify()
            if self._evictor.record_added(len(sizes), sum(sizes)):
                await self._evictor.enforce()
        # a script returns "" where there is no version
        return outcomes, RunHash(self._context, {b"sampling_version": sampling_version or None, b"state": run_state})

    def _check_item(self, item: Rollout | WireError) -> tuple[Rollout, int] | RefusedItem:
        """Return a rollout with the number of its prompt, or why it may not be stored."""
        if isinstance(item, WireError):
            return RefusedItem(REFUSALS.get(type(item), "malformed"), str(item))
        if item.run != self._run:
            return RefusedItem("wrong-run", f"belongs to run {item.run!r}, this is {self._run!r}", item)
        found = self._catalog.find(item.prompt_id)
        if found is None:
            return RefusedItem("unknown-prompt", f"prompt {item.prompt_id!r} was never uploaded", item)
        if found[1].split != "train":
            detail = f"prompt {item.prompt_id!r} is held out and never trained on"
            return RefusedItem("heldout-prompt", detail, item)
        # one that no searcher of this recipe makes would hold up the trainer for as long as it is stored
        if problem := too_long(item, self._context.recipe):
            return RefusedItem("too-long", problem, item)
        if item.episode is not None and (problem := other_group(item.episode, found[1])):
            return RefusedItem("other-group", problem, item)
        for span in item.version_spans:
            # version 0-0 is the starting model, which no trainer made
            if (span.lineage or span.step) and not self._lineages.knows(span.lineage):
                return RefusedItem("unknown-lineage", f"no trainer ever made version {span.version}", item)
        return item, found[0]


def too_long(rollout: Rollout, recipe: Recipe) -> str | None:
    """Return a sentence about a part of a rollout that is longer than the recipe allows; None if none is."""
    most_prompt, most_response = recipe.searcher.max_prompt_tokens, recipe.searcher.max_response_tokens
    most, most_in_pass = most_prompt + most_response, recipe.trainer.micro_batch_tokens
    # the sequences of an episode may begin with more than the prompt, and end with more than one reply
    first = len(rollout.prompt_tokens) if rollout.episode is None else 0
    replies = [end - start for each in rollout.sequences for start, end in each.trained_spans]
    for what, num_tokens, limit, keys in (
        ("prompt", first, most_prompt, "searcher.max_prompt_tokens"),
        ("response", max(replies), most_response, "searcher.max_response_tokens"),
        (
            "longest sequence",
            max(len(each.token_bytes) // 4 for each in rollout.sequences),
            most,
            "searcher.max_prompt_tokens + searcher.max_response_tokens",
        ),
        # a pass of the trainer holds whole rollouts
        ("conversation", rollout.num_tokens, max(most, most_in_pass), "trainer.micro_batch_tokens"),
    ):
        if num_tokens > limit:
            return f"its {what} has {num_tokens} tokens, the recipe allows {limit} ({keys})"
    return None


def other_group(episode: Episode, prompt: Prompt) -> str | None:
    """Return a sentence about an episode that its prompt's group cannot hold; None: it can.

    A group compares episodes that differ in nothing but the replies: of one prompt, environment seed and seat.
    """
    if episode.seed != prompt.environment_seed:
        return (
            f"its episode has seed {episode.seed}, and prompt {prompt.prompt_id!r} has seed {prompt.environment_seed}; "
            "only episodes of one seed can be compared"
        )
    if episode.seat != prompt.environment_seat:
        seat = prompt.environment_seat
        return f"it is of seat {episode.seat}; the rollouts of prompt {prompt.prompt_id!r} are all of seat {seat}"
    return None


def rollout_record(rollout: Rollout, prompt: int, num_bytes: int, *, hashes_tokens: bool) -> bytes:
    """Return the record of a rollout for the log (log.py).

    Args:
        prompt: the number of its prompt.
        num_bytes: the size of its payload.
        hashes_tokens: whether to hash the sampled tokens, as `buffer.deduplicate` needs.
    """
    token_hash = 0  # not hashed
    if hashes_tokens:
        # of a conversation also where each reply begins: the same tokens may be other replies
        starts = [span[0] for each in rollout.sequences for span in each.trained_spans] if rollout.episode else []
        raw = rollout.response_tokens.tobytes() + int32_bytes(starts)
        token_hash = int.from_bytes(blake2b(raw, digest_size=8).digest(), "little") or 1
    return pack_record(
        rollout.rollout_id,
        reward=rollout.reward,
        version=rollout.version,
        prompt=prompt,
        num_bytes=num_bytes,
        num_tokens=rollout.num_sampled,
        token_hash=token_hash,
        status=rollout.reward_status,
    )


class PushAdmission:
    """Limits the bytes of push bodies that this process holds at once, so that searchers cannot exhaust its memory.

    While no other body is held, a body of any size is admitted.

    Args:
        recipe: says how large a body may be.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._max_body_bytes = recipe.buffer.max_body_bytes
        self.inflight_bytes = 0

    @contextmanager
    def admit(self, request: Request) -> Iterator[None]:
        """Reserve memory for a push body, from before it is read until it is stored.

        A body of unknown size counts as the largest that is allowed.

        Raises:
            BusyError: with the bodies held, it exceeds MAX_INFLIGHT_BYTES (wait "push-memory"); none of it was read.
        """
        declared = request.headers.get("content-length", "")
        num_bytes = int(declared) if declared.isdigit() else self._max_body_bytes
        # a body that is alone always fits: a limit below one body would stop every push
        if self.inflight_bytes and self.inflight_bytes + num_bytes > MAX_INFLIGHT_BYTES:
            raise BusyError(
                f"{self.inflight_bytes} bytes of pushes are under way and this one has up to {num_bytes}, the limit is "
                f"{MAX_INFLIGHT_BYTES}; push it again",
                retry_after_s=RETRY_S,
                wait="push-memory",
            )
        self.inflight_bytes += num_bytes
        try:
            yield
        finally:
            self.inflight_bytes -= num_bytes

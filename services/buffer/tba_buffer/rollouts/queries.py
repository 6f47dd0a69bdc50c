"""Queries of stored rollouts: GET /v1/rollouts, GET /v1/rollouts/{rollout_id}, and the rollouts of an export.

filters and order  ->  rows of the index, as log positions: row numbers do not outlive an await  (selection.py)
                   ->  their payloads from Redis, chunk by chunk  ->  those that pass the other filters  ->  JSON
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from pydantic import Field

from tba.api import (
    EpisodeInfo,
    MessageInfo,
    RefLogprobInfo,
    RewardPart,
    RolloutDetail,
    RolloutInfo,
    RolloutOrder,
    RolloutPage,
    SamplingInfo,
    SegmentInfo,
    SequenceInfo,
    SpanInfo,
)
from tba.concurrency import in_thread
from tba.errors import NotFoundError, WireError
from tba.versions import PolicyVersion
from tba.wire import Episode, Rollout, TokenSequence
from tba.wire.rollout import failure_boundary
from tba_buffer.index.log_follower import IndexView
from tba_buffer.prompts.catalog import Catalog, bounded_data
from tba_buffer.rollouts.lost_payloads import decode_stored, placeholders
from tba_buffer.rollouts.selection import (
    MAX_CURSOR_CHARS,
    MAX_PER_PAGE,
    MAX_TEXT_CHARS,
    Cursor,
    PayloadFilter,
    RolloutFilter,
    Selection,
    select_rows,
)
from tba_buffer.rollouts.token_texts import TokenTexts
from tba_buffer.rollouts.trained_steps import TrainedSteps
from tba_buffer.run.lineage import Lineages
from tba_buffer.run.state import RunStateReader
from tba_buffer.storage.context import Context, RunHash
from tba_buffer.storage.redis_client import redis_errors

MAX_READ = 20_000
"""Most rollouts that one page reads to find those that pass a filter of their payloads."""
MAX_SCANS = 4
"""Most pages with such filters read at once; others wait. Each holds a chunk, and keeps Redis and a thread busy."""
CHUNK_ROLLOUTS = 500
CHUNK_BYTES = 32 * 1024 * 1024
"""Most payload bytes in memory at once (a larger payload is a chunk of its own)."""
Positions = NDArray[np.uint64]


class PageRequest(RolloutFilter):
    """The query of GET /v1/rollouts."""

    order: RolloutOrder = "newest"
    limit: int = Field(default=20, ge=1, le=MAX_PER_PAGE)
    cursor: str | None = Field(default=None, max_length=MAX_CURSOR_CHARS)
    text_chars: int = Field(default=1000, ge=0, le=MAX_TEXT_CHARS)


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A stored rollout: its log position, the number of batches that drew it, and its payload."""

    rollout_id: bytes
    position: int
    num_batches: int
    payload: bytes


class RolloutReader:
    """Reads stored rollouts.

    Args:
        context: Redis and settings.
        catalog: gives the numbers and texts of prompts.
        view: gives the index.
        lineages: give the policy age of a version.
        run_state: gives the last acked step.
        trained_steps: give the steps that consumed a rollout.
        token_texts: give the text of each token.
    """

    def __init__(
        self,
        context: Context,
        *,
        catalog: Catalog,
        view: IndexView,
        lineages: Lineages,
        run_state: RunStateReader,
        trained_steps: TrainedSteps,
        token_texts: TokenTexts,
    ) -> None:
        self._context = context
        self._catalog = catalog
        self._view = view
        self._lineages = lineages
        self._run_state = run_state
        self._trained_steps = trained_steps
        self._token_texts = token_texts
        self._scans = asyncio.Semaphore(MAX_SCANS)
        self._weights = {
            (task, part): spec.factor
            for task, reward in context.recipe.reward.tasks.items()
            for part, spec in reward.parts.items()
        } | {(task, "environment"): 1.0 for task in context.recipe.environments}

    async def page(self, request: PageRequest) -> RolloutPage:
        """Return one page; rollouts that are evicted while it is read are left out.

        Raises:
            BadRequestError: the cursor cannot be used, bounds exclude each other, or `order` goes by reward but
                `status` selects rollouts without one.
            NotFoundError: no prompt has this id.
        """
        selection = Selection.of(request, self._catalog, order=request.order, cursor=request.cursor)
        payload_filter = PayloadFilter(request, self._catalog)
        async with self._scans if payload_filter.is_needed else nullcontext():
            index = await self._view.catch_up()
            most = MAX_READ if payload_filter.is_needed else request.limit
            # one more than is read: is there a next page?
            rows = select_rows(index, selection, most + 1)
            positions, rewards = index.column("position", rows), index.column("reward", rows)
            found: list[StoredRollout] = []
            num_read = 0
            async for num, matching in self._matching(positions[:most], payload_filter, num_first=request.limit):
                num_read = num
                found += matching
                if len(found) >= request.limit:
                    break
            if len(found) >= request.limit:
                # what lies behind the last one that is shown is read again for the next page
                found = found[: request.limit]
                num_read = int(np.flatnonzero(positions == found[-1].position)[0]) + 1
            after = None
            if num_read < len(rows):
                reward = float(rewards[num_read - 1]) if selection.by_reward else 0.0
                after = str(Cursor(request.order, reward, int(positions[num_read - 1])))
            infos = await self.infos(await self.rollouts(found), text_chars=request.text_chars)
            return RolloutPage(rollouts=infos, next=after, num_read=num_read)

    async def groups(
        self, wanted: RolloutFilter, num: int, *, on_evicted: Callable[[int], None]
    ) -> AsyncIterator[list[tuple[StoredRollout, Rollout]]]:
        """Return an iterator over all rollouts that match, oldest first, in groups of at least `num`, or of at least
        CHUNK_BYTES; the last group may be smaller.

        Args:
            on_evicted: called with the number of rollouts that are left out because they were evicted before they were
                read. They count even if a filter that needs payloads would have excluded them.

        Raises:
            BadRequestError, NotFoundError: as in `page`.
            UnavailableError: Redis did not answer; the iterator may raise it too.
        """
        selection = Selection.of(wanted, self._catalog, order="oldest", cursor=None)
        index = await self._view.catch_up()
        rows = select_rows(index, selection, max(1, index.num_live))
        return self._grouped(index.column("position", rows), PayloadFilter(wanted, self._catalog), num, on_evicted)

    async def _grouped(
        self, positions: Positions, payload_filter: PayloadFilter, num: int, on_evicted: Callable[[int], None]
    ) -> AsyncIterator[list[tuple[StoredRollout, Rollout]]]:
        group: list[StoredRollout] = []
        chunks = self._matching(positions, payload_filter, num_first=CHUNK_ROLLOUTS, on_evicted=on_evicted)
        async for num_read, matching in chunks:
            group += matching
            is_last = num_read >= len(positions)
            if group and (is_last or len(group) >= num or sum(len(item.payload) for item in group) >= CHUNK_BYTES):
                found = await self.rollouts(group)
                on_evicted(len(group) - len(found))
                yield found
                group = []

    async def _matching(
        self,
        positions: Positions,
        payload_filter: PayloadFilter,
        *,
        num_first: int,
        on_evicted: Callable[[int], None] = lambda _: None,
    ) -> AsyncIterator[tuple[int, list[StoredRollout]]]:
        """Read the rollouts at log positions in chunks of `num_first`, then twice as many each, up to CHUNK_ROLLOUTS.

        A chunk has CHUNK_BYTES at most, or one rollout. Evicted rollouts are left out.

        Yields:
            The number of positions read so far, and the matching rollouts of this chunk.
        """
        num_read, num = 0, num_first
        while num_read < len(positions):
            chunk, index = positions[num_read : num_read + num], self._view.index
            rows = index.rows_at(chunk)
            num_bytes = np.zeros(len(rows), dtype=np.int64)
            num_bytes[rows >= 0] = index.column("num_bytes", rows[rows >= 0])
            num_taken = max(1, int(np.searchsorted(np.cumsum(num_bytes), CHUNK_BYTES, side="right")))
            is_live = rows[:num_taken] >= 0
            live, stored = rows[:num_taken][is_live], list[StoredRollout]()
            if len(live):
                ids, uses = index.rollout_ids(live), index.columns.get("uses", live).tolist()
                with redis_errors("read rollouts"):
                    payloads = await self._context.redis.hmget(self._context.keys.payloads, ids)
                columns = zip(ids, chunk[:num_taken][is_live].tolist(), uses, payloads, strict=True)
                # evicted since the index was read
                stored = [StoredRollout(*values) for values in columns if values[-1] is not None]
            on_evicted(num_taken - len(stored))
            num_read, num = num_read + num_taken, min(2 * num, CHUNK_ROLLOUTS)
            if payload_filter.is_needed:
                # in a thread: texts may be long, and other requests must not wait for them
                stored = await in_thread(
                    lambda stored=stored: [item for item in stored if payload_filter.matches(item.payload)]
                )
            yield num_read, stored

    async def rollouts(self, stored: Sequence[StoredRollout]) -> list[tuple[StoredRollout, Rollout]]:
        """Decode stored rollouts. Placeholders replace damaged ones; those not in the index are left out."""
        decoded = await in_thread(lambda: [_decode(item.payload, item.rollout_id) for item in stored])
        damaged = [item.position for item, rollout in zip(stored, decoded, strict=True) if rollout is None]
        rows = self._view.index.rows_at(np.array(damaged, dtype=np.uint64))
        run, catalog = self._context.run, self._catalog
        known = {
            rollout.rollout_id: rollout
            for rollout in placeholders(self._view.index, rows[rows >= 0], run=run, catalog=catalog)
        }
        found = [(item, rollout or known.get(item.rollout_id)) for item, rollout in zip(stored, decoded, strict=True)]
        return [(item, rollout) for item, rollout in found if rollout is not None]

    async def infos(
        self, rollouts: Sequence[tuple[StoredRollout, Rollout]], *, text_chars: int | None
    ) -> list[RolloutInfo]:
        """Convert rollouts to the JSON bodies of the API.

        Args:
            text_chars: longer texts are cut to this length; None: no text is cut.
        """
        run = await self._run_state.read_fields()
        # in a thread: an export asks for a thousand at once
        return await in_thread(
            lambda: [
                RolloutInfo(**self._fields(rollout, run, text_chars, num_batches=item.num_batches))
                for item, rollout in rollouts
            ]
        )

    async def get(self, rollout_id: str) -> RolloutDetail:
        """Return everything that is stored about one rollout.

        Raises:
            NotFoundError: it is not stored now, or it is damaged and not in the log.
        """
        with redis_errors("read a rollout"):
            payload = await self._context.redis.hget(self._context.keys.payloads, bytes.fromhex(rollout_id))
        if payload is None:
            raise NotFoundError(f"rollout {rollout_id} is not stored: it was evicted, or never pushed to this run")
        rollout = _decode(payload, bytes.fromhex(rollout_id))
        index = await self._view.catch_up()
        row = index.row_of(bytes.fromhex(rollout_id))
        num_batches = int(index.columns.get("uses", row).sum())  # now: the row may have another number later
        # shown as the index knows it, as in a page: so people see that it is damaged
        if rollout is None:
            if not len(row):
                raise NotFoundError(f"rollout {rollout_id} cannot be read, and the log does not name it")
            rollout = placeholders(index, row, run=self._context.run, catalog=self._catalog)[0]
        ref = rollout.ref_logprob
        trained, trained_since = await self._trained_steps.of(bytes.fromhex(rollout_id))
        tokens, texts_of = rollout.response_tokens.tolist(), self._token_texts.of
        spoken = [each.tokens.tolist() for each in rollout.sequences] if rollout.episode else []
        # at once: they wait for one tokenizer
        texts, *of_sequences = await asyncio.gather(*map(texts_of, [tokens, *spoken]))
        return RolloutDetail(
            **self._fields(rollout, await self._run_state.read_fields(), None, num_batches=num_batches),
            prompt_tokens=rollout.prompt_tokens.tolist(),
            response_tokens=tokens,
            sampler_logprobs=rollout.sampler_logprobs.tolist(),
            ref_logprob=None if ref is None else RefLogprobInfo(value=ref.value, version=str(ref.version)),
            sequences=await in_thread(lambda: [_sequence_info(each) for each in rollout.sequences])
            if rollout.episode
            else None,
            messages=[
                MessageInfo(role=each.role, content=each.content, turn=each.turn) for each in rollout.episode.messages
            ]
            if rollout.episode
            else None,
            token_texts=texts,
            sequence_texts=of_sequences or None,
            trained=trained,
            trained_since=trained_since,
        )

    def _fields(self, rollout: Rollout, run: RunHash, text_chars: int | None, *, num_batches: int) -> dict[str, Any]:
        found, parts = self._catalog.find(rollout.prompt_id), rollout.reward_parts
        trainer = PolicyVersion(run.lineage, run.step)
        return {
            "rollout_id": rollout.rollout_id.hex(),
            "task": rollout.task,
            "prompt_id": rollout.prompt_id,
            "visit_id": rollout.visit_id,
            "version": str(rollout.version),
            "version_spans": [
                SpanInfo(version=str(s.version), start=s.start, end=s.end) for s in rollout.version_spans
            ],
            "policy_age_steps": self._lineages.tree.policy_age(rollout.version, trainer),
            "prompt_text": None if found is None else found[1].text[:text_chars],
            "prompt_data": None if found is None else bounded_data(found[1].data, text_chars),
            "num_prompt_tokens": len(rollout.prompt_tokens),
            "num_response_tokens": rollout.version_spans[-1].end,
            "response_text": rollout.response_text[:text_chars],
            "response_text_cut": text_chars is not None and len(rollout.response_text) > text_chars,
            "finish_reason": rollout.finish_reason,
            "reward": rollout.reward,
            "reward_status": rollout.reward_status,
            "reward_reason": rollout.reward_reason,
            "reward_version": rollout.reward_version,
            "reward_parts": parts
            and [
                RewardPart(name=name, score=score, weight=self._weights.get((rollout.task, name)))
                for name, score in parts.items()
            ],
            "episode": rollout.episode and _episode_info(rollout, rollout.episode),
            "num_batches": num_batches,
            "sampling": SamplingInfo.model_validate(rollout.sampling, from_attributes=True),
            "searcher_id": rollout.searcher_id,
            "started_at_s": rollout.started_at_s,
            "finished_at_s": rollout.finished_at_s,
        }


def _episode_info(rollout: Rollout, episode: Episode) -> EpisodeInfo:
    known = {name: getattr(episode, name) for name in EpisodeInfo.model_fields if hasattr(episode, name)}
    known |= {"num_turns": rollout.num_replies, "failure_boundary": failure_boundary(rollout.reward_reason)}
    return EpisodeInfo(**{**known, "turn_rewards": list(episode.turn_rewards)})


def _sequence_info(sequence: TokenSequence) -> SequenceInfo:
    # checked when it was pushed; there may be thousands
    segments = [SegmentInfo.model_construct(**structs.asdict(each)) for each in sequence.segments]
    return SequenceInfo(tokens=sequence.tokens.tolist(), segments=segments)


def _decode(payload: bytes, rollout_id: bytes) -> Rollout | None:
    try:
        return decode_stored(payload, rollout_id)
    except WireError:
        return None

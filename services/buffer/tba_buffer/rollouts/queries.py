"""Queries of stored rollouts: GET /v1/rollouts and GET /v1/rollouts/{rollout_id}.

filters and order  ->  rows of the index (O(live rollouts), vectorised, no sort of everything)
                   ->  the payloads of one page from Redis  ->  JSON
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from tba.api import RefLogprobInfo, RolloutDetail, RolloutInfo, RolloutOrder, RolloutPage, SamplingInfo, SpanInfo
from tba.api.rollouts import RewardStatus
from tba.errors import BadRequestError, NotFoundError
from tba.versions import PolicyVersion
from tba.wire import Rollout, decode_rollout
from tba_buffer.index.log import SCORED, STATUS_CODES
from tba_buffer.index.log_follower import IndexView
from tba_buffer.index.rollout_index import Index, Rows
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.rollouts.lost_payloads import placeholders
from tba_buffer.run.lineage import Lineages
from tba_buffer.run.state import RunStateReader
from tba_buffer.storage.context import Context
from tba_buffer.storage.redis_client import redis_errors

ORDERS: tuple[RolloutOrder, ...] = ("best", "worst", "newest", "oldest")
_FORMAT = struct.Struct("<BdQ")
MAX_CURSOR_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rollouts to select, and their order. None: any. `best` and `worst` select scored ones only."""

    order: RolloutOrder = "newest"
    prompt: int | None = None
    version: PolicyVersion | None = None
    status: RewardStatus | None = None
    after: Cursor | None = None

    @property
    def by_reward(self) -> bool:
        """Whether rewards order the rollouts; equal rewards: newest first."""
        return self.order in ("best", "worst")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """The query of GET /v1/rollouts as it came in."""

    order: RolloutOrder
    prompt_id: str | None
    version: str | None
    status: RewardStatus | None
    limit: int
    cursor: str | None
    text_chars: int


class RolloutReader:
    """Reads stored rollouts.

    Args:
        context: Redis and settings.
        catalog: numbers the prompts.
        view: the index.
        lineages: measure the policy age.
        run_state: says where the trainer stands.
    """

    def __init__(
        self, context: Context, *, catalog: Catalog, view: IndexView, lineages: Lineages, run_state: RunStateReader
    ) -> None:
        self._context = context
        self._catalog = catalog
        self._view = view
        self._lineages = lineages
        self._run_state = run_state

    async def page(self, request: PageRequest) -> RolloutPage:
        """Return one page; rollouts that are evicted while it is read are left out.

        Raises:
            BadRequestError: the cursor cannot be used, or an order by reward of rollouts that have none.
            NotFoundError: no prompt has this id.
            UnavailableError: Redis did not answer.
        """
        selection = self._selection(request)
        index = await self._view.catch_up()
        # one more than a page: is there a next one?
        rows = select_rows(index, selection, request.limit + 1)
        rows, more = rows[: request.limit], len(rows) > request.limit
        if not len(rows):
            return RolloutPage(rollouts=[], next=None)
        after = _cursor_at(index, rows[-1:], selection) if more else None  # before the index moves on
        fallbacks = placeholders(index, rows, run=self._context.run, catalog=self._catalog)
        with redis_errors("read rollouts"):
            payloads = await self._context.redis.hmget(self._context.keys.payloads, index.rollout_ids(rows))
        trainer = await self._trainer()
        infos = [
            RolloutInfo(**self._fields(self._decode(payload, fallback), trainer, request.text_chars))
            for payload, fallback in zip(payloads, fallbacks, strict=True)
            # evicted since the index was read
            if payload is not None
        ]
        return RolloutPage(rollouts=infos, next=None if after is None else str(after))

    async def get(self, rollout_id: str) -> RolloutDetail:
        """Return everything that is stored of one rollout.

        Raises:
            NotFoundError: it is not stored (now).
            UnavailableError: Redis did not answer.
        """
        with redis_errors("read a rollout"):
            payload = await self._context.redis.hget(self._context.keys.payloads, bytes.fromhex(rollout_id))
        if payload is None:
            raise NotFoundError(f"rollout {rollout_id} is not stored: it was evicted, or never pushed to this run")
        rollout = self._context.read_or_note("rollout", rollout_id, lambda: decode_rollout(payload))
        # shown as the index knows it, as in a page: so people see that it is damaged
        if rollout is None:
            rollout = await self._placeholder(rollout_id)
        ref = rollout.ref_logprob
        return RolloutDetail(
            **self._fields(rollout, await self._trainer(), None),
            prompt_tokens=rollout.prompt_tokens.tolist(),
            response_tokens=rollout.response_tokens.tolist(),
            sampler_logprobs=rollout.sampler_logprobs.tolist(),
            ref_logprob=None if ref is None else RefLogprobInfo(value=ref.value, version=str(ref.version)),
        )

    def _selection(self, request: PageRequest) -> Selection:
        prompt = None
        if request.prompt_id is not None:
            found = self._catalog.find(request.prompt_id)
            if found is None:
                raise NotFoundError(f"prompt_id {request.prompt_id!r} was never uploaded")
            prompt = found[0]
        if request.status in ("pending", "failed") and request.order in ("best", "worst"):
            raise BadRequestError(
                f"order {request.order!r} goes by reward, and rollouts of status {request.status!r} have none; "
                "use order newest or oldest"
            )
        return Selection(
            order=request.order,
            prompt=prompt,
            version=None if request.version is None else PolicyVersion.parse(request.version),
            status=request.status,
            after=None if request.cursor is None else parse_cursor(request.cursor, request.order),
        )

    def _decode(self, payload: bytes, fallback: Rollout) -> Rollout:
        """Return the stored rollout, or its placeholder where it cannot be read."""
        read = self._context.read_or_note("rollout", fallback.rollout_id.hex(), lambda: decode_rollout(payload))
        return fallback if read is None else read

    async def _placeholder(self, rollout_id: str) -> Rollout:
        """Return what the index knows of a rollout. O(live rollouts)"""
        index = await self._view.catch_up()
        rows = index.live_rows()
        rows = rows[[known.hex() == rollout_id for known in index.rollout_ids(rows)]]
        if not len(rows):
            raise NotFoundError(f"rollout {rollout_id} cannot be read, and the log does not name it")
        return placeholders(index, rows, run=self._context.run, catalog=self._catalog)[0]

    async def _trainer(self) -> PolicyVersion:
        fields = await self._run_state.read_fields()
        return PolicyVersion(fields.lineage, fields.step)

    def _fields(self, rollout: Rollout, trainer: PolicyVersion, text_chars: int | None) -> dict[str, Any]:
        found = self._catalog.find(rollout.prompt_id)
        text_cut = text_chars is not None and len(rollout.response_text) > text_chars
        sampling = rollout.sampling
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
            "num_prompt_tokens": len(rollout.prompt_tokens),
            "num_response_tokens": rollout.version_spans[-1].end,
            "response_text": rollout.response_text[:text_chars],
            "response_text_cut": text_cut,
            "finish_reason": rollout.finish_reason,
            "reward": rollout.reward,
            "reward_status": rollout.reward_status,
            "reward_reason": rollout.reward_reason,
            "reward_version": rollout.reward_version,
            "sampling": SamplingInfo(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=sampling.seed,
                stop=list(sampling.stop),
            ),
            "searcher_id": rollout.searcher_id,
            "started_at_s": rollout.started_at_s,
            "finished_at_s": rollout.finished_at_s,
        }


def select_rows(index: Index, selection: Selection, num: int) -> Rows:
    """Return the first `num` rows of a selection, in its order. O(live rollouts); O(num) for the newest, unfiltered."""
    unfiltered = selection.version is None and selection.status is None and selection.after is None
    if selection.prompt is not None:
        rows = index.prompt_rows(selection.prompt, scored_only=False)
    # without a filter the index has both ends of the log at hand
    elif unfiltered and selection.order == "newest":
        rows = index.live_rows(newest=num)
    elif unfiltered and selection.order == "oldest":
        rows = index.oldest_rows(num)
    else:
        rows = index.live_rows()
    rows = _matching(index, rows, selection)
    after = selection.after
    if not selection.by_reward:
        if after is not None:  # rows ascend with positions
            positions, last = index.column("position", rows), np.uint64(after.position)
            if selection.order == "oldest":
                rows = rows[np.searchsorted(positions, last, side="right") :]
            else:
                rows = rows[: np.searchsorted(positions, last)]
        return rows[:num] if selection.order == "oldest" else rows[::-1][:num]
    sign = -1.0 if selection.order == "best" else 1.0
    keys = sign * index.column("reward", rows)  # ascending keys give the order
    if after is not None:
        kept = keys > sign * after.reward
        ties = np.flatnonzero(keys == sign * after.reward)
        kept[ties] = index.column("position", rows[ties]) < after.position
        rows, keys = rows[kept], keys[kept]
    if num < len(keys):
        last = np.partition(keys, num - 1)[num - 1]
        before, ties = np.flatnonzero(keys < last), np.flatnonzero(keys == last)
        chosen = np.concatenate([before, ties[len(ties) - (num - len(before)) :]])  # the newest of the ties
        rows, keys = rows[chosen], keys[chosen]
    # of equal rewards the newest is first, as cursors count on
    return rows[np.lexsort((-rows, keys))]


def _matching(index: Index, rows: Rows, selection: Selection) -> Rows:
    """Return the rows of the version and the status, still ascending."""
    if selection.status is not None or selection.by_reward:
        code = SCORED if selection.by_reward else STATUS_CODES[selection.status or "scored"]
        rows = rows[index.column("status", rows) == code]
    if selection.version is not None:
        rows = rows[index.column("step", rows) == selection.version.step]
        rows = rows[index.column("lineage", rows) == selection.version.lineage]
    return rows


def _cursor_at(index: Index, row: Rows, selection: Selection) -> Cursor:
    reward = float(index.column("reward", row)[0]) if selection.by_reward else 0.0
    return Cursor(selection.order, reward, int(index.column("position", row)[0]))


@dataclass(frozen=True, slots=True)
class Cursor:
    """The end of a page, for clients an opaque text: reward and log position of its last item.

    The reward is 0 where rewards do not order the items. A cursor holds no count: so pushes and evictions between two
    pages neither repeat an item nor skip one. Only an item that is scored again meanwhile may move.
    """

    order: RolloutOrder
    reward: float
    position: int

    def __str__(self) -> str:
        packed = _FORMAT.pack(ORDERS.index(self.order), self.reward, self.position)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def parse_cursor(text: str, order: RolloutOrder) -> Cursor:
    """Read a cursor of this order.

    Raises:
        BadRequestError: it was not made by this service, or for another order.
    """
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        number, reward, position = _FORMAT.unpack(packed)
    except (binascii.Error, ValueError, struct.error):
        raise _refused(text, "it is not a cursor") from None
    if number >= len(ORDERS) or not math.isfinite(reward):
        raise _refused(text, "it is not a cursor")
    if ORDERS[number] != order:
        raise _refused(text, f"it is one of order {ORDERS[number]!r}, the request has order {order!r}")
    return Cursor(order, reward, position)


def _refused(text: str, why: str) -> BadRequestError:
    return BadRequestError(
        f"cursor {text[:MAX_CURSOR_CHARS]!r} cannot be used: {why}; send the `next` of the page before, or none"
    )

"""Select the stored rollouts of a query in its order, as rows of the index, and make the cursors between pages.

filters that the index holds (prompt, task, versions, status, rewards)  ->  `select_rows`, vectorised
filters that need the payloads (searcher, how it ended, texts)          ->  `PayloadFilter`, payload by payload
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from dataclasses import dataclass, fields
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from tba.api import RolloutOrder
from tba.api.rollouts import RewardStatus
from tba.errors import BadRequestError, NotFoundError
from tba.fields import MAX_NUMBER, Boundary, VersionText
from tba.versions import PolicyVersion
from tba.wire.rollout import failure_boundary
from tba.wire.sequences import FinishReason, Message, TokenSequence, last_finish_reason
from tba_buffer.index.log import SCORED, STATUS_CODES
from tba_buffer.index.rollout_index import Index, Rows
from tba_buffer.prompts.catalog import Catalog
from tba_buffer.storage.context import DAMAGE_ERRORS

ORDERS: tuple[RolloutOrder, ...] = ("best", "worst", "newest", "oldest")
_FORMAT = struct.Struct("<BdQ")
MAX_CURSOR_CHARS = 64
MAX_PER_PAGE = 100
MAX_TEXT_CHARS = 10_000


Identifier = Annotated[str | None, Field(min_length=1, max_length=256)]
Contains = Annotated[str | None, Field(min_length=1, max_length=200)]
RewardBound = Annotated[float | None, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]


class RolloutFilter(BaseModel):
    """The filters of GET /v1/rollouts as the client sent them; None: no filter. Bounds are inclusive.

    `min_reward` and `max_reward` select scored rollouts; `environment`, `stop_condition` and `failure_boundary` select
    episodes. `contains` is searched in the response and in the prompt, ignoring case.
    """

    prompt_id: Identifier = None
    task: Identifier = None
    version: VersionText | None = None
    from_version: VersionText | None = None
    to_version: VersionText | None = None
    status: RewardStatus | None = None
    min_reward: RewardBound = None
    max_reward: RewardBound = None
    searcher_id: Identifier = None
    finish_reason: FinishReason | None = None
    environment: Identifier = None
    stop_condition: Identifier = None
    failure_boundary: Boundary | None = None
    contains: Contains = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The filters that the index answers, and the order. None: no filter. `best`, `worst`: only scored rollouts."""

    order: RolloutOrder = "newest"
    prompt: int | None = None
    prompts: NDArray[np.int64] | None = None
    """Numbers of the prompts of a task."""
    version: PolicyVersion | None = None
    from_version: PolicyVersion | None = None
    to_version: PolicyVersion | None = None
    status: RewardStatus | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    after: Cursor | None = None

    @classmethod
    def of(cls, wanted: RolloutFilter, catalog: Catalog, *, order: RolloutOrder, cursor: str | None) -> Selection:
        """Check the filters of a request, and return its selection.

        Raises:
            BadRequestError: the cursor cannot be used, bounds exclude each other, or `order` goes by reward but
                `status` selects rollouts without one.
            NotFoundError: no prompt has this id.
        """
        prompt = None
        if wanted.prompt_id is not None:
            found = catalog.find(wanted.prompt_id)
            if found is None:
                raise NotFoundError(f"prompt_id {wanted.prompt_id!r} was never uploaded")
            prompt = found[0]
        if wanted.status in ("pending", "failed") and order in ("best", "worst"):
            raise BadRequestError(
                f"order {order!r} goes by reward, and rollouts of status {wanted.status!r} have none; "
                "use order newest or oldest"
            )
        version, first, last = (
            None if text is None else PolicyVersion.parse(text)
            for text in (wanted.version, wanted.from_version, wanted.to_version)
        )
        if first is not None and last is not None and first > last:
            raise BadRequestError(f"from_version {first} is after to_version {last}; exchange them")
        low, high = wanted.min_reward, wanted.max_reward
        if low is not None and high is not None and low > high:
            raise BadRequestError(f"min_reward {low} is above max_reward {high}; exchange them")
        return cls(
            order=order,
            prompt=prompt,
            prompts=None if wanted.task is None else catalog.numbers_of(wanted.task),
            version=version,
            from_version=first,
            to_version=last,
            status=wanted.status,
            min_reward=low,
            max_reward=high,
            after=None if cursor is None else parse_cursor(cursor, order),
        )

    @property
    def by_reward(self) -> bool:
        """Whether rewards order the rollouts; equal rewards: newest first."""
        return self.order in ("best", "worst")


def select_rows(index: Index, selection: Selection, num: int) -> Rows:
    """Return the first `num` rows of a selection, in its order. O(live rollouts); O(num) for the newest, unfiltered."""
    filters = (getattr(selection, field.name) for field in fields(selection) if field.name != "order")
    if selection.prompt is not None:
        rows = index.prompt_rows(selection.prompt, scored_only=False)
    # without a filter the index has both ends of the log at hand
    elif not selection.by_reward and all(value is None for value in filters):
        rows = index.live_rows(newest=num) if selection.order == "newest" else index.oldest_rows(num)
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
    """Return the rows of `rows` that pass every filter, still ascending."""
    if selection.by_reward or selection.min_reward is not None or selection.max_reward is not None:
        rows = rows[index.column("status", rows) == SCORED]
    if selection.status is not None:
        rows = rows[index.column("status", rows) == STATUS_CODES[selection.status]]
    if selection.prompts is not None:
        rows = rows[np.isin(index.column("prompt", rows), selection.prompts)]
    if selection.version is not None:
        rows = rows[index.column("step", rows) == selection.version.step]
        rows = rows[index.column("lineage", rows) == selection.version.lineage]
    if (first := selection.from_version) is not None:
        lineages, steps = index.column("lineage", rows), index.column("step", rows)
        rows = rows[(lineages > first.lineage) | ((lineages == first.lineage) & (steps >= first.step))]
    if (last := selection.to_version) is not None:
        lineages, steps = index.column("lineage", rows), index.column("step", rows)
        rows = rows[(lineages < last.lineage) | ((lineages == last.lineage) & (steps <= last.step))]
    if selection.min_reward is not None:
        rows = rows[index.column("reward", rows) >= selection.min_reward]
    if selection.max_reward is not None:
        rows = rows[index.column("reward", rows) <= selection.max_reward]
    return rows


class _Glance(msgspec.Struct, gc=False):
    """The fields of a stored rollout that the filters need; the others are not decoded."""

    prompt_id: str
    response_text: str
    sequences: msgspec.Raw
    searcher_id: str
    reward_reason: str | None
    episode: _EpisodeGlance | None = None


class _EpisodeGlance(msgspec.Struct, gc=False):
    environment: str
    stop_condition: str
    messages: tuple[Message, ...] = ()


_GLANCES = msgspec.msgpack.Decoder(_Glance)
_SEQUENCES = msgspec.msgpack.Decoder(tuple[TokenSequence, ...])


class PayloadFilter:
    """The filters that the index cannot answer.

    Args:
        wanted: the filters of the request.
        catalog: gives the texts of prompts.
    """

    def __init__(self, wanted: RolloutFilter, catalog: Catalog) -> None:
        self._wanted = wanted
        self._text = None if wanted.contains is None else wanted.contains.casefold()
        self._catalog = catalog
        self._prompts: dict[str, bool] = {}
        """Cache: prompt id -> whether the prompt's text contains the text searched for."""

    @property
    def is_needed(self) -> bool:
        """Whether payloads must be read to know which rollouts match."""
        wanted = self._wanted
        of_episodes = (wanted.environment, wanted.stop_condition, wanted.failure_boundary)
        return any(part is not None for part in (wanted.searcher_id, wanted.finish_reason, *of_episodes, self._text))

    def matches(self, payload: bytes) -> bool:
        """Return whether a stored rollout passes the filters; a damaged one never does."""
        try:
            seen, wanted = _GLANCES.decode(payload), self._wanted
            episode = seen.episode
            for asked, found in (
                (wanted.searcher_id, seen.searcher_id),
                (wanted.environment, episode and episode.environment),
                (wanted.stop_condition, episode and episode.stop_condition),
                (wanted.failure_boundary, episode and failure_boundary(seen.reward_reason)),
            ):
                if asked is not None and asked != found:
                    return False
            # tokens are most of a payload: they are read for this filter alone
            how = wanted.finish_reason
            if how is not None and last_finish_reason(_SEQUENCES.decode(seen.sequences)) != how:
                return False
        except DAMAGE_ERRORS:
            return False
        if (text := self._text) is None:
            return True
        prompt_has = self._prompts.get(seen.prompt_id)
        if prompt_has is None:
            found = self._catalog.find(seen.prompt_id)
            prompt_has = self._prompts[seen.prompt_id] = found is not None and text in found[1].text.casefold()
        messages = () if episode is None else episode.messages
        texts = [seen.response_text, *(each.content for each in messages)]
        return prompt_has or any(text in each.casefold() for each in texts)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The end of a page: reward and log position of its last item. Clients get it as an opaque text.

    The reward is 0 if rewards do not order the items. A cursor holds no offset, so pushes and evictions between two
    pages neither repeat an item nor skip one. Only an item that is scored again meanwhile may move.
    """

    order: RolloutOrder
    reward: float
    position: int

    def __str__(self) -> str:
        packed = _FORMAT.pack(ORDERS.index(self.order), self.reward, self.position)
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")


def parse_cursor(text: str, order: RolloutOrder) -> Cursor:
    """Parse the text of a cursor, and check that it was made for `order`.

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

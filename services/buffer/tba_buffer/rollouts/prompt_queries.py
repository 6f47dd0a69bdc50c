"""Queries of prompts with the rollouts of each: GET /v1/prompts and GET /v1/prompts/{prompt_id}.

filters  ->  prompt numbers (O(prompts); `contains` also O(their texts), with pauses for other requests)
order    ->  `most` by the counts that the index keeps, `best` and `worst` by the mean rewards (O(live rollouts))
page     ->  the rollouts of its prompts alone
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from tba.api import PromptDetail, PromptInfo, PromptOrder, PromptPage, PromptVersion
from tba.errors import NotFoundError
from tba.fields import Split
from tba.versions import PolicyVersion
from tba_buffer.index.log import SCORED
from tba_buffer.index.log_follower import IndexView
from tba_buffer.index.rollout_index import Index
from tba_buffer.prompts.catalog import Catalog, bounded_data
from tba_buffer.rollouts.selection import MAX_PER_PAGE, MAX_TEXT_CHARS, Contains, Identifier

Numbers = NDArray[np.int64]
CHARS_PER_TURN = 2_000_000
"""Characters that `contains` searches before it yields to other requests: a few milliseconds."""
PROMPTS_PER_TURN = 10_000


class PromptsRequest(BaseModel):
    """The query of GET /v1/prompts. None: no filter."""

    split: Split | None = None
    task: Identifier = None
    contains: Contains = None
    order: PromptOrder = "upload"
    limit: int = Field(default=20, ge=1, le=MAX_PER_PAGE)
    after: int = Field(default=0, ge=0, le=2**53)
    """Number of prompts to skip in this order."""
    text_chars: int = Field(default=1000, ge=0, le=MAX_TEXT_CHARS)


class PromptReader:
    """Reads prompts, and the rewards of the stored rollouts of each."""

    def __init__(self, catalog: Catalog, view: IndexView) -> None:
        self._catalog, self._view = catalog, view

    async def page(self, request: PromptsRequest) -> PromptPage:
        """Return one page. `after` counts prompts, so new rewards and uploads between two pages may shift the order."""
        await self._view.catch_up()
        numbers = await self._matching(request)
        # now, since both may be read again during the pauses, when Redis was restored
        index, numbers = self._view.index, numbers[numbers < len(self._catalog.ids)]
        end = request.after + request.limit
        return PromptPage(
            prompts=[
                PromptInfo(**self._fields(index, number, request.text_chars))
                for number in ordered(index, numbers, request.order)[request.after : end].tolist()
            ],
            next=end if end < len(numbers) else None,
            num_matching=len(numbers),
        )

    async def get(self, prompt_id: str) -> PromptDetail:
        """Return one prompt.

        Raises:
            NotFoundError: no prompt has this id.
        """
        found = self._catalog.find(prompt_id)
        if found is None:
            raise NotFoundError(f"prompt_id {prompt_id!r} was never uploaded")
        index = await self._view.catch_up()
        return PromptDetail(**self._fields(index, found[0], None), by_version=by_version(index, found[0]))

    async def _matching(self, request: PromptsRequest) -> Numbers:
        """Return the numbers of the prompts that pass the filters, ascending."""
        if request.split is None and request.task is None and request.contains is None:
            return np.arange(len(self._catalog.ids))
        wanted = None if request.contains is None else request.contains.casefold()
        numbers, num_chars = [], 0
        for place, prompt_id in enumerate(tuple(self._catalog.ids)):  # a copy: uploads come during the pauses
            if num_chars > CHARS_PER_TURN or place % PROMPTS_PER_TURN == 0:
                num_chars = 0
                await asyncio.sleep(0)
            found = self._catalog.find(prompt_id)
            if found is None:  # Redis was restored meanwhile, from a copy without it
                continue
            number, prompt = found
            if request.split not in (None, prompt.split) or request.task not in (None, prompt.task):
                continue
            if wanted is not None:
                num_chars += len(prompt.text)
                if wanted not in prompt_id.casefold() and wanted not in prompt.text.casefold():
                    continue
            numbers.append(number)
        return np.array(numbers, dtype=np.int64)

    def _fields(self, index: Index, number: int, text_chars: int | None) -> dict[str, Any]:
        prompt_id = self._catalog.ids[number]
        found = self._catalog.find(prompt_id)
        assert found is not None
        prompt, rows = found[1], index.prompt_rows(number, scored_only=False)
        rewards = index.column("reward", rows)[index.column("status", rows) == SCORED]
        return {
            "prompt_id": prompt_id,
            "task": prompt.task,
            "split": prompt.split,
            "text": prompt.text[:text_chars],
            "text_cut": text_chars is not None and len(prompt.text) > text_chars,
            "data": bounded_data(prompt.data, text_chars),
            "num_rollouts": len(rows),
            "num_scored": len(rewards),
            "reward_mean": float(rewards.mean()) if len(rewards) else None,
            "reward_min": float(rewards.min()) if len(rewards) else None,
            "reward_max": float(rewards.max()) if len(rewards) else None,
        }


def ordered(index: Index, numbers: Numbers, order: PromptOrder) -> Numbers:
    """Sort prompt numbers [n] by `order`; ties in upload order, prompts without a mean reward last. [n]

    Args:
        numbers: ascending; some may have no rollouts.
    """
    match order:
        case "upload":
            return numbers
        case "most":
            keys = -_values_of(index.live_counts, numbers, 0)
        case "best":
            keys = -_values_of(mean_rewards(index), numbers, np.nan)
        case "worst":
            keys = _values_of(mean_rewards(index), numbers, np.nan)
    return numbers[np.argsort(keys, kind="stable")]  # numpy puts NaN last: prompts without a reward


def mean_rewards(index: Index) -> NDArray[np.float64]:
    """Return the mean reward of each prompt number [P] that the index knows; NaN: none is scored. O(live rollouts)"""
    rows = index.live_rows()
    rows = rows[index.column("status", rows) == SCORED]
    num = len(index.counts)
    sums = np.bincount(index.column("prompt", rows), weights=index.column("reward", rows), minlength=num)
    return np.where(index.counts > 0, sums / np.maximum(1, index.counts), np.nan)


def _values_of(values: NDArray, numbers: Numbers, absent: float) -> NDArray:
    """Return values [n] of prompt numbers [n] from `values` [P]; `absent` for numbers that the index does not know."""
    found = np.full(len(numbers), absent, dtype=values.dtype)
    known = numbers < len(values)
    found[known] = values[numbers[known]]
    return found


def by_version(index: Index, number: int) -> list[PromptVersion]:
    """Return counts and mean reward of a prompt's live rollouts per policy version, oldest version first."""
    rows = index.prompt_rows(number, scored_only=False)
    columns = [index.column(name, rows).astype(np.int64) for name in ("lineage", "step")]
    versions, which = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    which = which.reshape(-1)  # numpy 2.0 returns a column
    is_scored = index.column("status", rows) == SCORED
    sums = np.bincount(which[is_scored], index.column("reward", rows)[is_scored], len(versions))
    counts = zip(
        np.bincount(which).tolist(), np.bincount(which[is_scored], minlength=len(versions)).tolist(), strict=True
    )
    return [
        PromptVersion(
            version=str(PolicyVersion(lineage, step)),
            num_rollouts=num,
            num_scored=num_scored,
            reward_mean=total / num_scored if num_scored else None,
        )
        for (lineage, step), (num, num_scored), total in zip(versions.tolist(), counts, sums.tolist(), strict=True)
    ]

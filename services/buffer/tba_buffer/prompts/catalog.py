"""Prompts: uploaded once, numbered in upload order, visited epoch after epoch in an order that the seed decides.

The cursor "epoch:offset:size" lives in Redis, so a restart continues where it was. An epoch visits the train prompts
that existed when it began; prompts uploaded later join the next one. Visit ids are `visit-<epoch>-<offset>`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.api import Prompt, PromptUploadReply
from tba.config import Recipe
from tba.errors import ConflictError
from tba.fields import MAX_NUMBER
from tba_buffer.storage import buffer_epoch
from tba_buffer.storage.context import Context, needed
from tba_buffer.storage.redis_client import redis_errors

Ints = NDArray[np.int64]


class Catalog:
    """All prompts of the run, as Redis holds them.

    Args:
        context: Redis and settings.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._by_id: dict[str, tuple[int, Prompt]] = {}
        self.ids: list[str] = []
        self.train: list[Prompt] = []
        self.heldout: list[Prompt] = []

    def find(self, prompt_id: str) -> tuple[int, Prompt] | None:
        """Return the number and the content of a prompt."""
        return self._by_id.get(prompt_id)

    def numbers_of(self, task: str) -> Ints:
        """Return the numbers of the prompts of a task, ascending. O(prompts)"""
        return np.array([number for number, prompt in self._by_id.values() if prompt.task == task], dtype=np.int64)

    async def load(self) -> None:
        """Read the prompts that Redis has and this process does not know.

        Raises:
            UnavailableError: Redis did not answer.
        """
        redis, keys = self._context.redis, self._context.keys
        async with self._lock:  # two concurrent readers from the same number would add the same prompts twice
            with redis_errors("read the prompts"):
                while ids := await redis.lrange(keys.prompt_order, len(self.ids), len(self.ids) + 999):
                    for prompt_id, text in zip(ids, await redis.hmget(keys.prompts, ids), strict=True):
                        name = prompt_id.decode(errors="replace")
                        self._add(needed(keys.prompts, name, lambda text=text: Prompt.model_validate_json(text)))

    async def reload(self) -> None:
        """Read all prompts again: Redis may have lost some, and have given their numbers to others.

        Raises:
            UnavailableError: Redis did not answer; the known prompts stay.
        """
        async with self._lock:
            # read aside, so that an error leaves the known prompts as they are
            fresh = Catalog(self._context)
            await fresh.load()
            self._by_id, self.ids = fresh._by_id, fresh.ids
            self.train, self.heldout = fresh.train, fresh.heldout

    def _add(self, prompt: Prompt) -> None:
        number = len(self.ids)
        self._by_id[prompt.prompt_id] = (number, prompt)
        self.ids.append(prompt.prompt_id)
        (self.heldout if prompt.split == "heldout" else self.train).append(prompt)

    async def upload(self, prompts: Sequence[Prompt]) -> PromptUploadReply:
        """Add prompts, all or none.

        Raises:
            ConflictError: an id is taken by other content.
            SupersededError: this buffer process does not own the run.
            UnavailableError: Redis did not answer.
        """
        by_id: dict[str, str] = {}
        for prompt in prompts:
            # canonical JSON: upload.lua compares contents byte by byte
            text = json.dumps(prompt.model_dump(), sort_keys=True, ensure_ascii=False)
            if by_id.setdefault(prompt.prompt_id, text) != text:
                raise ConflictError(f"prompt id {prompt.prompt_id!r} occurs twice with different content")
        keys = self._context.keys
        args = [self._context.epoch.number, *(part for pair in by_id.items() for part in pair)]
        reply = await self._context.scripts.run("upload", [keys.prompts, keys.prompt_order, keys.epoch], args)
        if reply == buffer_epoch.SUPERSEDED:
            raise await buffer_epoch.refusal(self._context, "the upload of prompts")
        if reply[0] == b"conflict":
            raise ConflictError(
                f"prompt id {reply[1].decode()!r} is stored with other content; give changed prompts a new id"
            )
        # numbers come from Redis, where another process may have uploaded meanwhile
        await self.load()
        self._context.notify_all()
        num_new = int(reply[1])
        return PromptUploadReply(
            num_new=num_new,
            num_same=len(prompts) - num_new,
            num_train=len(self.train),
            num_heldout=len(self.heldout),
        )


@dataclass(frozen=True, slots=True)
class NextVisit:
    """The next visit, and the cursor once it is taken."""

    visit_id: str
    prompt_id: str
    cursor_after: str


@dataclass(frozen=True, slots=True)
class VisitCursor:
    """Points at the next visit: number `offset` of an epoch of `size` visits."""

    epoch: int
    offset: int
    size: int

    @classmethod
    def parse(cls, cursor: bytes, num_train: int) -> VisitCursor:
        """Read a stored cursor.

        Raises:
            ValueError: it is damaged, or its epoch has more visits than there are train prompts.
        """
        epoch, offset, size = map(int, cursor.split(b":"))
        if not (0 <= epoch <= MAX_NUMBER and 0 <= offset <= size <= num_train):
            raise ValueError(f"{cursor[:100]!r} points at no visit among {num_train} train prompts")
        return cls(epoch, offset, size)


class VisitOrder:
    """Turns a cursor into the visits from there on: the same for the same cursor, seed and prompts.

    Args:
        catalog: the prompts.
        recipe: gives the seed.
    """

    def __init__(self, catalog: Catalog, recipe: Recipe) -> None:
        self._catalog = catalog
        self._seed = recipe.run.seed
        self._shuffled: dict[tuple[int, int], Ints] = {}

    def next(self, cursor: VisitCursor | None, num: int) -> list[NextVisit]:
        """Return the `num` visits from `cursor` on (None: the beginning); none without train prompts."""
        num_train = len(self._catalog.train)
        if not num_train or not num:
            return []
        epoch, offset, size = (0, 0, num_train) if cursor is None else (cursor.epoch, cursor.offset, cursor.size)
        visits = list[NextVisit]()
        for _ in range(num):
            # the epoch is over: the next one has every train prompt that exists now
            if offset >= size:
                epoch, offset, size = epoch + 1, 0, num_train
            prompt = self._catalog.train[self._order(epoch, size)[offset]]
            visits.append(NextVisit(f"visit-{epoch}-{offset}", prompt.prompt_id, f"{epoch}:{offset + 1}:{size}"))
            offset += 1
        return visits

    def _order(self, epoch: int, size: int) -> Ints:
        order = self._shuffled.get((epoch, size))
        if order is None:
            # the visits of one request reach into the next epoch at most: two orders are enough
            for key in list(self._shuffled)[:-1]:
                del self._shuffled[key]
            order = np.random.default_rng([self._seed, epoch]).permutation(size)
            self._shuffled[epoch, size] = order
        return order


def bounded_data(data: dict[str, Any], num_chars: int | None) -> dict[str, Any] | None:
    """Return the data of a prompt, or None where its JSON is longer than `num_chars`."""
    is_long = num_chars is not None and len(json.dumps(data, ensure_ascii=False)) > num_chars
    return None if is_long else data

"""Prompts: uploaded once, numbered in upload order, visited epoch after epoch in an order that the seed decides.

The cursor "epoch:offset:size" lives in Redis, so a restart goes on where it was. An epoch visits the train prompts
that existed when it began; prompts uploaded later join the next one. With `data.selection = "posterior"` an epoch is as
many visits, but the prompt of each is chosen by selection.py. Visit ids are `visit-<epoch>-<offset>`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tba.api import Prompt, PromptUploadReply
from tba.config import Recipe
from tba.errors import ConflictError
from tba.numbers import MAX_NUMBER
from tba_buffer import replica
from tba_buffer.context import Context
from tba_buffer.index import Index
from tba_buffer.redis_link import redis_errors
from tba_buffer.selection import Ints, SelectionSettings, choose

UNREADABLE = "unreadable"


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
        self._train_numbers: Ints = np.zeros(1024, dtype=np.int64)

    def find(self, prompt_id: str) -> tuple[int, Prompt] | None:
        """Number and content of a prompt."""
        return self._by_id.get(prompt_id)

    def train_numbers(self) -> Ints:
        """[P] prompt numbers of the train prompts."""
        return self._train_numbers[: len(self.train)]

    async def load(self) -> None:
        """Read what Redis has beyond what is known here.

        Raises:
            UnavailableError: Redis did not answer.
        """
        redis, keys = self._context.redis, self._context.keys
        async with self._lock:  # two that read from the same number would add the same prompts twice
            with redis_errors("read the prompts"):
                while ids := await redis.lrange(keys.prompt_order, len(self.ids), len(self.ids) + 999):
                    for prompt_id, text in zip(ids, await redis.hmget(keys.prompts, ids), strict=True):
                        self._add_stored(prompt_id.decode(errors="replace"), text)

    async def reload(self) -> None:
        """Read everything again: Redis may have lost prompts, and have given their numbers to others.

        Raises:
            UnavailableError: Redis did not answer; what was known stays.
        """
        async with self._lock:
            fresh = Catalog(self._context)
            await fresh.load()
            self._by_id, self.ids, self._train_numbers = fresh._by_id, fresh.ids, fresh._train_numbers
            self.train, self.heldout = fresh.train, fresh.heldout

    def _add_stored(self, prompt_id: str, text: bytes) -> None:
        """One that cannot be read keeps its number, since rollouts name it; it is neither leased nor evaluated on, and
        no scorer knows its task."""
        prompt = self._context.read_or_note("prompt", prompt_id, lambda: Prompt.model_validate_json(text))
        if prompt is None:
            self._by_id[prompt_id] = (len(self.ids), Prompt(prompt_id=prompt_id, task=UNREADABLE, text=UNREADABLE))
            self.ids.append(prompt_id)
        else:
            self._add(prompt)

    def _add(self, prompt: Prompt) -> None:
        number = len(self.ids)
        self._by_id[prompt.prompt_id] = (number, prompt)
        self.ids.append(prompt.prompt_id)
        if prompt.split == "heldout":
            self.heldout.append(prompt)
            return
        if len(self.train) == len(self._train_numbers):
            self._train_numbers = np.concatenate([self._train_numbers, np.zeros_like(self._train_numbers)])
        self._train_numbers[len(self.train)] = number
        self.train.append(prompt)

    async def upload(self, prompts: Sequence[Prompt]) -> PromptUploadReply:
        """Add prompts, all or none.

        Raises:
            ConflictError: an id is taken by other content.
            SupersededError: this buffer process does not own the run.
            UnavailableError: Redis did not answer.
        """
        by_id: dict[str, str] = {}
        for prompt in prompts:
            text = json.dumps(prompt.model_dump(), sort_keys=True, ensure_ascii=False)
            if by_id.setdefault(prompt.prompt_id, text) != text:
                raise ConflictError(f"prompt id {prompt.prompt_id!r} occurs twice with different content")
        keys = self._context.keys
        args = [self._context.replica.number, *(part for pair in by_id.items() for part in pair)]
        reply = await self._context.scripts.run("upload", [keys.prompts, keys.prompt_order, keys.replica], args)
        if reply == replica.SUPERSEDED:
            raise await replica.refusal(self._context, "the upload of prompts")
        if reply[0] == b"conflict":
            raise ConflictError(
                f"prompt id {reply[1].decode()!r} is stored with other content; give changed prompts a new id"
            )
        await self.load()
        self._context.changed.notify()
        num_new = int(reply[1])
        return PromptUploadReply(
            num_new=num_new,
            num_same=len(prompts) - num_new,
            num_train=len(self.train),
            num_heldout=len(self.heldout),
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """The next visit, and the cursor once it is taken."""

    visit_id: str
    prompt_id: str
    cursor_after: str


@dataclass(frozen=True, slots=True)
class Place:
    """The next visit: number `offset` of an epoch of `size` visits."""

    epoch: int
    offset: int
    size: int


def read_place(cursor: bytes, num_train: int) -> Place:
    """The place that a stored cursor says.

    Raises:
        ValueError: it is damaged, or its epoch has more visits than there are train prompts.
    """
    epoch, offset, size = map(int, cursor.split(b":"))
    if not (0 <= epoch <= MAX_NUMBER and 0 <= offset <= size <= num_train):
        raise ValueError(f"{cursor[:100]!r} is no place among {num_train} train prompts")
    return Place(epoch, offset, size)


class VisitOrder:
    """Turns a place into the visits from there on: the same for the same place, seed, prompts and index.

    Args:
        catalog: the prompts.
        recipe: the seed, and how visits choose prompts (`data.selection`).
    """

    def __init__(self, catalog: Catalog, recipe: Recipe) -> None:
        self._catalog = catalog
        self._seed = recipe.run.seed
        self._selection = SelectionSettings.of(recipe)
        self._shuffled: dict[tuple[int, int], Ints] = {}

    def next(self, place: Place | None, num: int, index: Index) -> list[Candidate]:
        """The `num` visits from `place` on (None: the beginning); none without train prompts."""
        num_train = len(self._catalog.train)
        if not num_train or not num:
            return []
        epoch, offset, size = (0, 0, num_train) if place is None else (place.epoch, place.offset, place.size)
        places = []
        for _ in range(num):
            if offset >= size:
                epoch, offset, size = epoch + 1, 0, num_train
            places.append((epoch, offset, size))
            offset += 1
        chosen = self._in_turn(places) if self._selection is None else self._by_posterior(places, index)
        return [
            Candidate(f"visit-{epoch}-{offset}", self._catalog.train[at].prompt_id, f"{epoch}:{offset + 1}:{size}")
            for (epoch, offset, size), at in zip(places, chosen, strict=True)
        ]

    def _in_turn(self, places: list[tuple[int, int, int]]) -> list[int]:
        return [int(self._order(epoch, size)[offset]) for epoch, offset, size in places]

    def _by_posterior(self, places: list[tuple[int, int, int]], index: Index) -> list[int]:
        assert self._selection is not None
        rng = np.random.default_rng([self._seed, *places[0][:2]])
        numbers = self._catalog.train_numbers()
        return choose(numbers, index.counts, index.successes, len(places), self._selection, rng).tolist()

    def _order(self, epoch: int, size: int) -> Ints:
        order = self._shuffled.get((epoch, size))
        if order is None:
            for key in list(self._shuffled)[:-1]:  # candidates reach into the next epoch: two are enough
                del self._shuffled[key]
            order = np.random.default_rng([self._seed, epoch]).permutation(size)
            self._shuffled[epoch, size] = order
        return order

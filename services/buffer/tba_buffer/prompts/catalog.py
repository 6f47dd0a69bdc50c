"""Prompts: uploaded once, numbered in upload order, visited epoch after epoch in an order that the seed decides.

The cursor "epoch:offset:size" lives in Redis, so a restart continues where it was. An epoch visits the train prompts
that existed when it began; prompts uploaded later join the next one. Visit ids are `visit-<epoch>-<offset>`.

With `data.selection = "posterior"` an epoch has as many visits, but each visit's prompt is chosen by its posterior
success, as in MoPPS (arXiv 2507.04632). A prompt's success rate has the prior Beta(1, 1), so after s successes in n
scored rollouts its posterior is Beta(1 + s, 1 + n - s). Per visit, NUM_CANDIDATES prompts each get one Thompson draw
of their rate, and the draws nearest to the target win. A prompt without scored rollouts draws uniformly, so it is tried
soon. A prompt known to be too easy or too hard draws far from the target, so it is rare until its posterior is wide.

Only rollouts stored now count: eviction replaces the paper's discount of old evidence. So the limits of the buffer
(`max_rollouts`, `max_rollouts_per_prompt`, `max_policy_age_steps`) also bound what the posterior remembers. A prompt
whose rollouts are all evicted has the prior again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tba.api import Prompt, PromptUploadReply
from tba.config import Recipe
from tba.errors import ConflictError
from tba.fields import MAX_NUMBER
from tba_buffer.index.rollout_index import Index
from tba_buffer.storage.context import Context, needed
from tba_buffer.storage.redis_client import redis_errors

Ints = NDArray[np.int64]
TARGET = 0.5
"""The success rate that posterior selection looks for: one half gives the most informative groups."""
NUM_CANDIDATES = 8
"""Random candidates per visit that posterior selection compares."""


class Catalog:
    """All prompts of the run: a copy in memory of those in Redis."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._by_id: dict[str, tuple[int, Prompt]] = {}
        self.ids: list[str] = []
        self.train: list[Prompt] = []
        self.heldout: list[Prompt] = []
        self._train_numbers: Ints = np.zeros(1024, dtype=np.int64)

    def find(self, prompt_id: str) -> tuple[int, Prompt] | None:
        """Return the number and the content of a prompt; None if the id is unknown."""
        return self._by_id.get(prompt_id)

    def train_numbers(self) -> Ints:
        """Return the prompt numbers of the train prompts. [P]"""
        return self._train_numbers[: len(self.train)]

    def numbers_of(self, task: str) -> Ints:
        """Return the numbers of the prompts of a task, ascending. O(prompts)"""
        return np.array([number for number, prompt in self._by_id.values() if prompt.task == task], dtype=np.int64)

    async def load(self) -> None:
        """Read the prompts in Redis that this process does not have yet."""
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
            self._by_id, self.ids, self._train_numbers = fresh._by_id, fresh.ids, fresh._train_numbers
            self.train, self.heldout = fresh.train, fresh.heldout

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
            ConflictError: an id is stored with other content, or occurs twice with different content.
            SupersededError: this buffer process does not own the run.
        """
        by_id: dict[str, str] = {}
        for prompt in prompts:
            # canonical JSON: upload.lua compares contents byte by byte
            text = json.dumps(prompt.document(), sort_keys=True, ensure_ascii=False)
            if by_id.setdefault(prompt.prompt_id, text) != text:
                raise ConflictError(f"prompt id {prompt.prompt_id!r} occurs twice with different content")
        reply = await self._context.scripts.run("upload", prompts=[part for pair in by_id.items() for part in pair])
        if reply[0] == b"conflict":
            raise ConflictError(
                f"prompt id {reply[1].decode()!r} is stored with other content; give changed prompts a new id"
            )
        # numbers come from Redis, where another process may have uploaded meanwhile
        await self.load()
        self._context.notify_all()
        num_new = int(reply[1])
        return PromptUploadReply(
            num_new=num_new, num_same=len(prompts) - num_new, num_train=len(self.train), num_heldout=len(self.heldout)
        )


class NextVisit(NamedTuple):
    """One visit, and the stored cursor ("epoch:offset:size") after it was leased."""

    visit_id: str
    prompt_id: str
    cursor_after: str


class VisitCursor(NamedTuple):
    """Points at the next visit: number `offset` of an epoch of `size` visits."""

    epoch: int
    offset: int
    size: int

    @classmethod
    def parse(cls, cursor: bytes, num_train: int) -> VisitCursor:
        """Parse a stored cursor.

        Raises:
            ValueError: it is damaged, or its epoch has more visits than there are train prompts.
        """
        epoch, offset, size = map(int, cursor.split(b":"))
        if not (0 <= epoch <= MAX_NUMBER and 0 <= offset <= size <= num_train):
            raise ValueError(f"{cursor[:100]!r} points at no visit among {num_train} train prompts")
        return cls(epoch, offset, size)


class VisitOrder:
    """Lists the visits that follow a cursor. The same cursor, seed, prompts and index give the same visits.

    Args:
        recipe: gives the seed, and the way to choose prompts (`data.selection`).
    """

    def __init__(self, catalog: Catalog, recipe: Recipe) -> None:
        self._catalog = catalog
        self._seed = recipe.run.seed
        self._by_posterior = recipe.data.selection == "posterior"
        self._shuffled: dict[tuple[int, int], Ints] = {}

    def next(self, cursor: VisitCursor | None, num: int, index: Index) -> list[NextVisit]:
        """Return the `num` visits from `cursor` on (None: from the beginning); [] if there are no train prompts."""
        train = self._catalog.train
        if not train or not num:
            return []
        epoch, offset, size = cursor or VisitCursor(0, 0, len(train))
        visits = []
        for _ in range(num):
            # the epoch is over: the next one has every train prompt that exists now
            if offset >= size:
                epoch, offset, size = epoch + 1, 0, len(train)
            visits.append((epoch, offset, size))
            offset += 1
        if self._by_posterior:
            # seeded by the first visit: after a restart the same cursor chooses the same prompts
            rng = np.random.default_rng([self._seed, *visits[0][:2]])
            chosen = choose_by_posterior(self._catalog.train_numbers(), index.counts, index.successes, num, rng)
        else:
            chosen = []
            for epoch, offset, size in visits:
                if (epoch, size) not in self._shuffled:
                    # the visits of one request reach into the next epoch at most: two orders are enough
                    for key in list(self._shuffled)[:-1]:
                        del self._shuffled[key]
                    self._shuffled[epoch, size] = np.random.default_rng([self._seed, epoch]).permutation(size)
                chosen.append(self._shuffled[epoch, size][offset])
        return [
            NextVisit(f"visit-{epoch}-{offset}", train[int(at)].prompt_id, f"{epoch}:{offset + 1}:{size}")
            for (epoch, offset, size), at in zip(visits, chosen, strict=True)
        ]


def choose_by_posterior(train_numbers: Ints, counts: Ints, successes: Ints, num: int, rng: np.random.Generator) -> Ints:
    """Draw success rates for random train prompts. Return offsets [num] of the rates nearest to TARGET, in order.

    With fewer train prompts than candidates (red-teaming has one), a prompt may be drawn and chosen more than once.

    Args:
        train_numbers: [P] prompt numbers of the train prompts; the offsets index this array.
        counts: [Q] scored rollouts stored now, per prompt number; prompts beyond its end have none.
        successes: [Q] how many of these rollouts succeeded.
        num: number of visits.
        rng: draws the candidates and their rates.
    """
    num_train, num_drawn = len(train_numbers), NUM_CANDIDATES * num
    offsets = rng.choice(num_train, size=num_drawn, replace=num_drawn > num_train)
    numbers = train_numbers[offsets]
    tried, succeeded = np.zeros((2, num_drawn), dtype=np.int64)
    is_known = numbers < len(counts)
    tried[is_known], succeeded[is_known] = counts[numbers[is_known]], successes[numbers[is_known]]
    rates = rng.beta(1.0 + succeeded, 1.0 + (tried - succeeded))
    return offsets[np.argsort(np.abs(rates - TARGET), kind="stable")[:num]]


def bounded_data(data: dict[str, Any], num_chars: int | None) -> dict[str, Any] | None:
    """Return the data of a prompt, or None where its JSON is longer than `num_chars`."""
    is_long = num_chars is not None and len(json.dumps(data, ensure_ascii=False)) > num_chars
    return None if is_long else data

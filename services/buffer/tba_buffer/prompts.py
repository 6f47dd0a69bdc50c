"""Prompts: uploaded once, numbered in upload order, visited epoch after epoch in an order that the seed decides.

The cursor "epoch:offset:size" lives in Redis, so a restart goes on where it was. An epoch visits the train prompts
that existed when it began; prompts uploaded later join the next one. Visit ids are `visit-<epoch>-<offset>`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from tba.api import Prompt, PromptUploadReply
from tba.errors import BadRequestError, ConflictError
from tba_buffer.context import Context
from tba_buffer.redis_link import redis_errors


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
        """Number and content of a prompt."""
        return self._by_id.get(prompt_id)

    async def load(self) -> None:
        """Read what Redis has beyond what is known here.

        Raises:
            UnavailableError: Redis did not answer.
        """
        redis, keys = self._context.redis, self._context.keys
        async with self._lock:  # two that read from the same number would add the same prompts twice
            with redis_errors("read the prompts"):
                while ids := await redis.lrange(keys.prompt_order, len(self.ids), len(self.ids) + 999):
                    for text in await redis.hmget(keys.prompts, ids):
                        prompt = Prompt.model_validate_json(text)
                        self._by_id[prompt.prompt_id] = (len(self.ids), prompt)
                        self.ids.append(prompt.prompt_id)
                        (self.train if prompt.split == "train" else self.heldout).append(prompt)

    async def upload(self, prompts: Sequence[Prompt]) -> PromptUploadReply:
        """Add prompts, all or none.

        Raises:
            BadRequestError: a prompt that is stored could not be read back.
            ConflictError: an id is taken by other content.
            UnavailableError: Redis did not answer.
        """
        by_id: dict[str, str] = {}
        for prompt in prompts:
            text = json.dumps(prompt.model_dump(), sort_keys=True, ensure_ascii=False)
            _check_readable(prompt.prompt_id, text)
            if by_id.setdefault(prompt.prompt_id, text) != text:
                raise ConflictError(f"prompt id {prompt.prompt_id!r} occurs twice with different content")
        keys = self._context.keys
        args = [part for pair in by_id.items() for part in pair]
        reply = await self._context.scripts.run("upload", [keys.prompts, keys.prompt_order], args)
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


def _check_readable(prompt_id: str, text: str) -> None:
    try:
        Prompt.model_validate_json(text.encode())
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise BadRequestError(f"prompt {prompt_id!r} could not be read back: {reason}; simplify its data") from None


@dataclass(frozen=True, slots=True)
class Candidate:
    """The next visit, and the cursor once it is taken."""

    visit_id: str
    prompt_id: str
    cursor_after: str


class VisitOrder:
    """Turns a cursor into the visits that follow it.

    Args:
        catalog: the prompts.
        seed: shuffles every epoch differently.
    """

    def __init__(self, catalog: Catalog, seed: int) -> None:
        self._catalog = catalog
        self._seed = seed
        self._cached: tuple[tuple[int, int], np.ndarray] | None = None

    def next(self, cursor: str, num: int) -> list[Candidate]:
        """The `num` visits after `cursor` ('' is the beginning); none without train prompts."""
        if not self._catalog.train:
            return []
        epoch, offset, size = map(int, cursor.split(":")) if cursor else (0, 0, len(self._catalog.train))
        found = []
        for _ in range(num):
            if offset >= size:
                epoch, offset, size = epoch + 1, 0, len(self._catalog.train)
            prompt = self._catalog.train[self._order(epoch, size)[offset]]
            offset += 1
            found.append(Candidate(f"visit-{epoch}-{offset - 1}", prompt.prompt_id, f"{epoch}:{offset}:{size}"))
        return found

    def _order(self, epoch: int, size: int) -> np.ndarray:
        if self._cached is None or self._cached[0] != (epoch, size):
            rng = np.random.default_rng([self._seed, epoch])
            self._cached = ((epoch, size), rng.permutation(size))
        return self._cached[1]

"""Keys and values of vLLM's requests when weights change: dropped, or kept by those that run.

    recompute   the whole cache is dropped; running requests go back to vLLM's queue with their tokens
    keep        requests that have tokens stay as they are. What they write has the cache salt that they began with, and
                all others have a new one, so that they find nothing of it

vLLM has no public way to change the salt of requests that wait already, nor to hold requests back, so this asks its
scheduler (internals.py), which is in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tba.config.searcher import KvAtUpdate
from tba.logs import get_logger
from tba_searcher.engines.vllm.internals import Scheduler

log = get_logger("vllm")


class KVCache:
    """Says what becomes of keys and values at an update.

    Args:
        llm: vLLM's engine; with "keep" the batch has room for one request more than may be active.
        scheduler: its scheduler.
    """

    def __init__(self, llm: Any, scheduler: Scheduler, at_update: KvAtUpdate) -> None:
        self._llm, self._scheduler, self._keeps = llm, scheduler, at_update == "keep"
        self._num_updates = 0

    @property
    def salt(self) -> str | None:
        """The cache salt of requests that are added now; None: they need none."""
        # a number and not the version: after a return to it, requests may have mixed its keys with another's
        return str(self._num_updates) if self._keeps else None

    def begin_update(self) -> None:
        """Drop or put aside what the weights before have made; call it after each load, also a broken one."""
        if not self._keeps:
            self._drop()
            return
        self._num_updates += 1
        # a long prompt is computed in pieces: a response without a token yet begins under the new weights alone
        self._scheduler.put_back_without_tokens()
        self._scheduler.salt_waiting(self.salt)

    @contextmanager
    def exclusive(self, *, num_tokens: int) -> Iterator[None]:
        """Let steps inside work only on one request that is added inside; all others wait.

        Args:
            num_tokens: of that request, prompt and response.
        """
        if self._keeps and not self._scheduler.has_room(num_tokens):
            log.info("keys_and_values_dropped", reason="vLLM's cache has no room for the canary")
            self._drop()
        if not self._keeps:
            self._drop()
        with self._scheduler.all_held_back():
            yield

    def _drop(self) -> None:
        """Drop all keys and values; running requests go back to vLLM's queue with their tokens."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

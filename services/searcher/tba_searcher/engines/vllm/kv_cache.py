"""Keys and values of vLLM's requests when weights change: dropped, or kept by those that run.

    recompute   the whole cache is dropped; running requests go back to vLLM's queue with their tokens
    keep        requests that have tokens stay as they are. What they write has the cache salt that they began with, and
                all others have a new one, so that they find nothing of it

vLLM has no public way to change the salt of requests that wait already, nor to hold requests back, so this reaches into
its scheduler, which is in this process. tests/integration/searcher/test_searcher_engines.py runs it against the pinned
vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tba.config.searcher import KvAtUpdate
from tba.logs import get_logger

log = get_logger("vllm")


class KVCache:
    """Says what becomes of keys and values at an update.

    Args:
        llm: vLLM's engine with its scheduler in this process; with "keep" the batch has room for one request more than
            may be active.
    """

    def __init__(self, llm: Any, at_update: KvAtUpdate) -> None:
        self._llm, self._keeps = llm, at_update == "keep"
        self._scheduler: Any = llm.engine_core.engine_core.scheduler
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
        scheduler = self._scheduler
        # a long prompt is computed in pieces: a response without a token yet begins under the new weights alone
        for request in [request for request in reversed(scheduler.running) if not request.num_output_tokens]:
            scheduler.running.remove(request)
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
            scheduler._preempt_request(request, time.monotonic())
        for request in scheduler.waiting:
            request.cache_salt = self.salt
            request.block_hashes.clear()
            request.update_block_hashes()

    @contextmanager
    def exclusive(self, *, num_tokens: int) -> Iterator[None]:
        """Let steps inside work only on one request that is added inside; all others wait.

        Args:
            num_tokens: of that request, prompt and response.
        """
        scheduler = self._scheduler
        if self._keeps and not self._has_room(num_tokens):
            log.info("keys_and_values_dropped", reason="vLLM's cache has no room for the canary")
            self._drop()
        if not self._keeps:
            self._drop()
        # those that run leave the batch of the worker, and come back to it with the next step
        running, scheduler.running = scheduler.running, []
        waiting = [scheduler.waiting.pop_request() for _ in range(len(scheduler.waiting))]
        try:
            yield
        finally:
            scheduler.running = running
            for request in waiting:
                scheduler.waiting.add_request(request)

    def _has_room(self, num_tokens: int) -> bool:
        scheduler = self._scheduler
        # layers with a sliding window, for example, are a group of their own: all groups take blocks of one pool
        sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
        num_needed = sum(-(-num_tokens // size) for size in sizes)
        return scheduler.kv_cache_manager.block_pool.get_num_free_blocks() >= num_needed

    def _drop(self) -> None:
        """Drop all keys and values; running requests go back to vLLM's queue with their tokens."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

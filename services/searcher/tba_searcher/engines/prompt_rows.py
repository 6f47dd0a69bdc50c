"""Which cache row holds the keys and values of which prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tba_searcher.engines.base import Request

Prefix = tuple[int, ...]
"""All prompt tokens but the last: what a prompt row holds."""


class PromptRows:
    """Rows `first_row` .. `first_row + num_rows - 1` of the cache, least recently used out first."""

    def __init__(self, first_row: int, num_rows: int) -> None:
        self._first_row, self._num_rows = first_row, num_rows
        self._rows: dict[Prefix, int] = {}

    def clear(self) -> None:
        """Forget all prompts (their keys and values belong to old weights)."""
        self._rows.clear()

    def row_of(self, request: Request) -> int:
        """The row with the request's prompt; any row for a prompt of one token, which needs none."""
        return self._rows.get(request.prompt_tokens[:-1], self._first_row)

    def plan(self, waiting: deque[Request], num_free: int) -> tuple[list[Request], list[tuple[Sequence[int], int]]]:
        """Take requests off `waiting` whose prompts fit into the rows together.

        When a prompt has to be computed, prompts further back in the queue are computed along with it, so that
        prefill passes are few and full.

        Returns:
            The requests, at most `num_free`, and the (prefix, row) pairs to compute first.
        """
        needed: dict[Prefix, None] = {}
        admitted: list[Request] = []
        while waiting and len(admitted) < num_free:
            prefix = waiting[0].prompt_tokens[:-1]
            if prefix and prefix not in needed and len(needed) == self._num_rows:
                break
            if prefix:
                needed[prefix] = None
            admitted.append(waiting.popleft())
        if all(prefix in self._rows for prefix in needed):
            self._touch(needed)
            return admitted, []
        for request in waiting:
            if len(needed) == self._num_rows:
                break
            if len(request.prompt_tokens) > 1:
                needed[request.prompt_tokens[:-1]] = None
        missing = [prefix for prefix in needed if prefix not in self._rows]
        self._touch(needed)
        free = sorted(set(range(self._first_row, self._first_row + self._num_rows)) - set(self._rows.values()))
        while len(free) < len(missing):
            oldest = next(prefix for prefix in self._rows if prefix not in needed)
            free.append(self._rows.pop(oldest))
        for prefix, row in zip(missing, free, strict=False):
            self._rows[prefix] = row
        return admitted, [(prefix, self._rows[prefix]) for prefix in missing]

    def _touch(self, prefixes: dict[Prefix, None]) -> None:
        for prefix in prefixes:
            if prefix in self._rows:
                self._rows[prefix] = self._rows.pop(prefix)

"""Host-side bookkeeping of all slots as numpy arrays: what a decode step needs costs no Python per row.

Rows 0..num_rows-1 are decoded together. A finished row leaves a hole; new requests take holes first, and `tail_moves`
closes the holes that remain, so that the batch never contains dead rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.versions import PolicyVersion
from tba.wire import VersionSpan
from tba_searcher.engines.base import Completion, Request


@dataclass(slots=True)
class Row:
    """The part of a row that only changes with events, not with tokens."""

    request: Request
    started_at_s: float
    generator: Any = None
    """Random stream of a request that has a seed of its own."""
    span_starts: list[tuple[PolicyVersion, int]] = field(default_factory=list)

    def begin_span(self, version: PolicyVersion, num_response_tokens: int) -> None:
        """Tokens from here on are sampled by `version`; a span without tokens is replaced."""
        if self.span_starts and self.span_starts[-1][1] == num_response_tokens:
            self.span_starts.pop()
        if not self.span_starts or self.span_starts[-1][0] != version:
            self.span_starts.append((version, num_response_tokens))

    def spans(self, num_response_tokens: int) -> tuple[VersionSpan, ...]:
        """The version spans of a response of this length."""
        ends = [start for _, start in self.span_starts[1:]] + [num_response_tokens]
        return tuple(
            VersionSpan(version=version, start=start, end=end)
            for (version, start), end in zip(self.span_starts, ends, strict=True)
        )


class SlotTable:
    """Tokens, positions, log-probs and limits of every slot.

    `position[i]` is the index in `tokens[i]` of the newest token, whose keys and values are not computed yet.
    """

    def __init__(self, num_slots: int, max_len: int) -> None:
        self.num_slots = num_slots
        self.num_rows = 0
        """Rows in use, holes included."""
        self.holes: list[int] = []
        self.rows: list[Row | None] = [None] * num_slots
        self.tokens = np.zeros((num_slots, max_len), np.int64)
        self.logprobs = np.zeros((num_slots, max_len), np.float32)
        self.position = np.zeros(num_slots, np.int64)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        """0 is off, as for greedy rows."""
        self.top_p = np.ones(num_slots, np.float32)
        """1 is off, as for greedy rows."""
        self._prompt_len = np.zeros(num_slots, np.int64)
        self._first_end = np.zeros(num_slots, np.int64)
        """The first position where a response may end before its length limit."""
        self._last_position = np.zeros(num_slots, np.int64)
        self._has_stops = np.zeros(num_slots, np.bool_)
        self._has_options = np.zeros(num_slots, np.bool_)
        self._eos = np.full((num_slots, 1), -1, np.int64)
        self._index = np.arange(num_slots)

    @property
    def num_active(self) -> int:
        """Rows that hold a request."""
        return self.num_rows - len(self.holes)

    def active(self) -> list[int]:
        """Indices of rows that hold a request."""
        return [index for index in range(self.num_rows) if self.rows[index] is not None]

    def put(self, request: Request, version: PolicyVersion, generator: Any = None) -> int:
        """Give a request a row: a hole, or the next one. Returns the row.

        Args:
            generator: the random stream of a request with a seed.
        """
        if self.holes:
            index = self.holes.pop()
        else:
            index = self.num_rows
            self.num_rows += 1
        row = Row(request, time.time(), generator)
        row.begin_span(version, 0)
        self.rows[index] = row
        num_prompt_tokens, eos = len(request.prompt_tokens), request.eos_ids
        self.tokens[index, :num_prompt_tokens] = request.prompt_tokens
        self.position[index] = num_prompt_tokens - 1
        sampling = request.sampling
        draws = sampling.temperature > 0
        self.temperature[index] = sampling.temperature
        self.top_k[index] = sampling.top_k if draws else 0
        self.top_p[index] = sampling.top_p if draws else 1.0
        self._has_stops[index] = bool(sampling.stop)
        self._has_options[index] = bool(
            request.min_response_tokens or self.top_k[index] or self.top_p[index] < 1 or generator
        )
        self._prompt_len[index] = num_prompt_tokens
        self._first_end[index] = num_prompt_tokens + request.min_response_tokens
        self._last_position[index] = num_prompt_tokens - 1 + request.max_response_tokens
        if len(eos) > self._eos.shape[1]:
            self._eos = np.pad(self._eos, ((0, 0), (0, len(eos) - self._eos.shape[1])), constant_values=-1)
        self._eos[index] = -1
        self._eos[index, : len(eos)] = eos
        return index

    def remove(self, index: int) -> None:
        """Leave a hole."""
        self.rows[index] = None
        self.holes.append(index)

    def tail_moves(self) -> list[tuple[int, int]]:
        """Close all holes: returns (from, to) pairs, already applied here; the caller moves keys and values."""
        holes, moves = set(self.holes), []
        for target in sorted(holes):
            while self.num_rows and self.num_rows - 1 in holes:
                self.num_rows -= 1
            if target >= self.num_rows:
                break
            source = self.num_rows - 1
            self.num_rows -= 1
            for array in self._arrays():
                array[target] = array[source]
            self.rows[target], self.rows[source] = self.rows[source], None
            holes.discard(target)
            moves.append((source, target))
        self.holes.clear()
        return moves

    def current_tokens(self) -> NDArray[np.int64]:
        """The newest token of each row, int64 [N]."""
        return self.tokens[self._index[: self.num_rows], self.position[: self.num_rows]]

    @property
    def has_options(self) -> bool:
        """Whether any row is sampled with more than a temperature."""
        return bool(self._has_options[: self.num_rows].any())

    def banned(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and tokens, [B] each, of the ends of sequence that may not be sampled yet."""
        rows, places = np.nonzero(
            (self.position[: self.num_rows] + 1 < self._first_end[: self.num_rows])[:, None]
            & (self._eos[: self.num_rows] >= 0)
        )
        return rows, self._eos[rows, places]

    def limited(self) -> NDArray[np.int64]:
        """Rows with a top-k or a top-p."""
        return np.flatnonzero((self.top_k[: self.num_rows] > 0) | (self.top_p[: self.num_rows] < 1))

    def seeded(self) -> list[tuple[int, Any]]:
        """Rows with a random stream of their own, and the stream."""
        found = [(index, row.generator) for index, row in enumerate(self.rows[: self.num_rows]) if row is not None]
        return [(index, generator) for index, generator in found if generator is not None]

    def append(
        self,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        completes_stop: Callable[[NDArray[np.int64], Request], bool] | None = None,
    ) -> list[tuple[int, str]]:
        """Add one sampled token to every row (there must be no holes); returns (row, reason) of those that finished.

        Args:
            completes_stop: asked for rows with stop strings, with the response so far.
        """
        num = self.num_rows
        index, position = self._index[:num], self.position[:num]
        position += 1
        self.tokens[index, position] = tokens
        self.logprobs[index, position] = logprobs
        stopped = (tokens[:, None] == self._eos[:num]).any(axis=1)
        by_string = np.zeros(num, np.bool_)
        for row in np.flatnonzero(self._has_stops[:num] & ~stopped & (position >= self._first_end[:num])).tolist():
            held = self.rows[row]
            assert held is not None
            assert completes_stop is not None
            by_string[row] = completes_stop(self.tokens[row, self._prompt_len[row] : position[row] + 1], held.request)
        finished = np.flatnonzero(stopped | by_string | (position >= self._last_position[:num]))
        return [
            (row, "stop" if stopped[row] else "stop_string" if by_string[row] else "length")
            for row in finished.tolist()
        ]

    def num_response_tokens(self, index: int) -> int:
        """Response tokens sampled so far."""
        return int(self.position[index] + 1 - self._prompt_len[index])

    def completion(self, index: int, reason: str) -> Completion:
        """The finished row as a value."""
        row = self.rows[index]
        assert row is not None
        response = slice(int(self._prompt_len[index]), int(self.position[index]) + 1)
        return Completion(
            request_id=row.request.request_id,
            response_tokens=self.tokens[index, response].astype(np.int32),
            sampler_logprobs=self.logprobs[index, response].copy(),
            sampling=row.request.sampling,
            finish_reason=reason,
            version_spans=row.spans(response.stop - response.start),
            started_at_s=row.started_at_s,
            finished_at_s=time.time(),
        )

    def _arrays(self) -> tuple[NDArray, ...]:
        return (
            self.tokens,
            self.logprobs,
            self.position,
            self.temperature,
            self.top_k,
            self.top_p,
            self._prompt_len,
            self._first_end,
            self._last_position,
            self._has_stops,
            self._has_options,
            self._eos,
        )

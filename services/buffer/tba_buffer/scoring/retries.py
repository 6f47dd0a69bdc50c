"""The queue of rollouts, by log position, whose score is requested again later.

Away: the reward service answers that the scorer of a rollout is away (an endpoint, models that do not load). Nothing is
wrong with the rollout, so it waits.

    the score is an error of AWAY_REASONS  ->  asked for again after a pause that doubles, MAX_PAUSE_S at most
    MAX_TRIES times in all                 ->  failed, with that reason

Silent: the reward service answers other requests, but not the one with this rollout alone. The rollout is parked: it
is tried alone, later, and blocks no other.

    no answer for it alone, but one for an item that was scored before  ->  parked
    the same SILENT_TRIES times                                         ->  failed, with the reason `refused`
    no item was ever scored, but GET /v1/rewards is answered            ->  the same, after SILENT_TRIES_UNPROVEN

While the service is away, busy, or scores nothing at all, nothing is parked and nothing counts as a try. All of it is
in memory only: after a restart, or when Redis has lost data, the tries begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from tba_buffer.index.rollout_index import Index

MAX_TRIES = 16
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0
LONGEST_WAIT_S = sum(min(FIRST_PAUSE_S * 2**at, MAX_PAUSE_S) for at in range(MAX_TRIES - 1))
"""From the first try to the last, 38 minutes: an endpoint that is rolled out, or lost its machine, is back by then."""
MAX_REQUESTS = 64
"""A request takes at least 1 / MAX_REQUESTS of the due rollouts, even if many tries would make it smaller."""
SILENT_TRIES = 5
SILENT_TRIES_UNPROVEN = 25
"""Tries while no item was ever scored: many, since the only evidence is an answer to another kind of request."""
MIN_PARKED_S, MAX_PARKED_S = 0.5, 30.0
REMOVE_GONE_EVERY_S = 60.0
"""Pause between removals of gone rollouts: hundreds of thousands may wait, and every one is looked at."""


@dataclass(slots=True)
class _Retry:
    num_away: int = 0
    num_silent: int = 0
    retry_at_s: float = 0.0


class RetryQueue:
    """The rollouts that wait for another try, by log position."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[int, _Retry] = {}
        self._silent: set[int] = set()
        self._new_had_turn = False
        self._removed_gone_at_s = clock()
        self.problem: str | None = None
        """The last reason why a scorer was away; None once no rollout waits for one."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_silent(self) -> int:
        """Number of parked rollouts."""
        return len(self._silent)

    @property
    def num_away(self) -> int:
        """Number of rollouts whose scorer is away."""
        return len(self._waiting) - len(self._silent)

    def record_away(self, position: int, reason: str) -> bool:
        """Record that the scorer of a rollout was away. Return whether to give the rollout up.

        After the last try the rollout has no pause, but its tries stay counted until `remove`. It may be requested once
        more, together with other rollouts of its request that wait.
        """
        self.problem = reason
        self._silent.discard(position)
        waiting = self._waiting.setdefault(position, _Retry())
        waiting.num_away, waiting.num_silent = waiting.num_away + 1, 0
        gave_up = waiting.num_away >= MAX_TRIES
        # given up, it must not keep the others of its request waiting
        pause_s = 0.0 if gave_up else min(FIRST_PAUSE_S * 2 ** (waiting.num_away - 1), MAX_PAUSE_S)
        waiting.retry_at_s = self._clock() + pause_s
        return gave_up

    def record_silence(self, position: int, *, is_unproven: bool) -> bool:
        """Record that the service, which is up, did not answer for this rollout alone. Return whether to give it up.

        Args:
            is_unproven: nothing was ever scored, so only GET /v1/rewards shows that the service is up.
        """
        self._silent.add(position)
        waiting = self._waiting.setdefault(position, _Retry())
        waiting.num_silent += 1
        waiting.retry_at_s = self._clock() + min(MIN_PARKED_S * 2 ** (waiting.num_silent - 1), MAX_PARKED_S)
        return waiting.num_silent >= (SILENT_TRIES_UNPROVEN if is_unproven else SILENT_TRIES)

    def remove(self, positions: Collection[int]) -> None:
        """Remove rollouts that have a score, are stored as given up, or are gone."""
        for position in positions:
            self._waiting.pop(position, None)
            self._silent.discard(position)
        if not self.num_away:
            self.problem = None

    def remove_gone(self, index: Index) -> None:
        """Remove the rollouts that are no longer stored, at most once per REMOVE_GONE_EVERY_S."""
        # abs: the wall clock may go back
        if not self._waiting or abs(self._clock() - self._removed_gone_at_s) < REMOVE_GONE_EVERY_S:
            return
        self._removed_gone_at_s = self._clock()
        positions = np.array(list(self._waiting), dtype=np.int64)
        self.remove(positions[index.rows_at(positions) < 0].tolist())

    def is_too_early(self, positions: Collection[int]) -> bool:
        """Return whether one of these rollouts is not due yet."""
        now = self._clock()
        return any(at in self._waiting and self._waiting[at].retry_at_s > now for at in positions)

    def next_due(self, positions: list[int], max_items: int) -> list[int]:
        """Return which of these log positions to request scores for now; [] if none is due.

        A silent rollout that is due is returned alone. Otherwise calls alternate: one returns all new rollouts, the
        other about max_items / 2^n of the due ones, where n is the number of tries of the first.

        Args:
            positions: of pending rollouts.
            max_items: the most due rollouts that one request may hold; new ones are not cut to it.
        """
        now, waiting_at = self._clock(), self._waiting.get
        new, due = list[int](), list[int]()
        for at in positions:
            if (waiting := waiting_at(at)) is None:
                new.append(at)
            elif waiting.retry_at_s <= now:
                if waiting.num_silent:
                    return [at]
                due.append(at)
        # they take turns, so that the scorer of one task that is away does not hold up the others
        self._new_had_turn = bool(new) and not (due and self._new_had_turn)
        if self._new_had_turn or not due:
            return new
        # half as many per try: an item that keeps an endpoint from answering then takes no others with it
        by_tries = max_items >> self._waiting[due[0]].num_away
        return due[: max(1, by_tries, -(-len(due) // MAX_REQUESTS))]

"""Rollouts whose score has to be asked for again later: those of a scorer that is away, and those that get no answer.

`RetryQueue`: the reward service answers that the scorer of a rollout is away (an endpoint, models that do not load).
Nothing is wrong with the rollout, so it waits.

    the score is an error of AWAY_REASONS  ->  asked for again after a pause that doubles, MAX_PAUSE_S at most
    MAX_TRIES times in all                 ->  failed, with that reason

`DeadLetters`: the reward service answers other requests, but not the one with this rollout alone. It is parked behind
the others, and blocks none of them.

    alone, no answer; an item that was scored before is scored at once  ->  parked
    the same DEAD_LETTER_TRIES times                                    ->  failed, with the reason `refused`
    none was ever scored, but GET /v1/rewards is answered               ->  the same, after DEAD_LETTER_TRIES_UNPROVEN

While the service is away, busy, or scores nothing at all, nothing is parked and nothing counts as a try. Both are in
memory only: after a restart, or when Redis has lost data, the tries begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

MAX_TRIES = 16
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0
LONGEST_WAIT_S = sum(min(FIRST_PAUSE_S * 2**at, MAX_PAUSE_S) for at in range(MAX_TRIES - 1))
"""From the first try to the last, 38 minutes: an endpoint that is rolled out, or lost its machine, is back by then."""
MAX_REQUESTS = 64
"""All rollouts that are due are asked for again in so many requests, however small their tries would make these."""
STALE_AFTER_S = 600.0
REMOVE_STALE_EVERY_S = 60.0
"""Hundreds of thousands may wait: looking at each of them for every request would hold up the service."""
DEAD_LETTER_TRIES = 5
DEAD_LETTER_TRIES_UNPROVEN = 25
"""Many, because the only evidence against the item then is that the service answers another kind of request."""
MIN_PARKED_S, MAX_PARKED_S = 0.5, 30.0
DEAD_LETTERS_STALE_AFTER_S = 120.0


@dataclass(slots=True)
class _Retry:
    num_tries: int = 0
    retry_at_s: float = 0.0


class RetryQueue:
    """The rollouts that wait for their scorer, by log position."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[int, _Retry] = {}
        self._new_had_turn = False
        self._removed_stale_at_s = clock()
        self.problem: str | None = None
        """The reason of the last failure."""

    def __len__(self) -> int:
        return len(self._waiting)

    def record_failure(self, position: int, reason: str) -> bool:
        """Record that the scorer of a rollout was away. Return whether to give up.

        A rollout that was given up waits no longer, but stays known until `remove`: if it is asked for once more
        because others of its request wait, its tries do not begin again.
        """
        self.problem = reason
        waiting = self._waiting.setdefault(position, _Retry())
        waiting.num_tries += 1
        gave_up = waiting.num_tries >= MAX_TRIES
        # given up, it must not keep the others of its request waiting
        pause_s = 0.0 if gave_up else min(FIRST_PAUSE_S * 2 ** (waiting.num_tries - 1), MAX_PAUSE_S)
        waiting.retry_at_s = self._clock() + pause_s
        return gave_up

    def remove(self, positions: Collection[int]) -> None:
        """Remove rollouts that have a score, are stored as given up, or are gone."""
        for position in positions:
            self._waiting.pop(position, None)
        if not self._waiting:
            self.problem = None

    def remove_stale(self) -> None:
        """Remove rollouts that nobody has asked for in a long time: they were evicted."""
        now = self._clock()
        # abs: the wall clock may go back
        if abs(now - self._removed_stale_at_s) < REMOVE_STALE_EVERY_S:
            return
        self._removed_stale_at_s = now
        self.remove([at for at, each in self._waiting.items() if each.retry_at_s + STALE_AFTER_S < now])

    def is_too_early(self, positions: Collection[int]) -> bool:
        """Return whether one of these rollouts is not due yet."""
        now = self._clock()
        return any(at in self._waiting and self._waiting[at].retry_at_s > now for at in positions)

    def next_due(self, positions: list[int], max_items: int) -> list[int]:
        """Return the positions to ask for now: new ones, or as many of those that are due again as their tries allow.

        Args:
            max_items: the most that one request may hold.
        """
        now, waiting_at = self._clock(), self._waiting.get
        new, due = list[int](), list[int]()
        for at in positions:
            if (waiting := waiting_at(at)) is None:
                new.append(at)
            elif waiting.retry_at_s <= now:
                due.append(at)
        # they take turns, so that the scorer of one task that is away does not hold up the others
        self._new_had_turn = bool(new) and not (due and self._new_had_turn)
        if self._new_had_turn or not due:
            return new
        # half as many per try: an item that keeps an endpoint from answering then takes no others with it
        by_tries = max_items >> self._waiting[due[0]].num_tries
        return due[: max(1, by_tries, -(-len(due) // MAX_REQUESTS))]


class DeadLetters:
    """The parked rollouts, by log position."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._parked: dict[int, _Retry] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def record_failure(self, position: int, *, is_unproven: bool) -> bool:
        """Record that the service, which is up, did not answer for this rollout alone. Return whether to give up.

        Args:
            is_unproven: nothing was ever scored, so only GET /v1/rewards shows that the service is up.
        """
        parked = self._parked.setdefault(position, _Retry())
        parked.num_tries += 1
        parked.retry_at_s = self._clock() + min(MIN_PARKED_S * 2 ** (parked.num_tries - 1), MAX_PARKED_S)
        return parked.num_tries >= (DEAD_LETTER_TRIES_UNPROVEN if is_unproven else DEAD_LETTER_TRIES)

    def remove(self, positions: Collection[int]) -> None:
        """Remove rollouts that are answered, given up or gone."""
        for position in positions:
            self._parked.pop(position, None)

    def remove_stale(self) -> None:
        """Remove rollouts that nobody has tried for long: they were evicted."""
        now = self._clock()
        self.remove([at for at, each in self._parked.items() if each.retry_at_s + DEAD_LETTERS_STALE_AFTER_S < now])

    def next_due(self, positions: list[int]) -> list[int]:
        """Return the positions to ask for now: one parked rollout that is due again, alone; else all not parked."""
        now = self._clock()
        due = [at for at in positions if at in self._parked and self._parked[at].retry_at_s <= now]
        return due[:1] or [at for at in positions if at not in self._parked]

"""Rollouts whose scorer is away (an endpoint, models that do not load): nothing is wrong with them, so they wait.

    the score is an error of AWAY_REASONS  ->  asked for again after a pause that doubles, MAX_PAUSE_S at most
    NUM_TRIES times in all                 ->  failed, with that reason

A request that asks again holds half as many as the one before it: one item that keeps an endpoint from answering then
takes no others with it. What is new and what is due again take turns, so that one task's scorer holds up no other's.
In memory only: after a restart, or when Redis has lost data, the tries begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

NUM_TRIES = 16
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0
LONGEST_S = sum(min(FIRST_PAUSE_S * 2**at, MAX_PAUSE_S) for at in range(NUM_TRIES - 1))
"""From the first try to the last, 38 minutes: an endpoint that is rolled out, or lost its machine, is back by then."""
MAX_REQUESTS = 64
"""In which all that is due is asked for again, however small they would be by their tries."""
FORGET_AFTER_S = 600.0
FORGET_EVERY_S = 60.0
"""Hundreds of thousands may wait: looking at each of them for every request would hold up the service."""


@dataclass(slots=True)
class _Waiting:
    num_tries: int = 0
    retry_at_s: float = 0.0


class Postponed:
    """The rollouts that wait for their scorer, by log position.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[int, _Waiting] = {}
        self._new_had_turn = False
        self._forgot_at_s = clock()
        self.problem: str | None = None
        """What was said of the last one."""

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, position: int, reason: str) -> bool:
        """The scorer was away; answers whether to give up. One that is given up waits no longer, but is known until
        `forget`: asked for once more, since others of its request wait, it does not begin its tries anew."""
        self.problem = reason
        waiting = self._waiting.setdefault(position, _Waiting())
        waiting.num_tries += 1
        is_given_up = waiting.num_tries >= NUM_TRIES
        pause_s = 0.0 if is_given_up else min(FIRST_PAUSE_S * 2 ** (waiting.num_tries - 1), MAX_PAUSE_S)
        waiting.retry_at_s = self._clock() + pause_s
        return is_given_up

    def forget(self, positions: Collection[int]) -> None:
        """These have a score, are stored as given up, or are gone."""
        for position in positions:
            self._waiting.pop(position, None)
        if not self._waiting:
            self.problem = None

    def forget_old(self) -> None:
        """Forget what nobody has asked for in long, because it was evicted or its job was cancelled."""
        now = self._clock()
        if abs(now - self._forgot_at_s) < FORGET_EVERY_S:
            return
        self._forgot_at_s = now
        self.forget([at for at, each in self._waiting.items() if each.retry_at_s + FORGET_AFTER_S < now])

    def are_waiting(self, positions: Collection[int]) -> bool:
        """Whether it is too early to ask for one of these."""
        now = self._clock()
        return any(at in self._waiting and self._waiting[at].retry_at_s > now for at in positions)

    def first(self, positions: list[int], most: int) -> list[int]:
        """Which of these to ask for now: those that never had a turn, or as many of those that are due again as their
        tries allow.

        Args:
            most: how many a request may hold.
        """
        now, waiting_at = self._clock(), self._waiting.get
        new, due = list[int](), list[int]()
        for at in positions:
            if (waiting := waiting_at(at)) is None:
                new.append(at)
            elif waiting.retry_at_s <= now:
                due.append(at)
        self._new_had_turn = bool(new) and not (due and self._new_had_turn)
        if self._new_had_turn or not due:
            return new
        by_tries = most >> self._waiting[due[0]].num_tries
        return due[: max(1, by_tries, -(-len(due) // MAX_REQUESTS))]

"""Rollouts whose request alone the reward service cannot answer, while it answers otherwise: they block no others.

    alone, no answer; another one that was scored before is scored at once  ->  set aside, behind the others
    that NUM_TRIES times                                                    ->  failed, with the reason `refused`
    none was ever scored, but GET /v1/rewards is answered                   ->  the same, after NUM_TRIES_ALONE times

While the service is away, busy, or scores nothing at all, nothing is set aside and nothing counts as a try.
In memory only: after a restart, or when Redis has lost data, the tries begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

NUM_TRIES = 5
NUM_TRIES_ALONE = 25
"""Many, because all that speaks against the item then is that the service answers another kind of request."""
MIN_ASIDE_S, MAX_ASIDE_S = 0.5, 30.0
FORGET_AFTER_S = 120.0


@dataclass(slots=True)
class _Aside:
    num_tries: int = 0
    retry_at_s: float = 0.0


class Refusals:
    """The rollouts that are set aside, by log position.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asides: dict[int, _Aside] = {}

    def __len__(self) -> int:
        return len(self._asides)

    def forget_old(self) -> None:
        """Forget what nobody has tried for long, because it was evicted or its job was cancelled."""
        now = self._clock()
        self.forget([at for at, aside in self._asides.items() if aside.retry_at_s + FORGET_AFTER_S < now])

    def note(self, position: int, *, is_alone: bool) -> bool:
        """The service, which is up, did not answer a request with this rollout alone; answers whether to give up.

        Args:
            is_alone: nothing was ever scored, so that only GET /v1/rewards says that it is up.
        """
        aside = self._asides.setdefault(position, _Aside())
        aside.num_tries += 1
        aside.retry_at_s = self._clock() + min(MIN_ASIDE_S * 2 ** (aside.num_tries - 1), MAX_ASIDE_S)
        return aside.num_tries >= (NUM_TRIES_ALONE if is_alone else NUM_TRIES)

    def forget(self, positions: Collection[int]) -> None:
        """These are answered, given up or gone."""
        for position in positions:
            self._asides.pop(position, None)

    def first(self, positions: list[int]) -> list[int]:
        """Which of these to ask for now: one that is due again, alone, or else all that are not set aside."""
        now = self._clock()
        due = [at for at in positions if at in self._asides and self._asides[at].retry_at_s <= now]
        return due[:1] or [at for at in positions if at not in self._asides]

"""The reward of one task from the scores of its parts.

gates, in their order:  a score below its gate  ->  gate_value; the item is asked of nobody else
all other parts at once ->  sum of weight times score, gates with a weight included
any score that was asked for and is unknown  ->  the reward is unknown, for the reason of that part
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tba.config.reward import TaskReward
from tba_reward.part import IDLE, Part
from tba_reward.scorers.base import Failure, Item, Outcome, checked
from tba_reward.scorers.example import OK

VERSION_HEX = 12


@dataclass(slots=True)
class Scored:
    """What is known of one item: the scores of the parts that were asked, and then the reward or why there is none."""

    parts: dict[str, float] = field(default_factory=dict)
    outcome: Outcome | None = None


class Composition:
    """The reward of one task.

    Args:
        task: its name.
        config: weights and gates.
        parts: one per scorer of the config, in its order.
        is_required: whether the service is ready only when this is healthy; otherwise the first item starts it.
    """

    def __init__(self, task: str, config: TaskReward, parts: Sequence[Part], *, is_required: bool) -> None:
        self.task, self.parts, self.is_required = task, list(parts), is_required
        self._gate_value = config.gate_value
        self._gates = [part for part in parts if part.spec.gate is not None]
        self._others = [part for part in parts if part.spec.gate is None]

    @property
    def is_inline(self) -> bool:
        """Whether its items wait for nothing."""
        return all(part.is_inline for part in self.parts)

    @property
    def version(self) -> str:
        """`task@digest`: changes whenever the same completion may be worth another reward."""
        scorers = [[part.version, part.name, part.spec.factor, part.spec.gate] for part in self.parts]
        document = json.dumps([scorers, self._gate_value])
        return f"{self.task}@{hashlib.sha256(document.encode()).hexdigest()[:VERSION_HEX]}"

    @property
    def health(self) -> str:
        """`ok`, `idle`, or what is wrong with which part."""
        bad = {part.name: part.health for part in self.parts if part.health != OK}
        if not bad:
            return OK
        if set(bad.values()) == {IDLE}:
            return IDLE
        return "; ".join(f"{name}: {health}" for name, health in bad.items())

    @property
    def is_away(self) -> bool:
        """Whether nothing is wrong but that something elsewhere is away."""
        return self.health not in (OK, IDLE) and all(part.health == OK or part.is_away for part in self.parts)

    @property
    def broken(self) -> str | None:
        """Which part raises for every item, and what; or None."""
        return next((f"{part.name}: {part.broken}" for part in self.parts if part.broken is not None), None)

    def begin(self) -> None:
        """Start all parts in the background."""
        for part in self.parts:
            part.begin()

    async def close(self) -> None:
        """Stop all parts."""
        await asyncio.gather(*(part.close() for part in self.parts))

    async def score(self, items: Sequence[Item]) -> list[Scored]:
        """One result per item, in order; its outcome is never None."""
        found = [Scored() for _ in items]
        for part in self._gates:
            asked = _open(found)
            for at, outcome in zip(asked, await part.score([items[at] for at in asked]), strict=True):
                self._note(found[at], part, outcome)
        asked = _open(found)
        chosen = [items[at] for at in asked]
        for part, outcomes in zip(
            self._others, await asyncio.gather(*(part.score(chosen) for part in self._others)), strict=True
        ):
            for at, outcome in zip(asked, outcomes, strict=True):
                self._note(found[at], part, outcome)
        for each in found:
            if each.outcome is None:
                each.outcome = self._sum(each.parts)
        return found

    def _note(self, scored: Scored, part: Part, outcome: Outcome) -> None:
        if not isinstance(outcome, Failure):
            scored.parts[part.name] = outcome
            if part.spec.gate is not None and outcome < part.spec.gate:
                scored.outcome = self._gate_value
        elif scored.outcome is None:
            detail = outcome.detail if len(self.parts) == 1 else f"{part.name}: {outcome.detail}"
            scored.outcome = Failure(outcome.reason, detail)

    def _sum(self, scores: dict[str, float]) -> Outcome:
        outcome = checked(math.fsum(part.spec.factor * scores[part.name] for part in self.parts))
        if isinstance(outcome, Failure):
            return Failure(outcome.reason, f"the weighted sum: {outcome.detail}")
        return outcome


def _open(found: Sequence[Scored]) -> list[int]:
    return [at for at, scored in enumerate(found) if scored.outcome is None]

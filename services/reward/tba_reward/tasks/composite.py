"""The reward of one task from the scores of its components.

gates, in their order:  a score below its gate -> `gate_value`; no other component is asked for the item
all others at once:     sum of weight times score, gates with a weight included
a score that was asked for is unknown:  the reward is unknown, for the same reason
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tba.config.reward import TaskReward
from tba_reward.scorer import OK, Failure, Item, Outcome, checked
from tba_reward.tasks.component import IDLE, RewardComponent

VERSION_HEX = 12


@dataclass(slots=True)
class ItemReward:
    """The known scores of one item by component, and in the end the reward or why there is none."""

    parts: dict[str, float] = field(default_factory=dict)
    outcome: Outcome | None = None


class CompositeReward:
    """The reward of one task.

    Args:
        task: its name.
        config: weights and gates.
        components: one per scorer of the config, in its order.
        is_required: whether the service is ready only when this is healthy; otherwise the first item starts it.
    """

    def __init__(
        self, task: str, config: TaskReward, components: Sequence[RewardComponent], *, is_required: bool
    ) -> None:
        self.task, self.components, self.is_required = task, list(components), is_required
        self._gate_value = config.gate_value
        self._gates = [each for each in components if each.spec.gate is not None]
        self._others = [each for each in components if each.spec.gate is None]

    @property
    def is_inline(self) -> bool:
        """Whether its items wait for nothing."""
        return all(each.is_inline for each in self.components)

    @property
    def version(self) -> str:
        """`task@digest`: changes whenever the same completion may be worth another reward."""
        scorers = [[each.version, each.name, each.spec.factor, each.spec.gate] for each in self.components]
        document = json.dumps([scorers, self._gate_value])
        return f"{self.task}@{hashlib.sha256(document.encode()).hexdigest()[:VERSION_HEX]}"

    @property
    def health(self) -> str:
        """`ok`, `idle`, or the problem of each component."""
        bad = {each.name: each.health for each in self.components if each.health != OK}
        if not bad:
            return OK
        if set(bad.values()) == {IDLE}:
            return IDLE
        return "; ".join(f"{name}: {health}" for name, health in bad.items())

    @property
    def is_away(self) -> bool:
        """Whether the only problem is that something elsewhere is away."""
        return self.health not in (OK, IDLE) and all(each.health == OK or each.is_away for each in self.components)

    @property
    def broken(self) -> str | None:
        """The component that raises for every item, with its error; or None."""
        return next((f"{each.name}: {each.broken}" for each in self.components if each.broken is not None), None)

    def start(self) -> None:
        """Start all components in the background."""
        for each in self.components:
            each.start()

    async def close(self) -> None:
        """Stop all components."""
        await asyncio.gather(*(each.close() for each in self.components))

    async def score(self, items: Sequence[Item]) -> list[ItemReward]:
        """Return one reward per item, in order; its outcome is never None."""
        rewards = [ItemReward() for _ in items]
        # one after the other: an item below a gate is asked of no other component
        for gate in self._gates:
            places = _undecided(rewards)
            for at, outcome in zip(places, await gate.score([items[at] for at in places]), strict=True):
                self._note(rewards[at], gate, outcome)
        places = _undecided(rewards)
        chosen = [items[at] for at in places]
        scores = await asyncio.gather(*(each.score(chosen) for each in self._others))
        for component, outcomes in zip(self._others, scores, strict=True):
            for at, outcome in zip(places, outcomes, strict=True):
                self._note(rewards[at], component, outcome)
        for each in rewards:
            if each.outcome is None:
                each.outcome = self._sum(each.parts)
        return rewards

    def _note(self, reward: ItemReward, component: RewardComponent, outcome: Outcome) -> None:
        if not isinstance(outcome, Failure):
            reward.parts[component.name] = outcome
            if component.spec.gate is not None and outcome < component.spec.gate:
                reward.outcome = self._gate_value
        elif reward.outcome is None:
            # a single component needs no name
            detail = outcome.detail if len(self.components) == 1 else f"{component.name}: {outcome.detail}"
            reward.outcome = Failure(outcome.reason, detail)

    def _sum(self, scores: dict[str, float]) -> Outcome:
        outcome = checked(math.fsum(each.spec.factor * scores[each.name] for each in self.components))
        if isinstance(outcome, Failure):
            return Failure(outcome.reason, f"the weighted sum: {outcome.detail}")
        return outcome


def _undecided(rewards: Sequence[ItemReward]) -> list[int]:
    return [at for at, reward in enumerate(rewards) if reward.outcome is None]

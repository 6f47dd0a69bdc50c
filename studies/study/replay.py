"""The buffer in this process: the product's index and its draw, without the service around them."""

from __future__ import annotations

import numpy as np
from tba_buffer.index.log import RECORD_DTYPE, SCORED, Publication, RolloutsAdded
from tba_buffer.index.rollout_index import Index, IndexSettings
from tba_buffer.sampling.mop import DrawSettings, draw_slots, drawn_event

from tba.config import Recipe
from tba.versions import PolicyVersion
from tba.wire import Group, Rollout


class Replay:
    """Keeps every rollout; draws batches as the buffer service does."""

    def __init__(self, recipe: Recipe, *, seed: int) -> None:
        self._index = Index(IndexSettings.of(recipe))
        self._recipe = recipe
        self._rollouts: dict[int, Rollout] = {}
        """By position in the log."""
        self._rng = np.random.default_rng([seed, 2])
        self._numbers: dict[str, int] = {}

    def exchange(self, groups: list[Group], step: int, *, has_published: bool = True) -> list[Group]:
        """Put new groups in, then draw the batch of optimizer step `step`.

        Args:
            has_published: whether a version is published after this step, so what is there is recent no more.
        """
        index = self._index
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        records = np.zeros(len(rollouts), dtype=RECORD_DTYPE)
        for record, rollout in zip(records, rollouts, strict=True):
            record["rollout_id"] = rollout.rollout_id
            record["reward"] = np.nan if rollout.reward is None else rollout.reward
            record["prompt"] = self._numbers.setdefault(rollout.prompt_id, len(self._numbers))
            record["lineage"], record["step"] = rollout.version.lineage, rollout.version.step
            record["num_tokens"], record["num_bytes"] = len(rollout.response_tokens), 1
            record["status"] = SCORED
        first = index.position + 1
        self._rollouts |= {first + place: rollout for place, rollout in enumerate(rollouts)}
        index.apply(RolloutsAdded(first, records))
        slots = draw_slots(index, DrawSettings.of(self._recipe, step=step), int(self._rng.integers(2**62)))
        drawn = []
        for slot in slots:
            if slot.left_out:
                continue
            chosen = tuple(self._rollouts[int(place)] for place in index.column("position", slot.rows))
            drawn.append(
                Group(prompt_id=chosen[0].prompt_id, source=slot.source, fallback=slot.fallback, rollouts=chosen)
            )
        index.apply(drawn_event(index, slots, f"{step}", PolicyVersion(1, step)))
        if has_published:
            index.apply(Publication(index.position + 1, PolicyVersion(1, step)))
        return drawn

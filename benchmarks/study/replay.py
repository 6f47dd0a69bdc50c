"""The buffer in this process: the product's index and its MOP draw, without the service around them."""

from __future__ import annotations

import numpy as np
from tba_buffer.index.log import RECORD_DTYPE, SCORED, Publication, RolloutsAdded
from tba_buffer.index.rollout_index import Index, IndexSettings
from tba_buffer.sampling.mop import DrawSettings, draw_slots

from tba.config import Recipe
from tba.versions import PolicyVersion
from tba.wire import Group, Rollout


class Replay:
    """Keeps every rollout; draws batches as the buffer service does. A sync mark stands at every step."""

    def __init__(self, recipe: Recipe, *, seed: int) -> None:
        self._index = Index(IndexSettings.of(recipe))
        self._draw = DrawSettings.of(recipe)
        self._rollouts: list[Rollout] = []
        self._rng = np.random.default_rng([seed, 2])
        self._numbers: dict[str, int] = {}

    def exchange(self, groups: list[Group], version: int) -> list[Group]:
        """Put new groups in, then draw a batch."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        records = np.zeros(len(rollouts), dtype=RECORD_DTYPE)
        for record, rollout in zip(records, rollouts, strict=True):
            record["rollout_id"] = rollout.rollout_id
            record["reward"] = np.nan if rollout.reward is None else rollout.reward
            record["prompt"] = self._numbers.setdefault(rollout.prompt_id, len(self._numbers))
            record["lineage"], record["step"] = rollout.version.lineage, version
            record["num_tokens"], record["num_bytes"] = len(rollout.response_tokens), 1
            record["status"] = SCORED
        self._rollouts += rollouts
        self._index.apply(RolloutsAdded(self._index.position + 1, records))
        slots = draw_slots(self._index, self._draw, int(self._rng.integers(2**62)))
        drawn = []
        for slot in slots:
            positions = self._index.column("position", slot.rows)
            # every rollout takes one position, and so does every mark that stands before it
            chosen = tuple(self._rollouts[self._number(int(position))] for position in positions)
            drawn.append(
                Group(prompt_id=chosen[0].prompt_id, source=slot.source, fallback=slot.fallback, rollouts=chosen)
            )
        self._index.apply(Publication(self._index.position + 1, PolicyVersion(1, version)))
        return drawn

    def _number(self, position: int) -> int:
        per_step = self._draw.prompts_per_batch * self._draw.group_size + 1
        return position - 1 - (position - 1) // per_step

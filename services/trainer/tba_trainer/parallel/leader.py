"""Rank 0's learner and snapshots: they tell the followers what to do before they do it (follower.py does the same).

Every method here has its command there; a new one needs both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from tba.config import Recipe
from tba.versions import PolicyVersion
from tba.wire import Batch, DrawnGroup, encode_batch, encode_rollout
from tba_trainer.learner import Learner, trainer_rng
from tba_trainer.parallel.team import Shared, Team
from tba_trainer.snapshots import Snapshot, Snapshots
from tba_trainer.trainer_state import TrainerState
from tba_trainer.values import StepValues


class LeadingLearner(Learner):
    """A learner whose every change is made by all processes of the team."""

    def __init__(self, model: Any, recipe: Recipe, team: Team) -> None:
        super().__init__(model, recipe, trainer_rng(recipe), ranks=team.ranks())
        self._team = team

    def gradients(
        self, batch: Batch, *, step: int, policy_ages: Sequence[int], values: StepValues | None = None
    ) -> dict[str, float | None]:
        """See `Learner.gradients`."""
        told = {
            "batch": encoded(batch),
            "step": step,
            "policy_ages": list(policy_ages),
            "values": None if values is None else asdict(values),
        }
        with self._team.lead("gradients", **told):
            return super().gradients(batch, step=step, policy_ages=policy_ages, values=values)

    def apply(self, *, step: int, lineage: int, values: StepValues | None = None) -> None:
        """See `Learner.apply`."""
        told = {"step": step, "lineage": lineage, "values": None if values is None else asdict(values)}
        with self._team.lead("apply", **told):
            super().apply(step=step, lineage=lineage, values=values)

    def skip(self, *, step: int, lineage: int) -> None:
        """See `Learner.skip`."""
        with self._team.lead("skip", step=step, lineage=lineage):
            super().skip(step=step, lineage=lineage)

    def discard(self) -> None:
        """See `Learner.discard`."""
        with self._team.lead("discard"):
            super().discard()

    def load_weights(self, tensors: Mapping[str, Tensor], *, what: str) -> None:
        """See `Learner.load_weights`."""
        with self._team.lead("load_weights", names=list(tensors), what=what):
            super().load_weights(Shared(self._team, list(tensors), tensors), what=what)

    def capture(self) -> Iterator[tuple[str, str, Tensor]]:
        """See `Learner.capture`."""
        with self._team.lead("capture"):
            yield from super().capture()

    def restore(self, state: TrainerState, sections: Mapping[str, Mapping[str, Tensor]]) -> None:
        """See `Learner.restore`."""
        names = {section: list(tensors) for section, tensors in sections.items()}
        with self._team.lead("restore", state=state.model_dump_json(), names=names):
            shared = {section: Shared(self._team, names[section], sections[section]) for section in names}
            super().restore(state, shared)


class LeadingSnapshots(Snapshots):
    """Snapshots of a sharded model: all processes gather, this one writes."""

    def __init__(self, model: Any, recipe: Recipe, team: Team, *, folder: Path) -> None:
        super().__init__(model, recipe, folder=folder)
        self._team = team

    def take(self, version: PolicyVersion, parent: PolicyVersion | None) -> Snapshot:
        """See `Snapshots.take`."""
        with self._team.lead("snapshot"):
            return super().take(version, parent)


def encoded(batch: Batch) -> bytes:
    """The bytes that `tba.wire.decode_batch` makes this batch of, less what was refused."""
    groups = [
        DrawnGroup(
            prompt_id=group.prompt_id,
            source=group.source,
            fallback=group.fallback,
            payloads=[encode_rollout(rollout) for rollout in group.rollouts],
        )
        for group in batch.groups
    ]
    return encode_batch(
        batch_id=batch.batch_id,
        deadline_s=batch.deadline_s,
        seed=batch.seed,
        log_position=batch.log_position,
        groups=groups,
    )

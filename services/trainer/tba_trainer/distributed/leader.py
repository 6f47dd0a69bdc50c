"""Build theta, its learner and its snapshots, in one process or in several that share them.

With several processes, the learner and the snapshots of rank 0 send the followers a command before they do something
themselves. Every method here has its command in follower.py; a new one needs both. Checkpoints: checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tba.config import Recipe
from tba.versions import START, PolicyVersion
from tba.weights.publishing import version_prefix
from tba.wire import Batch, encode_batch, encode_rollout
from tba_trainer.checkpoints.weight_files import WeightSnapshot, WeightSnapshotWriter
from tba_trainer.distributed.process_group import BroadcastTensors, Team
from tba_trainer.distributed.shares import FollowersShares
from tba_trainer.learner.learner import Learner, TrainerState, trainer_rng
from tba_trainer.learner.schedules import StepValues
from tba_trainer.model.policy import empty_policy, load_policy
from tba_trainer.model.sharding import shard
from tba_trainer.model.slices import TensorSlice

BUILD = "build"
"""The first command of a leader."""


def build(recipe: Recipe, team: Team, *, folder: Path) -> tuple[Any, Learner, WeightSnapshotWriter]:
    """Load the starting model; build its learner and its snapshot writer, in all processes (leader only).

    Raises:
        ConfigError: there is no model at model.path, or the device cannot be used.
        TeamError: a follower is gone.
    """
    # the first values of an adapter come from torch's generator: they are the same at every start
    torch.manual_seed(recipe.run.seed)
    checkpointing = recipe.trainer.gradient_checkpointing
    mesh = team.mesh
    if mesh is None:  # one process
        model = load_policy(recipe.model, device=team.device, gradient_checkpointing=checkpointing)
        return model, Learner(model, recipe, trainer_rng(recipe)), WeightSnapshotWriter(model, recipe, folder=folder)
    # on the CPU: no device needs to hold the whole model
    model = load_policy(recipe.model, device="cpu", gradient_checkpointing=checkpointing)
    with team.lead(BUILD):
        shard(model, mesh, compute_dtype=recipe.trainer.compute_dtype, context=team.context)
        return model, LeaderLearner(model, recipe, team), LeaderWeightSnapshotWriter(model, recipe, team, folder=folder)


def build_follower(recipe: Recipe, team: Team, *, folder: Path) -> tuple[Learner, WeightSnapshotWriter]:
    """Build the learner and the snapshot writer of a follower; the leader sends the weights.

    Raises:
        ConfigError: there is no model at model.path here.
    """
    torch.manual_seed(recipe.run.seed)
    model = empty_policy(recipe.model, gradient_checkpointing=recipe.trainer.gradient_checkpointing)
    assert team.mesh is not None
    shard(model, team.mesh, compute_dtype=recipe.trainer.compute_dtype, context=team.context)
    learner = Learner(model, recipe, trainer_rng(recipe), ranks=team.ranks())
    return learner, WeightSnapshotWriter(model, recipe, folder=folder, rank=team.rank, num_ranks=team.num_ranks)


class LeaderLearner(Learner):
    """A learner that sends each of its calls to the followers, so that all processes do the same."""

    def __init__(self, model: Any, recipe: Recipe, team: Team) -> None:
        super().__init__(model, recipe, trainer_rng(recipe), ranks=team.ranks())
        self._team = team

    def gradients(
        self,
        batch: Batch,
        *,
        step: int,
        policy_ages: Sequence[int],
        values: StepValues | None = None,
        usual_grad_norm: float | None = None,
    ) -> dict[str, float | None]:
        """See `Learner.gradients`."""
        # The whole batch goes to every rank, not a share: each computes the same plan and picks its own micro-batches.
        arguments: Any = {"step": step, "policy_ages": list(policy_ages), "usual_grad_norm": usual_grad_norm}
        with self._team.lead("gradients", batch=encode_drawn_batch(batch), values=values, **arguments):
            return super().gradients(batch, values=values, **arguments)

    def apply(self, *, step: int, lineage: int, values: StepValues | None = None) -> None:
        """See `Learner.apply`."""
        with self._team.lead("apply", step=step, lineage=lineage, values=values):
            super().apply(step=step, lineage=lineage, values=values)

    def skip(self, *, step: int, lineage: int) -> None:
        """See `Learner.skip`."""
        with self._team.lead("skip", step=step, lineage=lineage):
            super().skip(step=step, lineage=lineage)

    def discard(self) -> None:
        """See `Learner.discard`."""
        with self._team.lead("discard"):
            super().discard()

    def remember(self, version: PolicyVersion, *, same_as: PolicyVersion | None = None) -> None:
        """See `Learner.remember`."""
        if self._old_policy is None:
            return
        with self._team.lead("remember", version=version, same_as=same_as):
            super().remember(version, same_as=same_as)

    def load_weights(self, tensors: Mapping[str, Tensor], *, what: str) -> None:
        """See `Learner.load_weights`."""
        with self._team.lead("load_weights", names=list(tensors), what=what):
            super().load_weights(BroadcastTensors(self._team, list(tensors), tensors), what=what)

    def restore(self, state: TrainerState, sections: Mapping[str, Mapping[str, TensorSlice]]) -> None:
        """See `Learner.restore`. The followers take the rows that they have fetched (`TeamCheckpoints.load`)."""
        with self._team.lead("restore", state=state.model_dump_json()):
            super().restore(state, sections)


class LeaderWeightSnapshotWriter(WeightSnapshotWriter):
    """Takes snapshots of a sharded model: all processes gather the tensors, and each keeps its share."""

    def __init__(self, model: Any, recipe: Recipe, team: Team, *, folder: Path) -> None:
        super().__init__(model, recipe, folder=folder, rank=team.rank, num_ranks=team.num_ranks)
        self._team, self._run = team, recipe.run.name

    def take(
        self, version: PolicyVersion, parent: PolicyVersion | None, *, folder: Path | None = None
    ) -> WeightSnapshot:
        """See `WeightSnapshotWriter.take`. The followers keep their shares under the name of the folder."""
        folder = folder or self._new_folder(version)  # before the others begin to wait
        with self._team.lead("snapshot", version=version, share=folder.name):
            snapshot = super().take(version, parent, folder=folder)
        if self._lora is None and self._team.beside is not None:
            own = sum(self._sizes[name] for name in snapshot.held)
            snapshot.is_share = version != START
            snapshot.others = FollowersShares(
                self._team.beside,
                folder.name,
                prefix=version_prefix(self._run, version),
                size_bytes=sum(self._sizes.values()) - own,
            )
        return snapshot


def encode_drawn_batch(batch: Batch) -> bytes:
    """Encode a batch without its refused rollouts, for `tba.wire.decode_batch`."""
    groups = tuple(
        msgspec.structs.replace(group, rollouts=tuple(map(encode_rollout, group.rollouts))) for group in batch.groups
    )
    return encode_batch(msgspec.structs.replace(batch, groups=groups, refused=(), unreadable=()))

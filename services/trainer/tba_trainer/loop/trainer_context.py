"""The parts of a trainer. `tba_trainer.trainer` builds them, and hands them to the loop in one object."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tba.clients import BufferClient
from tba.config import Recipe
from tba.store import ObjectStore
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter
from tba_trainer.distributed.checkpoints import TeamCheckpoints
from tba_trainer.distributed.process_group import Team
from tba_trainer.learner.learner import Learner
from tba_trainer.learner.schedules import Schedules
from tba_trainer.loop.batches import Prefetcher, Requirements
from tba_trainer.loop.evaluations import Evaluations
from tba_trainer.loop.publisher import Publisher
from tba_trainer.loop.status import Progress, Session, Status
from tba_trainer.model import host_memory
from tba_trainer.tracking import TrackerGroup


@dataclass(frozen=True, kw_only=True)
class TrainerContext:
    """The parts that a process keeps from its start to its end, across rollbacks."""

    recipe: Recipe
    team: Team
    buffer: BufferClient
    store: ObjectStore
    status: Status
    trackers: TrackerGroup
    stop: threading.Event
    """Set when the process should finish its step, write a checkpoint and return."""


@dataclass(frozen=True, kw_only=True)
class LineageContext(TrainerContext):
    """The parts of a process, and those of its current lineage."""

    session: Session
    progress: Progress
    checkpoints: TeamCheckpoints
    learner: Learner
    schedules: Schedules
    requirements: Requirements
    snapshots: WeightSnapshotWriter
    prefetcher: Prefetcher
    publisher: Publisher
    evaluations: Evaluations
    model_config_sha256: str
    """Digest of the model's config.json."""

    def gauges(self) -> dict[str, float]:
        """Return the gauges that heartbeats report beside the metrics of the last step."""
        return {
            **self.publisher.gauges(),
            "num_damaged_batches": float(self.prefetcher.num_damaged),
            "unpinned_copies_total": float(host_memory.counts["unpinned"]),
            "checkpoints_not_staged_total": float(host_memory.counts["checkpoint_not_staged"]),
            **self.progress.guards.gauges(),
            **self.trackers.gauges(),
        }

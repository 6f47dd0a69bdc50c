"""The parts of a trainer, and its progress. `tba_trainer.run` builds them; every module of the loop reads them."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from tba.clients import BufferClient
from tba.config import Recipe
from tba.store import ObjectStore
from tba.versions import LineageTree, PolicyVersion
from tba_trainer.checkpoints.checkpoint import CheckpointStore
from tba_trainer.checkpoints.weight_files import SnapshotWriter
from tba_trainer.distributed.process_group import Team
from tba_trainer.learner.guards import GuardState
from tba_trainer.learner.learner import Learner
from tba_trainer.learner.schedules import Schedules
from tba_trainer.loop.filters import Requirements
from tba_trainer.loop.heartbeat import Status
from tba_trainer.loop.prefetch import Prefetcher
from tba_trainer.loop.publisher import Evaluations, Publisher
from tba_trainer.tracking import TrackerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One start of the trainer: its lineage, and the state that the lineage begins with."""

    trainer_id: str
    lineage: int
    token: str
    """Fencing token of the lineage."""
    parent: PolicyVersion
    """Version that this lineage started from."""
    first: PolicyVersion
    """First version that this lineage announces: the starting model, or the parent's weights."""
    start: PolicyVersion
    """The run's first weights under their announced name: the starting model, or the fork's version."""
    lineages: LineageTree
    previous: PolicyVersion | None
    """The checkpoint before the parent's; None: there is none."""
    train_s: float
    """Seconds trained before this start, along the active lineage."""
    num_rollouts_trained: int
    guards: GuardState
    """State of the guards at the parent, with the rollbacks of the whole run."""
    announces_start: bool
    """True when the starting model is still to be announced."""
    has_no_checkpoint: bool
    """True when only another run's folders hold this state (a fork): it is checkpointed after the first step."""


class Progress:
    """Step, clock and counts of one lineage. Checkpoints and heartbeats read it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.step = session.parent.step
        """The last step: its batch is acked, and applied or skipped."""
        self.submitted = session.first
        """The last version handed to the publisher: the parent of the next one."""
        self.num_rollouts_trained = session.num_rollouts_trained
        self.guards: GuardState = session.guards
        self.settings_revision = 0
        """Revision of the live settings that the last step used."""
        self._started = time.monotonic()
        self._train_s: float | None = None

    @property
    def version(self) -> PolicyVersion:
        """The current weights, under the name that they were or will be announced by."""
        return self._session.first if self.step == self._session.parent.step else self.newest

    @property
    def newest(self) -> PolicyVersion:
        """(lineage, step): the version that policy ages are measured from."""
        return PolicyVersion(self._session.lineage, self.step)

    @property
    def last_good_step(self) -> int:
        """The last step whose batch was applied while no condition held that rolls back or fails."""
        return self.step - self.guards.num_since_good

    @property
    def train_s(self) -> float:
        """Seconds of training along the active lineage: with waits, without the final evaluation and export."""
        if self._train_s is not None:
            return self._train_s
        return self._session.train_s + time.monotonic() - self._started

    def start_clock(self) -> None:
        """Begin to count training time."""
        self._started = time.monotonic()

    def stop_clock(self) -> None:
        """Freeze the training time."""
        self._train_s = self.train_s


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
    """The parts of a process, and those of its present lineage."""

    session: Session
    progress: Progress
    checkpoints: CheckpointStore
    learner: Learner
    schedules: Schedules
    requirements: Requirements
    snapshots: SnapshotWriter
    prefetcher: Prefetcher
    publisher: Publisher
    evaluations: Evaluations
    model_config_sha256: str
    """Digest of the model's config.json."""

    def publish_weights(self, *, num_eval_prompts: int | None) -> None:
        """Hand the current weights to the publisher, to be evaluated on some prompts (None: not at all)."""
        snapshot = self.snapshots.take(self.progress.version, self.progress.submitted)
        self.publisher.submit(snapshot, num_eval_prompts=num_eval_prompts)
        self.progress.submitted = self.progress.version

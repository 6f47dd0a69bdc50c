"""Snapshots of the buffer, and what a run began with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.api.base import VersionText
from tba.config.base import StrictModel
from tba.wire.snapshot import NAME_PATTERN, SOURCE_PATTERN


class SnapshotRequest(StrictModel):
    """POST /v1/snapshots: save what is stored under a name that no snapshot of this run has."""

    name: str = Field(pattern=NAME_PATTERN)


class SnapshotInfo(StrictModel):
    """One snapshot. The position of the log and the counts are final once it is complete."""

    source: str
    """RUN/NAME."""
    state: Literal["saving", "complete", "failed"]
    reason: str | None = None
    log_position: int | None = None
    num_rollouts: int | None = None
    num_written: int = 0
    """Rollouts written so far, those written again counted again."""
    num_bytes: int = 0


class SnapshotList(StrictModel):
    """GET /v1/snapshots: the names of the complete ones."""

    names: list[str]


class LoadRequest(StrictModel):
    """POST /v1/snapshots/load: begin this run with a snapshot.

    With `version` the run is a fork: it takes the rollouts up to that version's mark, and its trainer starts from that
    version's weights.
    """

    source: str = Field(pattern=SOURCE_PATTERN)
    version: VersionText | None = None


class OriginInfo(StrictModel):
    """What a run began with."""

    source: str
    """RUN/NAME of the snapshot."""
    version: VersionText | None
    """The weight version that the run was forked from; None: it starts from its starting model."""
    state: Literal["loading", "complete", "failed"]
    reason: str | None = None
    num_rollouts: int | None = None
    num_checked: int = 0
    """Rollouts read and found whole so far; loading begins after the last."""
    num_loaded: int = 0
    lineage: int = 0
    """The last lineage of the snapshot; this run's own come after it."""
    start_params_sha256: str | None = None
    """Digest of the starting model of the snapshot's run, if it is known: this run must have the same one."""

    @property
    def run(self) -> str:
        """The run that the snapshot is of."""
        return self.source.partition("/")[0]

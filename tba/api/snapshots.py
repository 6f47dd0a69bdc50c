"""Snapshots of the buffer, and the origin of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tba.fields import StrictModel, VersionText
from tba.wire.snapshot_manifest import NAME_PATTERN, SOURCE_PATTERN


class SnapshotRequest(StrictModel):
    """POST /v1/snapshots: save the content of the buffer under a name that is new in this run."""

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
    """Rollouts written so far; a rollout that is written twice counts twice."""
    num_bytes: int = 0


class LoadRequest(StrictModel):
    """POST /v1/snapshots/load: begin this run with the rollouts of a snapshot.

    With `version` the run is a fork: it takes the rollouts up to that version's publication, and its trainer starts
    from that version's weights.
    """

    source: str = Field(pattern=SOURCE_PATTERN)
    version: VersionText | None = None


class OriginInfo(StrictModel):
    """The origin of a run: the snapshot that it began with."""

    source: str
    """RUN/NAME of the snapshot."""
    version: VersionText | None
    """The weight version that the run was forked from; None: it starts from its starting model."""
    state: Literal["loading", "complete", "failed"]
    reason: str | None = None
    num_rollouts: int | None = None
    num_checked: int = 0
    """Rollouts checked so far; loading begins when all are checked."""
    num_loaded: int = 0
    lineage: int = 0
    """The last lineage of the snapshot; the lineages of this run come after it."""
    start_params_sha256: str | None = None
    """Digest of the starting model of the snapshot's run, if known; this run must have the same starting model."""

    @property
    def run(self) -> str:
        """Name of the run whose buffer the snapshot holds."""
        return self.source.partition("/")[0]

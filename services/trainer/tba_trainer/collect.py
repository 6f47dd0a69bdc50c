"""Deleting what nobody can need any more: old weight versions, and what a crash left without a manifest."""

from __future__ import annotations

from collections.abc import Iterable

from tba.api import RunInfo
from tba.clients import BufferClient
from tba.errors import StoreError
from tba.logs import get_logger
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba_trainer.checkpoint import Checkpoints

log = get_logger("collect")


def versions_to_delete(
    versions: Iterable[PolicyVersion], info: RunInfo, checkpoints: Iterable[PolicyVersion], *, keep: int
) -> list[PolicyVersion]:
    """Versions beyond the newest `keep`, except those that something still holds.

    Held are: the starting model, the announced version, the best one, those of live components and of pending
    evaluations, those that a checkpoint in the store was taken at, and the versions that the lineages of the living or
    of a checkpoint started from. What becomes the best after `info` was read was being evaluated then, so it is held.
    """
    checkpoints = list(checkpoints)
    lineages = {info.lineage, *(version.lineage for version in checkpoints)}
    named = [
        info.latest_version,
        info.checkpoint,
        info.best and info.best.version,
        *(component.version for component in info.components if component.alive),
        *(evaluation.version for evaluation in info.evals if evaluation.state == "pending"),
        *(info.parents.get(lineage) for lineage in lineages),
    ]
    held = {START, *checkpoints, *(PolicyVersion.parse(text) for text in named if text is not None)}
    oldest_first = sorted(versions)
    return [version for version in oldest_first[: max(0, len(oldest_first) - keep)] if version not in held]


def delete_incomplete(
    versions: WeightVersions, checkpoints: Checkpoints, *, before_lineage: int, registered: PolicyVersion
) -> None:
    """Delete versions and checkpoints of older lineages that have no manifest: half written, or half deleted.

    To be called once the lineage is taken: what an older trainer still writes can then be neither announced nor
    registered. 0-0 stays: every lineage may publish it, and publishing it again completes it. A store that is away is
    logged; the next start tries again.

    Args:
        before_lineage: the lineage of this trainer; nothing of it is touched.
        registered: the checkpoint that a resume starts from; never touched.
    """
    try:
        deleted = versions.delete_incomplete(before_lineage=before_lineage, keep={START})
        deleted_checkpoints = checkpoints.delete_incomplete(before_lineage=before_lineage, keep={registered})
    except StoreError as error:
        log.warning("incomplete_not_deleted", error=str(error))
        return
    if deleted or deleted_checkpoints:
        log.info(
            "incomplete_deleted",
            num_versions=len(deleted),
            num_checkpoints=len(deleted_checkpoints),
            versions=[str(version) for version in deleted],
            checkpoints=[str(version) for version in deleted_checkpoints],
        )


class Collector:
    """Deletes old versions of one run."""

    def __init__(
        self, buffer: BufferClient, versions: WeightVersions, checkpoints: Checkpoints, *, keep_versions: int
    ) -> None:
        self._buffer, self._versions, self._checkpoints = buffer, versions, checkpoints
        self._keep_versions = keep_versions

    def collect(self) -> None:
        """Delete what `versions_to_delete` names.

        Raises:
            TbaError: the buffer or the store is away; nothing is lost by trying again later.
        """
        existing = self._versions.versions()
        if len(existing) <= self._keep_versions:
            return
        for version in versions_to_delete(
            existing, self._buffer.run(), self._checkpoints.versions(), keep=self._keep_versions
        ):
            self._versions.delete(version)
            log.info("version_deleted", version=str(version))

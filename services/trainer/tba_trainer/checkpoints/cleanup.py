"""Delete old weight versions, and the incomplete versions and checkpoints that a crash left."""

from __future__ import annotations

from collections.abc import Iterable

from tba.api import RunInfo
from tba.clients import BufferClient
from tba.errors import StoreError
from tba.logs import get_logger
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba_trainer.checkpoints.checkpoint import CheckpointStore

log = get_logger("cleanup")


def versions_to_delete(
    versions: Iterable[PolicyVersion], info: RunInfo, checkpoints: Iterable[PolicyVersion], *, keep: int
) -> list[PolicyVersion]:
    """Return the versions beyond the newest `keep` that nothing holds.

    Held are the starting model, the announced version, the best one, those of live components and of pending
    evaluations, those with a checkpoint in the store, and the parents of the active lineage and of the lineages of
    checkpoints.
    """
    checkpoints = list(checkpoints)
    lineages = {info.lineage, *(version.lineage for version in checkpoints)}
    named = [
        info.latest_version,
        info.checkpoint,
        info.best and info.best.version,
        *(component.version for component in info.components if component.alive),
        # one of these may become the best version after `info` was read
        *(evaluation.version for evaluation in info.evals if evaluation.state == "pending"),
        *(info.parents.get(lineage) for lineage in lineages),
    ]
    held = {START, *checkpoints, *(PolicyVersion.parse(text) for text in named if text is not None)}
    oldest_first = sorted(versions)
    return [version for version in oldest_first[: max(0, len(oldest_first) - keep)] if version not in held]


def delete_incomplete(
    versions: WeightVersions, checkpoints: CheckpointStore, *, before_lineage: int, registered: PolicyVersion
) -> None:
    """Delete versions and checkpoints of older lineages that have no manifest: half written, or half deleted.

    Call it once the lineage is taken: an older trainer that still writes can then neither announce nor register.

    Args:
        before_lineage: the lineage of this trainer; nothing of it is touched.
        registered: the checkpoint that a resume starts from; never touched.
    """
    try:
        # 0-0 stays: every lineage may publish it, and publishing it again completes it
        deleted = versions.delete_incomplete(before_lineage=before_lineage, keep={START})
        deleted_checkpoints = checkpoints.delete_incomplete(before_lineage=before_lineage, keep={registered})
    except StoreError as error:  # the next start tries again
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


class GarbageCollector:
    """Deletes old versions of one run."""

    def __init__(
        self, buffer: BufferClient, versions: WeightVersions, checkpoints: CheckpointStore, *, keep_versions: int
    ) -> None:
        self._buffer, self._versions, self._checkpoints = buffer, versions, checkpoints
        self._keep_versions = keep_versions

    def collect(self) -> None:
        """Delete the versions that `versions_to_delete` names.

        Raises:
            TbaError: the buffer or the store is away; a later call makes up for it.
        """
        existing = self._versions.versions()
        if len(existing) <= self._keep_versions:
            return
        for version in versions_to_delete(
            existing, self._buffer.run(), self._checkpoints.versions(), keep=self._keep_versions
        ):
            self._versions.delete(version)
            log.info("version_deleted", version=str(version))

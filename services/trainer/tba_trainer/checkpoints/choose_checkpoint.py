"""Which checkpoint a start, a rollback or an operator continues from: the newest one that can be read.

Damage is found when a checkpoint is loaded; then the next older one of the active lineage takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable

from tba.api import RunInfo
from tba.errors import DigestError, MalformedError, ObjectNotFoundError
from tba.logs import get_logger
from tba.versions import LineageTree, PolicyVersion
from tba_trainer.checkpoints.checkpoint import Checkpoint, CheckpointStore

log = get_logger("checkpoint")


def newest_intact(checkpoints: CheckpointStore, info: RunInfo) -> Checkpoint | None:
    """Load the newest intact checkpoint of the active lineage; None when the run has none. The caller closes it.

    Raises:
        ObjectNotFoundError, DigestError, MalformedError: the registered one is missing or damaged, and no older one is
            intact.
        StoreUnavailableError: the store cannot be reached.
    """
    if info.checkpoint_key is None or info.checkpoint is None:
        return None
    try:
        return checkpoints.load(info.checkpoint_key)
    except (ObjectNotFoundError, DigestError, MalformedError) as error:
        # the ledger's steps after an older one become abandoned once the new lineage names it as its parent
        registered = PolicyVersion.parse(info.checkpoint)
        found = first_intact(checkpoints, reversed(_older(checkpoints, lineages_of(info), registered)))
        if found is None:
            raise
        log.error(
            "checkpoint_damaged",
            checkpoint=info.checkpoint,
            error=str(error),
            resumed_from=found.state.version,
            num_steps_repeated=registered.step - PolicyVersion.parse(found.state.version).step,
        )
        return found


def before_suspect(
    checkpoints: CheckpointStore, lineages: LineageTree, suspect: PolicyVersion, *, last_good_step: int
) -> list[PolicyVersion]:
    """Return the checkpoints that `suspect` descends from, in the order in which a rollback tries them.

    First comes the newest one that a good step followed, then older ones. Where no good step followed any, the oldest
    comes first: it is the furthest from the divergence.

    Args:
        lineages: all lineages of the run.
        suspect: the registered checkpoint, which no good step followed.
        last_good_step: the last step whose batch was applied with no serious alarm on.

    Raises:
        StoreUnavailableError: the store cannot be reached.
    """
    older = _older(checkpoints, lineages, suspect)
    return [version for version in reversed(older) if version.step < last_good_step] or older


def _older(checkpoints: CheckpointStore, lineages: LineageTree, version: PolicyVersion) -> list[PolicyVersion]:
    """Return the checkpoints that `version` descends from, oldest first."""
    return [older for older in checkpoints.of_lineage(lineages.ancestry(version)) if older != version]


def lineages_of(info: RunInfo) -> LineageTree:
    """Return all lineages of the run with their parents."""
    return LineageTree({number: PolicyVersion.parse(text) for number, text in info.parents.items()})


def first_intact(checkpoints: CheckpointStore, versions: Iterable[PolicyVersion]) -> Checkpoint | None:
    """Load the first of these checkpoints that is intact; None when there is none. The caller closes it."""
    for version in versions:
        try:
            return checkpoints.load(checkpoints.key(version))
        except (ObjectNotFoundError, DigestError, MalformedError) as error:
            log.error("checkpoint_damaged", checkpoint=str(version), error=str(error))
    return None

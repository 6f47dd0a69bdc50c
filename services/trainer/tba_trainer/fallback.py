"""Which checkpoint a resume starts from: the registered one, or an older one that is kept, where that is damaged."""

from __future__ import annotations

from collections.abc import Iterable

from tba.api import RunInfo
from tba.errors import DigestError, MalformedError, ObjectNotFoundError
from tba.logs import get_logger
from tba.versions import LineageTree, PolicyVersion
from tba_trainer.checkpoint import Checkpoint, Checkpoints

log = get_logger("fallback")


def newest_whole(checkpoints: Checkpoints, info: RunInfo) -> Checkpoint | None:
    """The newest whole checkpoint of the living lineage; None when the run has none. The caller closes it.

    The steps after an older one become abandoned in the ledger when the new lineage names it as its parent.

    Raises:
        ObjectNotFoundError, DigestError, MalformedError: the registered one is missing or damaged, and no older one is
            whole.
        StoreUnavailableError
    """
    if info.checkpoint_key is None or info.checkpoint is None:
        return None
    try:
        return checkpoints.load(info.checkpoint_key)
    except (ObjectNotFoundError, DigestError, MalformedError) as error:
        registered = PolicyVersion.parse(info.checkpoint)
        found = _first_whole(checkpoints, reversed(_older(checkpoints, _tree(info), registered)))
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


def older_whole(
    checkpoints: Checkpoints, info: RunInfo, suspect: PolicyVersion, *, last_good_step: int
) -> Checkpoint | None:
    """The first whole one of `before_suspect`; None when there is none. The caller closes it.

    Raises:
        StoreUnavailableError
    """
    return _first_whole(checkpoints, before_suspect(checkpoints, _tree(info), suspect, last_good_step=last_good_step))


def before_suspect(
    checkpoints: Checkpoints, lineages: LineageTree, suspect: PolicyVersion, *, last_good_step: int
) -> list[PolicyVersion]:
    """Checkpoints that `suspect` goes back to, the best one to go on from first: the newest that a good step followed,
    then older ones; where no good step followed any, the oldest first.

    Raises:
        StoreUnavailableError
    """
    older = _older(checkpoints, lineages, suspect)
    return [version for version in reversed(older) if version.step < last_good_step] or older


def _older(checkpoints: Checkpoints, lineages: LineageTree, version: PolicyVersion) -> list[PolicyVersion]:
    """Checkpoints that this one goes back to, oldest first."""
    return [older for older in checkpoints.living(lineages.ancestry(version)) if older != version]


def _tree(info: RunInfo) -> LineageTree:
    return LineageTree({number: PolicyVersion.parse(text) for number, text in info.parents.items()})


def _first_whole(checkpoints: Checkpoints, versions: Iterable[PolicyVersion]) -> Checkpoint | None:
    for version in versions:
        try:
            return checkpoints.load(checkpoints.key(version))
        except (ObjectNotFoundError, DigestError, MalformedError) as error:
            log.error("checkpoint_damaged", checkpoint=str(version), error=str(error))
    return None

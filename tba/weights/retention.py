"""Which weight versions of a run are kept, and why: one rule for the trainer and for `tba weights list|gc`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tba.api import RunInfo
from tba.versions import START, PolicyVersion


def reasons_to_keep(
    versions: Iterable[PolicyVersion],
    info: RunInfo | None,
    checkpoints: Iterable[PolicyVersion],
    *,
    keep: int,
    needed_by: Callable[[Iterable[PolicyVersion]], set[PolicyVersion]],
) -> dict[PolicyVersion, list[str]]:
    """Return version -> the reasons to keep it. A version that the result lacks may be deleted.

    These versions are kept:
    * the starting model, the announced version, the best version, and versions with a checkpoint;
    * versions newer than the one that searchers sample with, and the newest `keep` of the others;
    * versions that live components hold, and versions with a pending evaluation;
    * the parents of the active lineage and of the lineages of checkpoints;
    * versions that any of these is assembled from.

    Args:
        versions: all versions of the run, in any order.
        info: the run as the buffer knows it; None: the run is over, and nobody holds a version.
        checkpoints: versions that have a checkpoint in the store.
        keep: number of newest versions to keep, not counting those newer than the one that searchers sample with.
        needed_by: returns the given versions and all that they are assembled from (`WeightVersions.needed_by`).

    Raises:
        Whatever `needed_by` raises.
    """
    newest_first, checkpoints = sorted(versions, reverse=True), list(checkpoints)
    existing = set(newest_first)
    # with `sampling.lag_steps` searchers are still to sample with all that are newer
    sampled = None if info is None else info.sampling_version or info.latest_version or str(START)
    older = [version for version in newest_first if sampled is None or version <= PolicyVersion.parse(sampled)]
    found = [(version, "searchers will sample with it") for version in newest_first if version not in set(older)]
    found += [(version, f"among the newest {keep}") for version in older[:keep]]
    found += [(START, "starting model"), *((version, "checkpoint") for version in checkpoints)]
    if info is not None:
        # a resume announces its parent's weights again, so it needs the parent of every lineage it may return to
        lineages = sorted({info.lineage, *(version.lineage for version in checkpoints)})
        # any pending evaluation may become the best version after `info` was read
        pending = [evaluation for evaluation in info.evals if evaluation.state == "pending"]
        named = [
            (info.latest_version, "latest"),
            (info.checkpoint, "checkpoint"),
            (info.best and info.best.version, "best"),
            *((item.version, f"held by {item.component_id}") for item in info.components if item.alive),
            *((evaluation.version, "evaluation in progress") for evaluation in pending),
            *((info.parents.get(lineage), f"parent of lineage {lineage}") for lineage in lineages),
        ]
        found += [(PolicyVersion.parse(text), reason) for text, reason in named if text is not None]
    reasons: dict[PolicyVersion, list[str]] = {}
    # a version that is held and gone needs nothing any more
    for version, reason in found:
        if version in existing and reason not in reasons.get(version, ()):
            reasons.setdefault(version, []).append(reason)
    assembled_from: dict[PolicyVersion, list[str]] = {}
    for version in sorted(reasons, reverse=True):
        for needed in (needed_by([version]) - {version}) & existing:
            # the newest one is enough to say
            assembled_from.setdefault(needed, [f"needed by {version}"])
    return {
        version: reasons.get(version, []) + assembled_from.get(version, [])
        for version in newest_first
        if version in reasons or version in assembled_from
    }

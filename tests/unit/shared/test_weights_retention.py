"""Which weight versions are deleted, and why the others stay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tba.api import BestVersion
from tba.versions import START, PolicyVersion
from tba.weights.retention import reasons_to_keep
from tests.support.history_values import evaluation, run_info, searcher

INFO = run_info(
    step=60,
    lineage=3,
    parents={1: "0-0", 2: "1-8", 3: "2-20"},
    latest_version="3-60",
    components=[searcher("searcher-here", "3-24"), searcher("searcher-gone", "3-28", alive=False)],
    evals=[evaluation("3-32", None, "pending"), evaluation("3-36", None, "done")],
    best=BestVersion(version="3-40", metric="accuracy", value=0.5, num_prompts=4, num_samples=1),
)
VERSIONS = [START, PolicyVersion(1, 4), PolicyVersion(1, 8), PolicyVersion(2, 8), PolicyVersion(2, 20)]
VERSIONS += [PolicyVersion(3, step) for step in range(20, 61, 4)]
WHOLE: dict[str, Any] = {"needed_by": set}
"""Every version is stored whole."""
CHECKPOINTS = [PolicyVersion(2, 20), PolicyVersion(3, 48)]


def deleted_of(versions: list[PolicyVersion], *args: Any, **arguments: Any) -> list[PolicyVersion]:
    kept = reasons_to_keep(versions, *args, **arguments)
    return [version for version in sorted(versions) if version not in kept]


def test_versions_that_something_holds_are_never_deleted() -> None:
    deleted = deleted_of(VERSIONS, INFO, CHECKPOINTS, keep=2, **WHOLE)
    assert [str(v) for v in deleted] == ["1-4", "2-8", "3-20", "3-28", "3-36", "3-44", "3-52"]
    assert deleted_of(VERSIONS, INFO, CHECKPOINTS, keep=100, **WHOLE) == []
    lagging = INFO.model_copy(update={"sampling_version": "3-40"})
    deleted = deleted_of(VERSIONS, lagging, CHECKPOINTS, keep=2, **WHOLE)
    assert [str(v) for v in deleted] == ["1-4", "2-8", "3-20", "3-28"]
    without = INFO.model_copy(update={"best": None})
    assert PolicyVersion(3, 40) in deleted_of(VERSIONS, without, CHECKPOINTS, keep=2, **WHOLE)


def test_everything_that_a_kept_version_is_assembled_from_is_kept_and_why_is_said() -> None:
    chain = {step: PolicyVersion(3, step - 4) for step in (60, 56, 48, 44, 40, 36, 28)}  # full: 3-52, 3-32, 3-24

    def needed_by(held: Iterable[PolicyVersion]) -> set[PolicyVersion]:
        found = set(held)
        for version in held:
            while version.lineage == 3 and version.step in chain:
                version = chain[version.step]
                found.add(version)
        return found

    arguments = {"keep": 2, "needed_by": needed_by}
    reasons = reasons_to_keep(VERSIONS, INFO, CHECKPOINTS, **arguments)
    assert {str(version): why for version, why in reasons.items()} == {
        "3-60": ["among the newest 2", "latest"],
        "3-56": ["among the newest 2", "needed by 3-60"],
        "3-52": ["needed by 3-60"],
        "3-48": ["checkpoint"],
        "3-44": ["needed by 3-48"],
        "3-40": ["best", "needed by 3-48"],
        "3-36": ["needed by 3-48"],
        "3-32": ["evaluation in progress", "needed by 3-48"],
        "3-24": ["held by searcher-here"],
        "2-20": ["checkpoint", "parent of lineage 3"],
        "1-8": ["parent of lineage 2"],
        "0-0": ["starting model"],
    }
    deleted = deleted_of(VERSIONS, INFO, CHECKPOINTS, **arguments)
    assert [str(v) for v in deleted] == ["1-4", "2-8", "3-20", "3-28"]
    # a version that is gone holds nothing, and of a run that is over only what the store knows is held
    gone = [version for version in VERSIONS if version != PolicyVersion(3, 48)]
    assert PolicyVersion(3, 44) in deleted_of(gone, INFO, CHECKPOINTS, **arguments)
    over = reasons_to_keep(VERSIONS, None, CHECKPOINTS, **arguments)
    assert {str(version) for version in over} == {
        *("0-0", "2-20", "3-32", "3-36", "3-40", "3-44", "3-48", "3-52", "3-56", "3-60")
    }

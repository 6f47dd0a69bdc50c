"""The ledger check: every step of the living lineage exactly once."""

from __future__ import annotations

from tba.api import LedgerEntry
from tba.local.ledger import ledger_violations, lineage_tree, living_entries

PARENTS = {1: "0-0", 2: "1-2"}
TREE = lineage_tree(PARENTS)


def entry(lineage: int, step: int, *, abandoned: bool = False, batch_id: str | None = None) -> LedgerEntry:
    return LedgerEntry(
        lineage=lineage,
        step=step,
        batch_id=batch_id or f"b-{lineage}-{step}-{abandoned}",
        acked_at_s=0.0,
        num_rollouts=1,
        rollout_ids=[],
        metrics={},
        abandoned=abandoned,
    )


GOOD = [entry(1, 1), entry(1, 2), entry(1, 3, abandoned=True), entry(2, 3), entry(2, 4)]
"""Lineage 1 crashed after step 3 with a checkpoint at 2; lineage 2 goes on from there."""


def test_a_resumed_run_has_every_step_once():
    assert ledger_violations(GOOD, TREE, lineage=2, step=4) == []
    living = living_entries(GOOD, TREE, lineage=2, step=4)
    assert [(item.lineage, item.step) for item in living] == [(1, 1), (1, 2), (2, 3), (2, 4)]


def test_a_lineage_that_has_not_stepped_yet_still_has_its_parents_steps():
    assert ledger_violations(GOOD[:3], TREE, lineage=2, step=2) == []


def test_a_missing_step_is_found():
    assert ledger_violations([GOOD[0], *GOOD[2:]], TREE, lineage=2, step=4) == ["step 2 is missing"]


def test_a_step_taken_twice_is_found():
    again = [*GOOD, entry(2, 4, batch_id="other")]
    assert ledger_violations(again, TREE, lineage=2, step=4) == ["step 4 appears 2 times"]


def test_a_dead_entry_that_is_not_abandoned_is_found():
    wrong = [entry(1, 3) if item.abandoned else item for item in GOOD]
    (violation,) = ledger_violations(wrong, TREE, lineage=2, step=4)
    assert "1-3" in violation
    assert "not marked as abandoned" in violation


def test_a_living_entry_that_is_abandoned_is_found_twice():
    wrong = [*GOOD[:-1], entry(2, 4, abandoned=True)]
    assert len(ledger_violations(wrong, TREE, lineage=2, step=4)) == 2  # marked, and so missing


def test_a_batch_acked_twice_is_found():
    wrong = [*GOOD[:-1], entry(2, 4, batch_id=GOOD[0].batch_id)]
    assert ledger_violations(wrong, TREE, lineage=2, step=4) == [f"batch {GOOD[0].batch_id} was acked 2 times"]


def test_steps_acked_after_the_run_was_read_are_ignored():
    assert ledger_violations([*GOOD, entry(2, 5)], TREE, lineage=2, step=4) == []

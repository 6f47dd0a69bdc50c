"""The ledger check: every step of the active lineage exactly once."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from tba.api import LedgerEntry, LedgerLine, LedgerReply, OriginInfo, ResumeEntry, RunInfo
from tba.versions import LineageTree
from tba_cli.commands import report
from tba_cli.main import main
from tba_cli.reports.ledger import LedgerCheck, active_entries, ledger_violations, lineage_tree
from tests.support.history_values import RUN_INFO

PARENTS = {1: "0-0", 2: "1-2"}
TREE = lineage_tree(PARENTS)


def entry(lineage: int, step: int, *, abandoned: bool = False, batch_id: str | None = None) -> LedgerEntry:
    batch_id = batch_id or f"b-{lineage}-{step}-{abandoned}"
    fixed: dict[str, Any] = {"acked_at_s": 0.0, "num_rollouts": 1, "rollout_ids": ["00" * 16], "metrics": {}}
    return LedgerEntry(lineage=lineage, step=step, batch_id=batch_id, abandoned=abandoned, **fixed)


def start(lineage: int, parent: str | None = None) -> ResumeEntry:
    parent = parent or PARENTS[lineage]
    return ResumeEntry(kind="resume", lineage=lineage, parent=parent, trainer_id="t", resumed_at_s=0.0)


def checked(tree: LineageTree, lines: Iterable[LedgerLine], **head: Any) -> LedgerCheck:
    check = LedgerCheck(tree, **head)
    for line in lines:
        check.take(line)
    return check


GOOD: list[LedgerLine] = [start(1), entry(1, 1), entry(1, 2), entry(1, 3, abandoned=True)]
GOOD += [start(2), entry(2, 3), entry(2, 4)]
"""Lineage 1 crashed after step 3 with a checkpoint at 2; lineage 2 continues from there."""


def violations(lines: list[LedgerLine]) -> list[str]:
    return ledger_violations(lines, TREE, lineage=2, step=4)


def test_a_resumed_run_has_every_step_once():
    assert violations(GOOD) == []
    active = active_entries(GOOD, TREE, lineage=2, step=4)
    assert [(item.lineage, item.step) for item in active] == [(1, 1), (1, 2), (2, 3), (2, 4)]


def test_what_is_no_violation():
    assert ledger_violations(GOOD[:5], TREE, lineage=2, step=2) == [], "it still has its parent's steps"
    assert violations([line for line in GOOD if isinstance(line, LedgerEntry)]) == [], "a ledger without starts"
    assert violations([*GOOD, entry(2, 5)]) == [], "acked after the run was read"


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([GOOD[0], GOOD[2], GOOD[1], *GOOD[3:]], "follows step"),
        ([*GOOD[:3], entry(1, 4, abandoned=True), *GOOD[4:]], "1-4 (batch b-1-4-True) follows step 2"),
        ([*GOOD[:5], entry(1, 4, abandoned=True), *GOOD[5:]], "was acked while lineage 2 owned the run"),
        ([*GOOD[:4], *GOOD[5:]], "lineage 2 has no start in the ledger"),
        (GOOD[4:], "lineage 1 has no start in the ledger"),
        (GOOD[4:], "step 1 is missing"),
        ([*GOOD[:4], start(2, "1-1"), *GOOD[5:]], "is from 1-1, but from 1-2 in the table"),
        ([GOOD[0], GOOD[4], *GOOD[5:]], "is from 1-2, but lineage 1 had only reached step 0"),
        ([GOOD[0], *GOOD], "comes after that of lineage 1"),
        ([line for line in GOOD if line != GOOD[2]], "step 2 is missing"),
        ([*GOOD, entry(2, 4, batch_id="other")], "step 4 appears 2 times"),
        ([*GOOD[:3], entry(1, 3), *GOOD[4:]], "1-3 (batch b-1-3-False) is not on the active lineage but not marked"),
        ([*GOOD[:-1], entry(2, 4, batch_id="b-1-1-False")], "batch b-1-1-False was acked 2 times"),
        ([*GOOD[:-1], entry(2, 4, abandoned=True)], "is on the active lineage but marked as abandoned"),
    ],
)
def test_lines_that_contradict_each_other_or_the_lineage_table_are_found(lines: list[LedgerLine], what: str):
    assert any(what in violation for violation in violations(lines)), violations(lines)


def test_rollout_ids_are_counted_where_the_ledger_has_them():
    check = checked(TREE, [start(1), entry(1, 1).model_copy(update={"num_rollouts": 2})], lineage=1, step=1)
    assert check.violations() == ["entry 1-1 (batch b-1-1-False) names 1 of 2 rollouts"]
    assert (check.num_batches, check.num_abandoned, check.num_starts, check.forked_from) == (1, 0, 1, None)


def test_the_start_of_an_abandoned_lineage_at_the_head_is_not_lost_unnoticed():
    tree = lineage_tree({1: "0-0", 2: "0-0"})
    found = ledger_violations([start(2, "0-0"), entry(2, 1)], tree, lineage=2, step=1)
    assert found == ["lineage 1 has no start in the ledger"]


def origin(lineage: int, state: Literal["loading", "complete"] = "complete") -> OriginInfo:
    return OriginInfo(source="other/end", version="2-60", state=state, lineage=lineage)


def test_while_the_origin_is_loaded_every_lineage_is_of_the_other_run():
    tree = lineage_tree({1: "0-0", 2: "1-40"})
    assert ledger_violations([], tree, lineage=2, step=0, origin=origin(0, "loading")) == []


def test_the_steps_before_a_fork_are_in_the_ledger_of_another_run():
    parents = {1: "0-0", 2: "1-40", 3: "2-60", 4: "3-62"}
    lines = [start(3, "2-60"), entry(3, 61), entry(3, 62), entry(3, 63, abandoned=True), start(4, "3-62"), entry(4, 63)]
    check = checked(lineage_tree(parents), lines, lineage=4, step=63, origin=origin(2))
    assert check.violations() == []
    assert str(check.forked_from) == "2-60"
    lost = checked(lineage_tree(parents), [start(3, "2-60"), entry(3, 62)], lineage=3, step=62, origin=origin(2))
    assert "step 61 is missing" in lost.violations()


def test_a_fork_whose_ledger_lost_its_head_is_found():
    parents = {1: "0-0", 2: "1-40", 3: "2-60", 4: "3-62"}
    tail: list[LedgerLine] = [start(4, "3-62"), entry(4, 63)]
    assert ledger_violations(tail, lineage_tree(parents), lineage=4, step=63, origin=origin(2)) == [
        "lineage 3 has no start in the ledger",
        "step 61 is missing",
        "step 62 is missing",
    ]


def test_a_skipped_step_is_one_that_happened_and_one_that_used_nothing_must_be_skipped():
    unused = {"refused": {"vocabulary": 1}}
    not_finite = entry(1, 1).model_copy(update={"skipped": "non_finite"})
    refused = entry(1, 2).model_copy(update={"skipped": "refused", **unused})
    check = checked(TREE, [start(1), not_finite, refused, entry(1, 3)], lineage=1, step=3)
    assert check.violations() == []
    assert (check.num_batches, check.num_skipped) == (3, 2)
    wrong = checked(TREE, [start(1), entry(1, 1).model_copy(update=unused)], lineage=1, step=1)
    assert wrong.violations() == ["entry 1-1 (batch b-1-1-False) was made with none of its 1 rollouts but not skipped"]


def test_the_command_reads_every_page_and_fails_on_a_violation(monkeypatch, capsys):
    lines = [start(1), *(entry(1, step) for step in range(1, 1201))]
    client = SimpleNamespace(
        run=lambda: RunInfo.model_validate({**RUN_INFO, "step": 1200, "parents": {1: "0-0"}}),
        ledger=lambda after, limit: LedgerReply(
            entries=lines[after : after + limit], next=after + limit if after + limit < len(lines) else None
        ),
    )
    monkeypatch.setattr(report, "with_run", lambda _, use: use(client))
    assert main(["ledger", "check"]) == 0
    assert capsys.readouterr().out == (
        "ledger of 'demo': every step of the active lineage exactly once "
        "(1200 steps, 1200 batches, 0 of them abandoned, 0 skipped, trainer starts: 1, active lineage 1)\n"
    )
    del lines[700]
    assert main(["ledger", "check"]) == 1
    assert "step 700 is missing" in capsys.readouterr().out

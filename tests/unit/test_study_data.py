"""The asynchrony study's data file, its statistics and its report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.study.data import append_line, read_lines
from benchmarks.study.report import report_text, write_report
from benchmarks.study.stats import estimate, ratio_interval
from benchmarks.study.verdict import best_baseline, sentences, standings
from tests.unit.test_study_cells import finish, line

SOURCE = {"commit": "test", "sources_sha256": "0"}


def test_study_lines_come_back_and_a_torn_one_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cells.jsonl"
    cells = [found.cell for found in finish().values()][:3]
    assert read_lines(path) == {}
    append_line(path, cells[0], line(cells[0]).result, SOURCE)
    append_line(path, cells[1], line(cells[1]).result, SOURCE)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 4])
    assert list(read_lines(path)) == [cells[0].key, cells[1].key]
    append_line(path, cells[2], line(cells[2]).result, SOURCE)
    assert path.read_bytes().startswith(whole)
    assert list(read_lines(path)) == [cell.key for cell in cells]
    assert read_lines(path)[cells[2].key].final == line(cells[2]).final


def test_study_t_interval_covers_the_mean_in_95_of_100_cases() -> None:
    rng = np.random.default_rng(0)
    found = [estimate(rng.normal(0.7, 0.1, size=5).tolist()) for _ in range(4000)]
    assert np.mean([e.low < 0.7 < e.high for e in found]) == pytest.approx(0.95, abs=0.012)
    assert estimate([0.25]).mean == 0.25
    with pytest.raises(ValueError, match="no values"):
        estimate([])


def test_study_ratio_keeps_pairs_together() -> None:
    below = [0.2, 0.4, 0.6, 0.8, 0.9]
    assert ratio_interval([0.9 * b for b in below], below) == pytest.approx((0.9, 0.9, 0.9))


def test_study_verdict_says_who_is_ahead() -> None:
    def final(ours: float, at_lag_1: float) -> list[str]:
        levels = {"tba_prime": {16: ours, 1: at_lag_1}, "grpo": {16: 0.6, 1: 0.6}}
        lines = finish(lambda cell: levels.get(cell.method, {}).get(cell.lag, 0.4) + 0.001 * cell.seed)
        found = standings(lines)
        rival = best_baseline(found)
        assert rival is not None
        assert rival.method == "grpo"
        return sentences(found, "tba_prime")

    good = final(0.8, 0.85)
    assert all(sentence.endswith(": reached") for sentence in good)
    assert "`grpo` 0.200 ± 0.000 (n 5)" in good[2]
    assert "above 0 for 7 of 7" in good[2]
    without_rloo = {key: found for key, found in finish().items() if found.cell.method != "rloo"}
    assert sentences(standings(without_rloo), "tba_prime")[2].endswith("open, no cells of `rloo` yet")
    bad = final(0.5, 0.85)
    assert bad[0].endswith("not reached")
    assert bad[2].endswith("not reached")


def test_study_report_is_written_from_any_part_of_the_data(tmp_path: Path) -> None:
    lines = finish()
    for key in [key for key in lines if lines[key].cell.kind == "k"]:
        lines[key] = line(lines[key].cell, relative_variance=12.5)
    text = report_text(lines)
    assert "| `online_dpo` | baseline | 0.500 ± 0.000" in text
    assert "| 32 | 12.5 | 3 |" in text
    write_report(dict(list(lines.items())[:200]), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tables.md", "accuracy_by_lag.png", "curves_lag16.png"}
    assert "No cell of this table has been run yet." in report_text({})

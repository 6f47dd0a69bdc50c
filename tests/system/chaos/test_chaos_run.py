"""A whole run in a nutshell: a few faults of each family, and the same verdict as after `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chat_tokenizers import make_talking_model
from tests.system.chaos.campaign import run_campaign
from tests.system.chaos.faults import Card
from tests.system.chaos.table import survival_table

CARDS = [
    Card("link half-from", "trainer-buffer"),
    Card("kill -9", "redis"),
    Card("store 503", "store"),
    Card("link cut", "searcher-buffer"),
    Card("kill -9", "buffer"),
    Card("kill -9", "reward"),
    Card("kill -9", "worker"),
    Card("kill -9", "searcher"),
    Card("kill -9", "trainer"),
]


@pytest.mark.timeout(1200)
def test_a_run_survives_a_few_faults_with_everything_it_acknowledged(tmp_path: Path) -> None:
    model = make_talking_model(tmp_path / "start")
    lines: list[str] = []
    verdict, trials = run_campaign(
        tmp_path / "run",
        model,
        seed=0,
        seconds=600,
        cards=CARDS,
        num_searchers=1,
        hold_range_s=(0.5, 1.0),
        say=lines.append,
    )
    assert verdict.wrong == [], lines
    assert [trial.card for trial in trials] == CARDS
    assert all(trial.recovered_s is not None for trial in trials)
    assert verdict.counts["acknowledged rollouts"] == verdict.counts["stored"] > 0
    assert verdict.counts["of those episodes"] > 0
    assert verdict.counts["acknowledged steps"] >= 3 * len(CARDS)
    assert {verdict.counts["process starts"][name] for name in ("redis", "buffer", "reward", "trainer")} == {2}
    assert "| kill -9 | redis | 1 (0) | 1 |" in survival_table(trials)

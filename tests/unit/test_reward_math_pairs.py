"""Every pair of the two lists gets the recorded verdict (docs/results.md has the agreement)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.maths_bench.pairs import Pair, hard_pairs, math_verify_cases, scorer_verdict

LISTS = [(hard_pairs, "boxed", 504, 25), (math_verify_cases, "anywhere", 269, 16)]


@pytest.mark.parametrize(("load", "extract", "num_pairs", "num_known"), LISTS)
def test_every_pair_gets_the_recorded_verdict(
    load: Callable[[], list[Pair]], extract: str, num_pairs: int, num_known: int
) -> None:
    pairs = load()
    others = [
        (pair.gold, pair.response[-100:], ours, pair.known or pair.verdict)
        for pair in pairs
        if (ours := scorer_verdict(pair, extract=extract)) != (pair.known or pair.verdict)
    ]
    assert others == []
    assert len(pairs) == num_pairs
    assert sum(pair.known is not None for pair in pairs) == num_known


def test_a_gold_answer_is_its_own_answer() -> None:
    pairs = [pair for pair in hard_pairs() if pair.verdict != "unknown"]
    for gold in sorted({pair.gold for pair in pairs}):
        itself = Pair(kind="", verdict="right", gold=gold, response=f"so \\boxed{{{gold}}}.")
        assert scorer_verdict(itself, extract="boxed") == "right", gold

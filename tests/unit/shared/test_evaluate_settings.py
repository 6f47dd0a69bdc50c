"""`[eval.published]`: tables say what is known and what is not."""

from __future__ import annotations

from tba.config.evaluation import PublishedNumber
from tba.evaluation.evaluation_job import Comparison, Estimate, EvaluationReport, ModeReport, ScoreCounts
from tba_cli.reports.comparison import evaluation_markdown


def test_the_tables_show_errors_unknown_scores_and_the_difference_to_published_numbers() -> None:
    found = Estimate(value=0.5, stderr=0.125, num_prompts=16, num_completions=16, low=0.4, high=0.6)
    counts = ScoreCounts(
        reward_versions=["t@1"], success=">= 1", num_scored=16, num_unknown=4, unknown={"timeout": 3, "crashed": 1}
    )
    number = PublishedNumber(
        name="a paper", metric="greedy.t.success_rate", value=0.25, setting="7 steps", source="p. 3"
    )
    other = PublishedNumber(name="another", metric="greedy.t.mean_reward", value=1.0, setting="8 steps", source="p. 4")
    table = evaluation_markdown(
        EvaluationReport(
            subject="version 1-4 of run 'demo'",
            version="1-4",
            params_sha256=None,
            run="demo",
            engine="embedded",
            tba_version="0",
            finished_at_s=1.0,
            num_prompts=20,
            refused_prompts={"p-7": "too long"},
            modes={
                "greedy": ModeReport(
                    temperature=0, num_completions=19, finish_reasons={"stop": 19}, scores={"t": counts}
                )
            },
            metrics={"greedy.t.success_rate": found},
            references=[Comparison(reference=number, found=found), Comparison(reference=other, found=None)],
            generation_s=2.0,
            num_generated_tokens=100,
            settings={},
        )
    )
    squeezed = " ".join(table.split())
    assert "| greedy.t.success_rate (>= 1) | 0.5 (0.4 to 0.6) | 0.125 | 16 | 16 |" in squeezed
    assert "greedy t: 4 of 20 scores are unknown (1 crashed, 3 timeout)" in table
    assert "1 prompts were refused, for example p-7: too long" in table
    expected = (
        "| a paper | greedy.t.success_rate | 0.25 | 0.5 ± 0.125 | +0.25 (+2.0 standard errors) | 7 steps | p. 3 |"
    )
    assert expected in squeezed
    assert "| another | greedy.t.mean_reward | 1 | unknown | |" in squeezed

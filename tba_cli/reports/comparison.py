"""Tables of results in Markdown: finished runs, and one published evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tba.evaluation.evaluation_job import Comparison, EvaluationReport
from tba_cli.console import known

RUN_COLUMNS = (
    ("run", "run", ""),
    ("seed", "seed", "d"),
    ("start accuracy", "start_accuracy", ".3f"),
    ("final accuracy", "final_accuracy", ".3f"),
    ("gain", "gain", "+.3f"),
    ("start greedy", "start_greedy", ".3f"),
    ("final greedy", "final_greedy", ".3f"),
    ("steps", "steps", "d"),
    ("train_s", "train_s", ".0f"),
    ("first_step_s", "first_step_s", ".1f"),
    ("trainer_wait_share", "trainer_wait_share", ".3f"),
    ("realised m", "realised_most_on_policy", ".3f"),
    ("rollouts", "rollouts_generated", "d"),
)
"""For each column its heading, its key in summary.json, and its number format."""


def runs_markdown(summaries: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for each run; an en dash stands for an unknown value."""
    rows = [
        ["–" if (value := summary.get(key)) is None else format(value, form) for _, key, form in RUN_COLUMNS]
        for summary in summaries
    ]
    return _padded_table([heading for heading, _, _ in RUN_COLUMNS], rows)


def evaluation_markdown(report: EvaluationReport) -> str:
    """Return the tables of an evaluation: every metric with its standard error, unknown scores, published numbers.

    The columns are padded, so that the text also reads well in a terminal.
    """
    scores = {(mode, task): counts for mode, part in report.modes.items() for task, counts in part.scores.items()}
    rules = {f"{mode}.{task}.success_rate": f" ({counts.success})" for (mode, task), counts in scores.items()}
    rows = []
    for name, estimate in report.metrics.items():
        value, error = known(estimate.value, ".4g"), "" if estimate.stderr is None else known(estimate.stderr, ".4g")
        if estimate.low is not None and estimate.high is not None:
            value += f" ({known(estimate.low, '.4g')} to {known(estimate.high, '.4g')})"
        rows.append(
            (name + rules.get(name, ""), value, error, str(estimate.num_prompts), str(estimate.num_completions))
        )
    parts = [
        f"{report.subject}: {report.num_prompts} held-out prompts, engine {report.engine}, "
        f"{report.num_generated_tokens} tokens in {report.generation_s:.1f} s",
        _padded_table(("metric", "value", "standard error", "prompts", "completions"), rows),
    ]
    notes = []
    if report.refused_prompts:
        first = next(iter(report.refused_prompts.items()))
        notes.append(f"* {len(report.refused_prompts)} prompts were refused, for example {first[0]}: {first[1]}")
    for (mode, task), counts in scores.items():
        if counts.num_unknown:
            reasons = ", ".join(f"{num} {reason}" for reason, num in sorted(counts.unknown.items()))
            num = counts.num_scored + counts.num_unknown + sum(counts.wrong.values())
            notes.append(f"* {mode} {task}: {counts.num_unknown} of {num} scores are unknown ({reasons})")
        if counts.wrong:
            reasons = ", ".join(f"{num} {reason}" for reason, num in sorted(counts.wrong.items()))
            notes.append(f"* {mode} {task}: wrong, since the answers are why they have no score: {reasons}")
    if notes:
        parts.append("Unknown scores are left out of the values; the brackets show how much they could change.")
        parts.append("\n".join(notes))
    if report.references:
        head = ("published", "metric", "its value", "found", "difference", "its setting", "source")
        parts.append(_padded_table(head, [_reference_cells(item) for item in report.references]))
    return "\n\n".join(parts) + "\n"


def _reference_cells(item: Comparison) -> tuple[str, ...]:
    reference, found = item.reference, item.found
    published = (reference.name, reference.metric, known(reference.value, ".4g"))
    where = (reference.setting, reference.source)
    if found is None or found.value is None or item.difference is None:
        return *published, "unknown", "", *where
    error = found.stderr
    # a difference means something only beside the noise of our own number
    ours = known(found.value, ".4g") + ("" if error is None else f" ± {known(error, '.4g')}")
    difference = f"{item.difference:+.4g}" + (f" ({item.difference / error:+.1f} standard errors)" if error else "")
    return *published, ours, difference, *where


def _padded_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are as wide as their widest cell."""
    # Markdown does not need it; people read the file in a terminal as well
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [" | ".join(map(str.ljust, cells, widths)) for cells in (head, ["-" * width for width in widths], *rows)]
    return "\n".join(f"| {line} |" for line in lines)

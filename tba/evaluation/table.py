"""An evaluation as a Markdown table that also reads well in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tba.evaluation.report import Comparison, Estimate, EvaluationReport


def render_table(report: EvaluationReport) -> str:
    """What was evaluated, every number with its standard error, what is unknown, and the published numbers."""
    parts = [
        f"{report.subject}: {report.num_prompts} held-out prompts, engine {report.engine}, "
        f"{report.num_generated_tokens} tokens in {report.generation_s:.1f} s",
        _table(
            ("metric", "value", "standard error", "prompts", "completions"),
            [(_named(name, report), *_cells(estimate)) for name, estimate in report.metrics.items()],
        ),
        *_unknown(report),
    ]
    if report.references:
        head = ("published", "metric", "its value", "found", "difference", "its setting", "source")
        parts.append(_table(head, [_comparison(item) for item in report.references]))
    return "\n\n".join(parts) + "\n"


def _named(name: str, report: EvaluationReport) -> str:
    """A success rate with the rule for a success."""
    for mode, part in report.modes.items():
        for task, counts in part.scores.items():
            if name == f"{mode}.{task}.success_rate":
                return f"{name} ({counts.success})"
    return name


def _cells(estimate: Estimate) -> tuple[str, str, str, str]:
    value = _number(estimate.value)
    if estimate.low is not None and estimate.high is not None:
        value += f" ({_number(estimate.low)} to {_number(estimate.high)})"
    error = "" if estimate.stderr is None else _number(estimate.stderr)
    return value, error, str(estimate.num_prompts), str(estimate.num_completions)


def _unknown(report: EvaluationReport) -> list[str]:
    lines = []
    if report.refused_prompts:
        first = next(iter(report.refused_prompts.items()))
        lines.append(f"* {len(report.refused_prompts)} prompts were refused, for example {first[0]}: {first[1]}")
    for mode, part in report.modes.items():
        for task, counts in part.scores.items():
            if counts.num_unknown:
                reasons = ", ".join(f"{num} {reason}" for reason, num in sorted(counts.unknown.items()))
                num = counts.num_scored + counts.num_unknown
                lines.append(f"* {mode} {task}: {counts.num_unknown} of {num} scores are unknown ({reasons})")
    return ["Unknown scores are left out of the values; in brackets what they could change.\n\n" + "\n".join(lines)] * (
        len(lines) > 0
    )


def _comparison(item: Comparison) -> tuple[str, ...]:
    reference, found = item.reference, item.found
    published = (reference.name, reference.metric, _number(reference.value))
    where = (reference.setting, reference.source)
    if found is None or found.value is None or item.difference is None:
        return *published, "unknown", "", *where
    error = found.stderr
    ours = _number(found.value) + ("" if error is None else f" ± {_number(error)}")
    difference = f"{item.difference:+.4g}" + (f" ({item.difference / error:+.1f} standard errors)" if error else "")
    return *published, ours, difference, *where


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [_row(head, widths), "|" + "|".join("-" * (width + 2) for width in widths) + "|"]
    return "\n".join([*lines, *(_row(row, widths) for row in rows)])


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"

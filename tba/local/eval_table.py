"""The evaluations of a run as an HTML table: everything that was measured, one row per evaluation."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from tba.api import BestVersion, EvalInfo

Cell = tuple[str, Callable[[EvalInfo], float | int | None]]


def eval_table(evals: Sequence[EvalInfo], best: BestVersion | None) -> str:
    """A table of the finished evaluations, oldest first; columns that nothing is known of are left out."""
    done = [item for item in evals if item.state == "done"]
    if not done:
        return "<p>No evaluation was finished.</p>"
    ks = sorted({k for item in done for k in item.pass_at})
    cells = [(name, get) for name, get in _cells(ks) if any(get(item) is not None for item in done)]
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in ("version", *(name for name, _ in cells)))
    rows = []
    for item in done:
        is_best = best is not None and item.version == best.version
        name = f"<b>{item.version}</b> (best)" if is_best else item.version
        values = "".join(f"<td>{_text(get(item))}</td>" for _, get in cells)
        rows.append(f"<tr><td>{name}</td>{values}</tr>")
    caption = "" if best is None else f"<caption>{html.escape(best_text(best))}</caption>"
    return f"<table>{caption}\n<tr>{heads}</tr>\n" + "\n".join(rows) + "\n</table>"


def best_text(best: BestVersion) -> str:
    """One line about the best version."""
    return (
        f"best version {best.version}: {best.metric} {best.value:.3f} on the {best.num_prompts} held-out prompts that "
        "all evaluations have in common"
    )


def _cells(ks: Sequence[int]) -> list[Cell]:
    return [
        ("prompts", lambda item: item.num_prompts),
        ("pass@1 sampled", lambda item: item.accuracy),
        ("pass@1 greedy", lambda item: item.greedy_accuracy),
        *((f"pass@{k}", lambda item, k=k: item.pass_at.get(k)) for k in ks),
        ("mean reward", lambda item: item.mean_reward),
        ("mean response tokens", lambda item: item.mean_response_tokens),
        ("KL to the starting model, nats", lambda item: item.kl_to_reference),
        ("distinct-1", lambda item: item.distinct_1),
        ("distinct-2", lambda item: item.distinct_2),
        ("distinct-3", lambda item: item.distinct_3),
        ("embedding distance", lambda item: item.embedding_distance),
        ("unknown scores", lambda item: item.num_unknown or None),
    ]


def _text(value: float | int | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.3f}" if isinstance(value, float) else str(value)

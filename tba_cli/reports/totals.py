"""Tokens and cost of a run in lines, for the commands that show it."""

from __future__ import annotations

import time
from decimal import Decimal

from tba.api import CostInfo, TokenTotals

DROPPED = (
    ("evicted", "evicted"),
    ("refused at the push", "refused"),
    ("refused by the trainer", "refused_by_trainer"),
    ("in skipped batches", "skipped"),
)
"""What happened to tokens, and its field of `TokenTotals`."""


def total_lines(tokens: TokenTotals | None, cost: CostInfo | None) -> list[str]:
    """Return a line on tokens, one on those that are unknown, one on the cost; each only where there is something."""
    return [*_token_lines(tokens), *_cost_lines(cost)]


def _token_lines(tokens: TokenTotals | None) -> list[str]:
    # the buffer, the history, or all of the run is of an older release, which counted rollouts alone
    if tokens is None or (not tokens.generated and tokens.not_counted.get("generated")):
        return []
    lost = [f"{text} {number:,}" for text, name in DROPPED if (number := sum(getattr(tokens, name).values()))]
    lines = [f"tokens: {', '.join((f'{tokens.generated:,} generated', f'{tokens.trained:,} trained', *lost))}"]
    if tokens.not_counted:
        unknown = ", ".join(
            f"{name} {number:,} {'batches' if name == 'skipped' else 'rollouts'}"
            for name, number in sorted(tokens.not_counted.items())
        )
        lines.append(f"of these the tokens are not known, and not among them: {unknown}")
    return lines


def _cost_lines(cost: CostInfo | None) -> list[str]:
    if cost is None:
        return []
    parts = ", ".join(f"{kind}s {money(value)}" for kind, value in cost.by_kind.items())
    line = f"cost so far: {money(cost.total)} {cost.currency} ({parts})"
    if cost.per_1000_trained is not None:
        line += f", {money(cost.per_1000_trained)} per 1,000 trained completions"
    if cost.rollouts_trained_before and cost.since_s is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(cost.since_s))
        line += f"; since {since} only, {cost.rollouts_trained_before:,} completions were trained on before"
    return [line]


def money(value: float) -> str:
    """Return an amount with two decimals, or three digits where it is small, never with an exponent; as `money` of the
    page."""
    return f"{value:,.2f}" if value == 0 or value >= 0.1 else f"{Decimal(f'{value:.3g}'):f}"

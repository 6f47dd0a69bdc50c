"""Totals of a run for GET /v1/stats and GET /metrics: completion tokens, and what the run has cost so far."""

from __future__ import annotations

from collections.abc import Mapping

from tba.api import CostInfo, TokenTotals
from tba.config.sections import CostSection
from tba_buffer.run.component_times import CountedTimes

SECONDS_PER_HOUR = 3600.0
TOKENS, WITH_TOKENS = "tokens:", "with_tokens:"
REASONS_OF = {
    "evicted": "evicted",
    "refused": "refused",
    "trainer_refused": "refused_by_trainer",
    "skipped": "skipped",
}
"""Group of counters -> its field of `TokenTotals`."""


def token_totals(totals: Mapping[str, int]) -> TokenTotals:
    """Return the tokens of the counters, and how many rollouts (skipped: batches) they lack.

    Args:
        totals: every counter of the run, of one moment.
    """
    counted = {"generated": totals.get("generated", 0), "trained": totals.get("trained", 0)}
    known = {name: totals.get(WITH_TOKENS + name, 0) for name in counted}
    tokens: dict[str, dict[str, int]] = {}
    for group, name in REASONS_OF.items():
        # `evicted:<reason>:<length>` is a part of `evicted:<reason>`
        counted[name] = sum(number for key, number in _of(totals, group).items() if ":" not in key)
        known[name] = sum(_of(totals, WITH_TOKENS + group).values())
        tokens[name] = _of(totals, TOKENS + group)
    return TokenTotals(
        generated=totals.get(TOKENS + "generated", 0),
        trained=totals.get(TOKENS + "trained", 0),
        not_counted={name: counted[name] - known[name] for name in counted if counted[name] > known[name]},
        **tokens,
    )


def _of(totals: Mapping[str, int], group: str) -> dict[str, int]:
    prefix = f"{group}:"
    return {key.removeprefix(prefix): number for key, number in sorted(totals.items()) if key.startswith(prefix)}


def cost_so_far(section: CostSection, times: CountedTimes | None, num_trained: int) -> CostInfo | None:
    """Return what the run has cost so far; None where nothing has a price.

    Args:
        section: the prices.
        times: how long the components were there; None: no heartbeat has come.
        num_trained: rollouts that steps trained on since the run began.
    """
    prices = section.prices_per_hour
    if not prices:
        return None
    times = times or CountedTimes({}, None, num_trained)
    by_kind = {kind: price * times.seconds.get(kind, 0.0) / SECONDS_PER_HOUR for kind, price in prices.items()}
    total, num_since = sum(by_kind.values()), num_trained - times.trained_before
    return CostInfo(
        currency=section.currency,
        total=total,
        by_kind=by_kind,
        per_1000_trained=1000.0 * total / num_since if num_since > 0 else None,
        since_s=times.since_s,
        rollouts_trained_before=times.trained_before,
    )

"""Totals of a run for GET /v1/stats and GET /metrics: completion tokens."""

from __future__ import annotations

from collections.abc import Mapping

from tba.api import TokenTotals

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

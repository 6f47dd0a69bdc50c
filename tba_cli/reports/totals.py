"""Tokens of a run in lines, for the commands that show it."""

from __future__ import annotations

from tba.api import TokenTotals

DROPPED = (
    ("evicted", "evicted"),
    ("refused at the push", "refused"),
    ("refused by the trainer", "refused_by_trainer"),
    ("in skipped batches", "skipped"),
)
"""What happened to tokens, and its field of `TokenTotals`."""


def total_lines(tokens: TokenTotals | None) -> list[str]:
    """Return a line on tokens, and one on those that are unknown; each only where there is something."""
    # where none could be counted, 0 would be a wrong number
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

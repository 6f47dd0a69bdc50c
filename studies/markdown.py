"""Tables in Markdown, for every study."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NO_CELLS = "No cell of this table has been run yet."


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, or a sentence when there are no rows."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    if not body:
        return NO_CELLS
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *body])

"""Reading the ledger, and checking that along the living lineage every step appears exactly once (design.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tba.api import LedgerEntry
from tba.clients import BufferClient
from tba.versions import LineageTree, PolicyVersion

PAGE_ENTRIES = 500


def lineage_tree(parents: Mapping[int, str]) -> LineageTree:
    """The tree of GET /v1/run: lineage -> `lineage-step` of its parent."""
    return LineageTree({lineage: PolicyVersion.parse(text) for lineage, text in parents.items()})


def read_ledger(client: BufferClient, *, after: int = 0) -> list[LedgerEntry]:
    """All entries from position `after`, page by page.

    Raises:
        ServiceError: the buffer service does not answer.
    """
    entries: list[LedgerEntry] = []
    position: int | None = after
    while position is not None:
        reply = client.ledger(after=position, limit=PAGE_ENTRIES)
        entries.extend(reply.entries)
        # a page that does not advance would loop for ever
        position = reply.next if reply.next is not None and reply.next > position else None
    return entries


def living_steps(tree: LineageTree, *, lineage: int, step: int) -> dict[int, range]:
    """Which steps each lineage contributes to the way from the starting model to (lineage, step)."""
    path = tree.ancestry(PolicyVersion(lineage, step))
    starts = [parent.step for parent in path[1:]] + [0]
    return {version.lineage: range(start + 1, version.step + 1) for version, start in zip(path, starts, strict=True)}


def living_entries(entries: Sequence[LedgerEntry], tree: LineageTree, *, lineage: int, step: int) -> list[LedgerEntry]:
    """The entries on the way to (lineage, step), by step."""
    steps = living_steps(tree, lineage=lineage, step=step)
    living = [entry for entry in entries if entry.step in steps.get(entry.lineage, ()) and not entry.abandoned]
    return sorted(living, key=lambda entry: entry.step)


def ledger_violations(entries: Sequence[LedgerEntry], tree: LineageTree, *, lineage: int, step: int) -> list[str]:
    """What is wrong with the ledger, one sentence each; empty when every step 1..step appears exactly once.

    Entries of the living lineage beyond `step` are ignored: they were acked after `step` was read.
    """
    steps = living_steps(tree, lineage=lineage, step=step)
    violations: list[str] = []
    seen: Counter[int] = Counter()
    for entry in entries:
        name = f"{entry.lineage}-{entry.step} (batch {entry.batch_id})"
        living = entry.step in steps.get(entry.lineage, ())
        newer = entry.lineage == lineage and entry.step > step
        if living and entry.abandoned:
            violations.append(f"entry {name} is on the living lineage but marked as abandoned")
        elif living:
            seen[entry.step] += 1
        elif not entry.abandoned and not newer:
            violations.append(f"entry {name} is not on the living lineage but not marked as abandoned")
    violations.extend(f"step {number} is missing" for number in range(1, step + 1) if not seen[number])
    violations.extend(f"step {number} appears {count} times" for number, count in sorted(seen.items()) if count > 1)
    batches = Counter(entry.batch_id for entry in entries)
    violations.extend(f"batch {batch} was acked {count} times" for batch, count in batches.items() if count > 1)
    return violations

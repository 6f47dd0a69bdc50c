"""`tba ledger check`: the promise that every optimizer step of the living lineage was taken exactly once."""

from __future__ import annotations

import argparse

from tba.cli.target import open_client
from tba.local.ledger import ledger_violations, lineage_tree, read_ledger

EXIT_VIOLATION = 1
MAX_SHOWN = 20


def check_command(args: argparse.Namespace) -> int:
    """Read run and ledger from the buffer service; print the result, 1 on a violation."""
    client = open_client(args)
    try:
        # the run is read first: entries acked in between are newer than `step` and ignored
        info = client.run()
        entries = read_ledger(client)
    finally:
        client.close()
    violations = ledger_violations(entries, lineage_tree(info.parents), lineage=info.lineage, step=info.step)
    for violation in violations[:MAX_SHOWN]:
        print(violation)
    num_abandoned = sum(entry.abandoned for entry in entries)
    counts = f"{len(entries)} entries, {num_abandoned} abandoned, {info.step} steps, lineage {info.lineage}"
    if violations:
        print(f"ledger of {info.run!r}: {len(violations)} violations ({counts})")
        return EXIT_VIOLATION
    print(f"ledger of {info.run!r}: every step of the living lineage exactly once ({counts})")
    return 0

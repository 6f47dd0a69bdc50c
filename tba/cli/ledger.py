"""`tba ledger check`: the promise that every optimizer step of the living lineage was taken exactly once."""

from __future__ import annotations

import argparse

from tba.api import RunInfo
from tba.cli.target import ended_run, open_client
from tba.clients import BufferClient
from tba.local.ledger import LedgerCheck, ledger_lines, lineage_tree
from tba.local.saving import read_ended

EXIT_VIOLATION = 1
MAX_SHOWN = 20
MAX_READINGS = 5


def check_command(args: argparse.Namespace) -> int:
    """Read run and ledger from the buffer service, of a run that is over from its files; print the result, 1 on a
    violation."""
    folder = ended_run(args)
    if folder is not None:
        info, check = read_ended(folder, _checked)
    else:
        client = open_client(args)
        try:
            info, check = _checked(client)
        finally:
            client.close()
    violations = check.violations()
    for violation in violations[:MAX_SHOWN]:
        print(violation)
    if len(violations) > MAX_SHOWN:
        print(f"... and {len(violations) - MAX_SHOWN} more")
    fork = "" if check.forked_from is None else f", forked from {check.forked_from} of another run"
    counts = (
        f"{info.step} steps, {check.num_batches} batches, {check.num_abandoned} of them abandoned, "
        f"{check.num_skipped} skipped, "
        f"trainer starts: {check.num_starts}, living lineage {info.lineage}{fork}"
    )
    if violations:
        print(f"ledger of {info.run!r}: {len(violations)} violations ({counts})")
        return EXIT_VIOLATION
    print(f"ledger of {info.run!r}: every step of the living lineage exactly once ({counts})")
    return 0


def _checked(client: BufferClient) -> tuple[RunInfo, LedgerCheck]:
    """The run, and its whole ledger in a check. Read again when another trainer started meanwhile: what is abandoned
    has changed then."""
    for _ in range(MAX_READINGS):
        # the run is read first: entries acked in between are newer than `step`
        info = client.run()
        check = LedgerCheck(lineage_tree(info.parents), lineage=info.lineage, step=info.step, origin=info.origin)
        for line in ledger_lines(client):
            check.take(line)
        if client.run().lineage == info.lineage:
            break
    return info, check

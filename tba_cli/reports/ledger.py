"""Read the ledger, and check that along the active lineage every step happened exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tba.api import LedgerEntry, LedgerLine, OriginInfo, ResumeEntry
from tba.clients import BufferClient
from tba.versions import START, LineageTree, PolicyVersion

PAGE_LINES = 500


def lineage_tree(parents: Mapping[int, str]) -> LineageTree:
    """Parse `parents` of GET /v1/run: lineage -> `LINEAGE-STEP` of the version that it began with."""
    return LineageTree({lineage: PolicyVersion.parse(text) for lineage, text in parents.items()})


def ledger_lines(client: BufferClient) -> Iterator[LedgerLine]:
    """Yield all lines of the ledger; only one page is in memory at a time."""
    position: int | None = 0
    while position is not None:
        reply = client.ledger(after=position, limit=PAGE_LINES)
        yield from reply.entries
        # a page that does not advance would loop for ever
        position = reply.next if reply.next is not None and reply.next > position else None


def batch_entries(lines: Sequence[LedgerLine]) -> list[LedgerEntry]:
    """Return the acknowledged batches among the lines."""
    return [line for line in lines if isinstance(line, LedgerEntry)]


def active_steps(tree: LineageTree, *, lineage: int, step: int) -> dict[int, range]:
    """Return for each lineage the steps that it contributes to the history of version (lineage, step)."""
    path = tree.ancestry(PolicyVersion(lineage, step))
    starts = [parent.step for parent in path[1:]] + [0]
    return {version.lineage: range(start + 1, version.step + 1) for version, start in zip(path, starts, strict=True)}


def active_entries(lines: Sequence[LedgerLine], tree: LineageTree, *, lineage: int, step: int) -> list[LedgerEntry]:
    """Return the batch entries in the history of version (lineage, step), sorted by step, without abandoned ones."""
    steps = active_steps(tree, lineage=lineage, step=step)
    active = [entry for entry in batch_entries(lines) if entry.step in steps.get(entry.lineage, ())]
    return sorted((entry for entry in active if not entry.abandoned), key=lambda entry: entry.step)


class LedgerCheck:
    """Takes the lines of a ledger in order, and finds violations.

    The main invariant: along the active lineage every step up to `step` has exactly one batch. The others: each lineage
    acks its steps in order and without a gap, after its own start and before the start of the next lineage. The starts
    agree with `tree`. No batch was acked twice. `abandoned` agrees with the parents of the lineages. A line names as
    many rollouts as it counts, and used some of them unless it was skipped.

    Batches newer than version (lineage, step) need not be in its history, because the run may go on meanwhile. The
    lineages of `origin` need no lines, because another run's ledger has them. A ledger without starts is checked by its
    batches alone. Memory: batch id and step of every line.

    Args:
        lineage, step: the last version of the run, read before its ledger.
        origin: the snapshot that the run began with, as in RunInfo; None: there was none.
        has_rollout_ids: False for saved histories, which leave the ids out.
    """

    def __init__(
        self,
        tree: LineageTree,
        *,
        lineage: int,
        step: int,
        origin: OriginInfo | None = None,
        has_rollout_ids: bool = True,
    ) -> None:
        self._parents, self._lineage, self._step = tree.parents, lineage, step
        self._first_lineage = 1
        if origin is not None:
            # no trainer starts before the origin is loaded: until then every lineage is adopted
            self._first_lineage += origin.lineage if origin.state == "complete" else lineage
        self._active = active_steps(tree, lineage=lineage, step=step)
        self._has_rollout_ids = has_rollout_ids
        self._started: list[int] = []
        self._last_steps = {number: parent.step for number, parent in self._parents.items()}
        self._seen: Counter[int] = Counter()
        self._batches: Counter[str] = Counter()
        self._wrong: list[str] = []
        self.num_batches = self.num_abandoned = self.num_skipped = 0
        """Number of batches so far; how many are abandoned; how many are skipped (these may be abandoned too)."""

    @property
    def num_starts(self) -> int:
        """Number of trainer starts in the lines so far."""
        return len(self._started)

    @property
    def forked_from(self) -> PolicyVersion | None:
        """The version of another run that this one began with, if that is not the starting model."""
        parent = self._parents.get(self._first_lineage, START)
        return None if self._first_lineage == 1 or parent == START else parent

    def take(self, line: LedgerLine) -> None:
        """Check the next line of the ledger."""
        if isinstance(line, ResumeEntry):
            name, parent = f"the start of lineage {line.lineage}", PolicyVersion.parse(line.parent)
            if self._started and line.lineage != self._started[-1] + 1:
                self._wrong.append(f"{name} comes after that of lineage {self._started[-1]}")
            if line.lineage <= self._lineage and self._parents.get(line.lineage) != parent:
                self._wrong.append(f"{name} is from {parent}, but from {self._parents.get(line.lineage)} in the table")
            reached = self._last_steps.get(parent.lineage, 0)
            if parent.lineage in self._started and parent.step > reached:
                self._wrong.append(
                    f"{name} is from {parent}, but lineage {parent.lineage} had only reached step {reached}"
                )
            self._started.append(line.lineage)
            self._last_steps[line.lineage] = parent.step
            return
        name, before = f"entry {line.lineage}-{line.step} (batch {line.batch_id})", self._last_steps
        if self._started and line.lineage != self._started[-1]:
            self._wrong.append(f"{name} was acked while lineage {self._started[-1]} owned the run")
        if line.step != before.get(line.lineage, 0) + 1:
            self._wrong.append(f"{name} follows step {before.get(line.lineage, 0)}")
        before[line.lineage] = line.step
        if self._has_rollout_ids and len(line.rollout_ids) != line.num_rollouts:
            self._wrong.append(f"{name} names {len(line.rollout_ids)} of {line.num_rollouts} rollouts")
        if line.skipped is None and sum(line.refused.values()) >= line.num_rollouts:
            self._wrong.append(f"{name} was made with none of its {line.num_rollouts} rollouts but not skipped")
        # entries that were acked after the run was read prove nothing
        is_newer = line.lineage > self._lineage or (line.lineage == self._lineage and line.step > self._step)
        is_active = line.step in self._active.get(line.lineage, ())
        if is_active and line.abandoned:
            self._wrong.append(f"{name} is on the active lineage but marked as abandoned")
        elif is_active:
            self._seen[line.step] += 1
        elif not line.abandoned and not is_newer:
            self._wrong.append(f"{name} is not on the active lineage but not marked as abandoned")
        self._batches[line.batch_id] += 1
        self.num_batches += 1
        self.num_abandoned += line.abandoned
        self.num_skipped += line.skipped is not None

    def violations(self) -> list[str]:
        """Return the violations, one sentence each."""
        wrong = list(self._wrong)
        if self._started:
            known = {number for number in self._parents if self._first_lineage <= number <= self._lineage}
            wrong.extend(
                f"lineage {number} has no start in the ledger" for number in sorted(known - set(self._started))
            )
        for lineage, steps in sorted(self._active.items()):
            if lineage >= self._first_lineage:
                wrong.extend(f"step {number} is missing" for number in steps if not self._seen[number])
        wrong.extend(f"step {number} appears {num} times" for number, num in sorted(self._seen.items()) if num > 1)
        wrong.extend(f"batch {batch} was acked {num} times" for batch, num in self._batches.items() if num > 1)
        return wrong


def ledger_violations(
    lines: Iterable[LedgerLine], tree: LineageTree, *, lineage: int, step: int, origin: OriginInfo | None = None
) -> list[str]:
    """Return the violations in the ledger of a saved history (see LedgerCheck), one sentence each."""
    check = LedgerCheck(tree, lineage=lineage, step=step, origin=origin, has_rollout_ids=False)
    for line in lines:
        check.take(line)
    return check.violations()

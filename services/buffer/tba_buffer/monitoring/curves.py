"""GET /v1/curves: the metrics of all steps, kept in memory, thinned for a plot.

CurvesReader   follows the ledger from the line that it has read last; the first call of a process reads all of it
read_page      parses a page of lines and keeps those of batches; a large page is parsed in a thread
StepMetrics    the columns of all steps read so far
thin           rows of the columns -> one mean per point and metric
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from tba.api import Curves
from tba.concurrency import SingleFlight, in_thread
from tba.errors import BadRequestError
from tba.fields import MAX_LINEAGE, MAX_STEP
from tba.logs import get_logger
from tba_buffer.run.lineage import Lineages
from tba_buffer.storage.context import DAMAGE_ERRORS, Context, RunHash, unreadable
from tba_buffer.storage.redis_client import redis_errors

Floats = NDArray[np.float64]
MAX_POINTS = 2000
MAX_NAMES_CHARS = 4096
"""Most characters of the query `names`: percent-encoded, it must fit into the first line of a request (64 KiB)."""
MAX_NAMES_ASKED = 500
MAX_NAMES = 2000
"""Most metrics that are kept: a bound on memory, in case something makes up a new name in each step."""
FIRST_LINES, MAX_LINES = 16, 500
"""Most new lines on the first page, and on any page."""
PAGE_BYTES = 4 << 20
"""Approximate size of later pages: lines are long, because each names all rollouts of its batch."""
THREAD_BYTES = 256 << 10
"""A page with more bytes is parsed in a thread."""
log = get_logger("curves")


class BatchLine(msgspec.Struct, frozen=True, tag_field="kind", tag="batch"):
    """The fields of a line of the ledger that curves need; the others, such as the rollout ids, are skipped."""

    lineage: Annotated[int, msgspec.Meta(ge=0, le=MAX_LINEAGE)]
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
    acked_at_s: float
    metrics: dict[str, float | None] = {}


class ResumeLine(msgspec.Struct, frozen=True, tag_field="kind", tag="resume"):
    """The line of a trainer's start."""


_DECODER = msgspec.json.Decoder(BatchLine | ResumeLine)


def read_page(lines: Sequence[bytes], *, key: str, first: int) -> list[BatchLine]:
    """Parse ledger lines, numbered from `first`, and return those of batches. Errors name the Redis `key`.

    Raises:
        UnavailableError: a line cannot be read.
    """
    found: list[BatchLine] = []
    for number, line in enumerate(lines, first):
        try:
            read = _DECODER.decode(line)
        except DAMAGE_ERRORS as error:
            raise unreadable(key, f"line {number}", error) from None
        if isinstance(read, BatchLine):
            found.append(read)
    return found


class StepMetrics:
    """The metrics of all steps in the order of the ledger, abandoned ones too: 8 bytes per step and metric."""

    def __init__(self) -> None:
        # arrays of Python, which grow at their end without a copy of each
        self.lineages, self.steps, self.at_s = array("q"), array("q"), array("d")
        """[rows]; `at_s`: Unix seconds at which the steps were acked."""
        self.columns: dict[str, array[float]] = {}
        """Values [rows] of each metric, NaN where unknown; metrics in the order in which they first came."""
        self._left_out: set[str] = set()

    def add(self, lines: Sequence[BatchLine]) -> None:
        """Append one row per line; a new metric is NaN in the rows before it."""
        for line in lines:
            for name in line.metrics:
                if name in self.columns or name in self._left_out:
                    continue
                if len(self.columns) < MAX_NAMES:
                    self.columns[name] = array("d", [np.nan]) * len(self.steps)
                elif len(self._left_out) < MAX_NAMES:  # names that nobody keeps must not fill the memory either
                    if not self._left_out:
                        log.warning("metrics_left_out_of_curves", kept=MAX_NAMES, first=name)
                    self._left_out.add(name)
            for name, column in self.columns.items():
                value = line.metrics.get(name)
                column.append(np.nan if value is None else value)
            self.lineages.append(line.lineage)
            self.steps.append(line.step)
            self.at_s.append(line.acked_at_s)


def thin(values: Floats, num_per_point: int) -> list[float | None]:
    """Return the mean of each run of `num_per_point` values without the unknown (NaN) ones; None if all are unknown."""
    num_points = -(-len(values) // num_per_point)
    padded = np.full(num_points * num_per_point, np.nan)
    padded[: len(values)] = values
    groups = padded.reshape(num_points, num_per_point)
    known = np.isfinite(groups)
    num_known = known.sum(axis=1)
    with np.errstate(over="ignore"):
        means = np.where(known, groups, 0.0).sum(axis=1) / np.maximum(1, num_known)
    found = means.astype(object)
    # also a sum that is too large for a float
    found[(num_known == 0) | ~np.isfinite(means)] = None
    return found.tolist()


class CurvesReader:
    """Reads the metrics of the steps."""

    def __init__(self, context: Context, lineages: Lineages) -> None:
        self._context, self._lineages = context, lineages
        self._reading = SingleFlight(self._follow, asyncio.Lock())
        self._forget()

    def _forget(self) -> None:
        self.metrics = StepMetrics()
        self._num_lines, self._last_line = 0, b""
        self._lines_per_page = FIRST_LINES

    async def read(
        self,
        *,
        names: str | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 500,
    ) -> Curves:
        """Return curves of at most `max_points` points. A metric that no step has is None everywhere.

        Args:
            names: names of metrics, separated by commas; None: all.
            from_step: the first step; None: from the beginning.
            to_step: the last step; None: to the end.

        Raises:
            BadRequestError: `from_step` is after `to_step`, or there are too many names.
        """
        if from_step is not None and to_step is not None and from_step > to_step:
            raise BadRequestError(
                f"from_step {from_step} is after to_step {to_step}; send the smaller one as from_step"
            )
        wanted = None if names is None else list(dict.fromkeys(name for name in names.split(",") if name))
        if wanted is not None and len(wanted) > MAX_NAMES_ASKED:
            raise BadRequestError(
                f"names holds {len(wanted)} metrics; ask for at most {MAX_NAMES_ASKED} at once, or all"
            )
        await self._reading.run()
        # read behind the lines: a history that is older than they are would call new steps abandoned
        run = await RunHash.read(self._context)
        columns, steps, at_s = self.metrics.columns, np.array(self.metrics.steps), np.array(self.metrics.at_s)
        history = self._lineages.history(run.lineage)
        lineages, inverse = np.unique(np.array(self.metrics.lineages), return_inverse=True)
        last = np.array([history.get(lineage, -1) for lineage in lineages.tolist()], dtype=np.int64)
        is_active = steps <= last[inverse]
        lowest, highest = from_step or 0, np.iinfo(np.int64).max if to_step is None else to_step
        rows = np.flatnonzero(is_active & (steps >= lowest) & (steps <= highest))
        num_per_point = max(1, -(-len(rows) // max_points))
        firsts, lasts = rows[::num_per_point], rows[num_per_point - 1 :: num_per_point]
        if len(lasts) < len(firsts):  # the last point has fewer steps
            lasts = np.append(lasts, rows[-1])
        unknown = np.full(len(steps), np.nan)
        return Curves(
            names=list(columns),
            num_steps=len(rows),
            num_steps_per_point=num_per_point,
            first_steps=steps[firsts].tolist(),
            steps=steps[lasts].tolist(),
            at_s=at_s[lasts].tolist(),
            values={
                name: thin(np.array(columns.get(name, unknown))[rows], num_per_point)
                for name in (columns if wanted is None else wanted)
            },
            num_abandoned=len(steps) - int(np.count_nonzero(is_active)),
        )

    async def _follow(self) -> None:
        """Read the new lines of the ledger; read all again if Redis was restored from an older copy.

        Raises:
            UnavailableError: Redis did not answer; earlier pages are kept, and the next call continues there.
        """
        while True:
            # the last line once more: if another one is in its place, Redis was restored from an older copy
            first = max(0, self._num_lines - 1)
            with redis_errors("read the ledger"):
                lines = await self._context.redis.lrange(self._context.keys.ledger, first, first + self._lines_per_page)
            if self._num_lines and lines[:1] != [self._last_line]:
                log.warning("curves_read_again", num_lines=self._num_lines)
                self._forget()
                continue
            new = lines[self._num_lines - first :]
            if not new:
                return
            num_bytes = sum(map(len, new))
            read = partial(read_page, new, key=self._context.keys.ledger, first=self._num_lines)
            self.metrics.add(read() if num_bytes < THREAD_BYTES else await in_thread(read))
            self._num_lines, self._last_line = self._num_lines + len(new), new[-1]
            self._lines_per_page = max(1, min(MAX_LINES, PAGE_BYTES * len(new) // num_bytes))

"""Watching a run through the buffer service: about once a second, until the run is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TextIO

from tba.api import LedgerEntry, RunInfo
from tba.clients import BufferClient
from tba.errors import ChildError, UnavailableError
from tba.local.history import Poll
from tba.local.ledger import batch_entries, ledger_lines
from tba.local.progress import ProgressView, Snapshot, SnapshotMaker
from tba.local.run_folder import RunFolder

POLL_INTERVAL_S = 1.0


class RunWatcher:
    """Polls the run, keeps polls.jsonl, shows snapshots.

    Waits: for the state of the run to become `done` or `failed`; the deadline of the whole wait is the run itself, the
    deadline of silence is `silence_s` (wait `buffer-poll`).

    Args:
        on_run: is told of every look at the run, until it is over.
    """

    def __init__(
        self,
        client: BufferClient,
        folder: RunFolder,
        view: ProgressView,
        *,
        num_steps: int,
        silence_s: float,
        on_run: Callable[[RunInfo], Awaitable[None]],
    ) -> None:
        self._client = client
        self._folder = folder
        self._view = view
        self._maker = SnapshotMaker(num_steps)
        self._silence_s = silence_s
        self._on_run = on_run
        self._num_lines = 0
        self._last_entry: LedgerEntry | None = None

    async def until_over(self, *, failed_lineage: int | None = None) -> RunInfo:
        """Poll until the run is done.

        Args:
            failed_lineage: the lineage whose failure is being resumed: the run stays `failed` until the trainer has
                taken a new one.

        Raises:
            ChildError: the run failed, or the buffer service was silent for too long.
        """
        heard_at_s = time.monotonic()
        with self._folder.polls_path.open("a") as polls:
            while True:
                try:
                    info, snapshot = await asyncio.to_thread(self._poll, polls)
                    heard_at_s = time.monotonic()
                except UnavailableError as error:
                    if time.monotonic() - heard_at_s > self._silence_s:
                        raise ChildError(
                            f"wait 'buffer-poll': no answer for {self._silence_s:.0f} s: {error}"
                        ) from None
                    await asyncio.sleep(POLL_INTERVAL_S)
                    continue
                self._view.show(snapshot)
                if info.state == "done":
                    return info
                if info.state == "failed" and info.lineage != failed_lineage:
                    raise ChildError(f"the run failed: {info.state_reason or 'no reason was given'}")
                await self._on_run(info)
                await asyncio.sleep(POLL_INTERVAL_S)

    def _poll(self, polls: TextIO) -> tuple[RunInfo, Snapshot]:
        info, stats = self._client.run(), self._client.stats()
        new_lines = list(ledger_lines(self._client, after=self._num_lines))
        self._num_lines += len(new_lines)
        self._last_entry = next(reversed(batch_entries(new_lines)), self._last_entry)
        poll = Poll(
            at_s=time.time(),
            step=info.step,
            generated=stats.rollouts_generated,
            trained=stats.rollouts_trained,
            stored=stats.num_rollouts,
        )
        polls.write(poll.model_dump_json() + "\n")
        polls.flush()
        return info, self._maker.make(poll, info, stats, self._last_entry)

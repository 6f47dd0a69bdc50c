"""Publishing in a background thread: snapshot -> object store -> announcement and sync mark -> evaluation request.

    loop     submit(snapshot)   waits for   a free place, when `max_unpublished_versions` snapshots are not yet
                                            published (wait "unpublished-versions", deadline `trainer.retry_s`)
    thread   for each snapshot, in order:   WeightVersions.publish (objects, then the manifest), retried while the
                                            store is away; then mark, retried while the buffer is away; then the
                                            evaluation request; then old versions are deleted

An error that a retry cannot mend (a fence, another content under the same version) ends the thread and is raised in
the loop at its next call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import transformers

from tba.api import MarkRequest
from tba.clients import BufferClient
from tba.errors import FencedError, StoreUnavailableError, TbaError, UnavailableError, WaitTimeoutError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba_trainer.evaluations import Evaluations
from tba_trainer.snapshots import Snapshot
from tba_trainer.status import Status

_RETRY_FIRST_S = 0.5
_RETRY_MOST_S = 10.0
_TICK_S = 0.1
log = get_logger("publisher")


class Publisher:
    """Publishes snapshots in the order in which they were submitted.

    Args:
        files: config and tokenizer files by name.
        token: fencing token of this trainer's lineage.
        collect: deletes old versions; called after each announcement.
        max_unpublished: snapshots that may wait.
        wait_s: deadline of the waits of the loop.
        stop: set when the process should end.
    """

    def __init__(
        self,
        *,
        versions: WeightVersions,
        buffer: BufferClient,
        evaluations: Evaluations,
        status: Status,
        files: Mapping[str, Path],
        token: str,
        collect: Callable[[], None],
        max_unpublished: int,
        wait_s: float,
        stop: threading.Event,
    ) -> None:
        self._versions, self._buffer, self._evaluations, self._status = versions, buffer, evaluations, status
        self._files, self._token, self._collect = files, token, collect
        self._max_unpublished, self._wait_s, self._stop = max_unpublished, wait_s, stop
        self._changed = threading.Condition()
        self._pending: deque[tuple[Snapshot, int | None, bool]] = deque()
        self._error: Exception | None = None
        self._trouble = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self.last_announced: PolicyVersion | None = None

    @property
    def num_unpublished(self) -> int:
        """Snapshots that are not announced yet."""
        return len(self._pending)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Announce nothing more; a transfer that is under way is left to end by itself."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what ended the thread, if anything did.

        Raises:
            FencedError, ObjectExistsError, TbaError
        """
        if self._error is not None:
            raise self._error

    def submit(self, snapshot: Snapshot, *, num_eval_prompts: int | None = None, announce: bool = True) -> None:
        """Hand a snapshot over; evaluate it on so many held-out prompts once it is announced (None: not at all).

        Args:
            announce: False only stores it, for who asks for that version by name.

        Raises:
            WaitTimeoutError: `max_unpublished` snapshots wait and none was published before the deadline.
        """
        self._wait_until_below(self._max_unpublished)
        with self._changed:
            self._pending.append((snapshot, num_eval_prompts, announce))
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything is announced.

        Raises:
            WaitTimeoutError: not before the deadline.
        """
        self._wait_until_below(1)

    def _wait_until_below(self, count: int) -> None:
        self.check()
        if len(self._pending) < count:
            return
        deadline = time.monotonic() + self._wait_s
        with self._status.waiting("unpublished-versions", self._wait_s):
            while len(self._pending) >= count:
                with self._changed:
                    self._changed.wait(timeout=_TICK_S)
                self.check()
                if self._stop.is_set():
                    return
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(
                        f"{len(self._pending)} weight versions could not be published within {self._wait_s:g} s "
                        f"({self._trouble or 'the transfer is still under way'}); training stopped, its last "
                        "checkpoint stands: repair that and start the trainer again"
                    )

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or self._pending)
            if self._closed.is_set():
                return
            snapshot, num_eval_prompts, announce = self._pending[0]
            try:
                self._publish(snapshot, num_eval_prompts, announce=announce)
            except Exception as error:
                self._error = error if isinstance(error, TbaError) else TbaError(f"publishing failed: {error!r}")
            with self._changed:
                if self._error is None and not self._closed.is_set():
                    self._pending.popleft()
                self._changed.notify_all()
            if self._error is not None:
                return

    def _publish(self, snapshot: Snapshot, num_eval_prompts: int | None, *, announce: bool) -> None:
        started = time.monotonic()
        self._until_it_works(lambda: self._put(snapshot), snapshot.version)
        if not announce:
            snapshot.close()
            return
        request = MarkRequest(version=str(snapshot.version), token=self._token)
        self._until_it_works(lambda: self._buffer.mark(request), snapshot.version)
        if self._closed.is_set():
            return
        snapshot.close()
        self.last_announced = snapshot.version
        log.info("published", version=str(snapshot.version), seconds=round(time.monotonic() - started, 3))
        if num_eval_prompts is not None:
            self._evaluations.request(snapshot.version, num_eval_prompts)
        try:
            self._collect()
        except FencedError:
            raise
        except TbaError as error:
            log.warning("old_versions_not_deleted", error=str(error))

    def _put(self, snapshot: Snapshot) -> None:
        self._versions.publish(
            version=snapshot.version,
            parent=snapshot.parent,
            dtype=snapshot.dtype,
            tensors_paths=snapshot.paths,
            files=self._files,
            canary=snapshot.canary,
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
        )

    def _until_it_works(self, action: Callable[[], object], version: PolicyVersion) -> None:
        pause_s = _RETRY_FIRST_S
        while not self._closed.is_set():
            try:
                action()
                self._trouble = ""
                return
            except (StoreUnavailableError, UnavailableError) as error:
                if not self._trouble:
                    log.warning("publishing_fails", version=str(version), error=str(error))
                self._trouble = str(error)
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, _RETRY_MOST_S)

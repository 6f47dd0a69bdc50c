"""Publish weight versions in a background thread, ask searchers to evaluate some of them, and delete old ones.

    loop     publish(version)   takes a snapshot, and waits for a free place while MAX_UNPUBLISHED_VERSIONS snapshots
                                are unpublished (wait "unpublished-versions", deadline `limits.RETRY_S`)
    thread   each snapshot, in order: encoded against the one before it, objects and manifest to the store, retried
             while the store is away; then the announcement, retried while the buffer is away; then the evaluation
             request; then, at most every few seconds, old versions are deleted

With a sharded model a snapshot is this process's share. In each other process a thread stores that process's share, and
replies to this thread (`tba_trainer.distributed.shares`).

The files of the last published version stay on the disk, because the next one may be a delta against them. With LoRA
the files of the starting model stay instead: the thread merges each adapter into them to compute the digests. An error
that no retry can fix (a fencing token, other content under the same version) ends the thread. The loop raises it at its
next call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import transformers

from tba.api import VersionRequest
from tba.clients import BufferClient
from tba.config import TrainerSection
from tba.errors import StoreUnavailableError, TbaError, UnavailableError, WaitTimeoutError
from tba.logs import get_logger
from tba.versions import START, PolicyVersion
from tba.weights import DeltaSettings, LocalVersion, WeightVersions
from tba.weights.retention import reasons_to_keep
from tba.wire import Manifest
from tba_trainer.checkpoints.checkpoint import CheckpointStore
from tba_trainer.checkpoints.weight_files import WeightSnapshot, WeightSnapshotWriter
from tba_trainer.loop import limits
from tba_trainer.loop.evaluations import Evaluations
from tba_trainer.loop.status import Session, Status

_RETRY_FIRST_S = 0.5
_RETRY_MOST_S = 10.0
_TICK_S = 0.1
_DELETE_INTERVAL_S = 5.0
"""Shortest time between two deletions: small models publish several times a second."""
Result = TypeVar("Result")
log = get_logger("publisher")


class Publisher:
    """Publishes snapshots in the order in which they were submitted.

    Args:
        section: limits and deadlines.
        session: its parent is the parent of the first version.
        versions: the published versions of the run.
        checkpoints: checkpoints of the run; a version that has one is not deleted.
        files: config and tokenizer files by name.
        start: the starting model, whose files stay to the end; None: no version is an adapter.
        stop: set when the process should end.
    """

    def __init__(
        self,
        *,
        section: TrainerSection,
        session: Session,
        buffer: BufferClient,
        versions: WeightVersions,
        checkpoints: CheckpointStore,
        evaluations: Evaluations,
        status: Status,
        files: Mapping[str, Path],
        start: WeightSnapshot | None,
        stop: threading.Event,
    ) -> None:
        self._section, self._token, self._buffer, self._evaluations = section, session.token, buffer, evaluations
        self._versions, self._checkpoints, self._files, self._deltas = versions, checkpoints, files, DeltaSettings()
        self._start, self._status, self._stop = start, status, stop
        self.submitted = session.parent
        """The last version that was submitted to be announced: the parent of the next one."""
        self._changed = threading.Condition()
        self._pending: deque[tuple[WeightSnapshot, int | None, bool]] = deque()
        self._base: tuple[WeightSnapshot, LocalVersion] | None = None
        """The last published snapshot with its files, against which the next version may be a delta."""
        self._num_without_base = 0
        """Number of next versions to store whole without trying a delta, because the last delta did not pay."""
        self._published_bytes = {"full": 0, "delta": 0, "adapter": 0}
        self._store_s = 0.0
        self._error: Exception | None = None
        self._retried_error = ""
        """Why the current transfer is being retried."""
        self._next_deletion_s = 0.0
        """Monotonic time from which the next published version deletes old ones."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def gauges(self) -> dict[str, float]:
        """Return the gauges of publishing in this lineage, for heartbeats."""
        return {
            "num_unpublished_versions": float(len(self._pending)),
            "published_full_bytes_total": float(self._published_bytes["full"]),
            "published_delta_bytes_total": float(self._published_bytes["delta"]),
            "published_adapter_bytes_total": float(self._published_bytes["adapter"]),
            "publish_s": self._store_s,
        }

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop publishing, and discard queued snapshots. A transfer in progress goes on, but waits for no follower."""
        self._closed.set()
        with self._changed:
            # those behind it may hold a copy of the model: a lineage after a rollback needs the memory
            discarded = [self._pending.pop()[0] for _ in range(len(self._pending) - 1)]
            under_way = self._pending[0][0] if self._pending else None
            self._changed.notify_all()
        for snapshot in discarded:
            self.discard(snapshot)
        if under_way is not None and under_way.others is not None:
            under_way.others.give_up()

    def check(self) -> None:
        """Raise the error that ended the thread, if there is one."""
        if self._error is not None:
            raise self._error

    def publish(
        self, snapshots: WeightSnapshotWriter, version: PolicyVersion, *, num_eval_prompts: int | None = None
    ) -> None:
        """Take a snapshot of the current weights and submit it.

        Args:
            snapshots: takes the snapshot. No reference to it is kept, or a slow transfer could keep an old model alive.
            version: version of the weights.
            num_eval_prompts: held-out prompts that the version is evaluated on; None: it is not evaluated.

        Raises:
            WaitTimeoutError, FencedError, ObjectExistsError, TbaError: see `submit`.
            OSError: the local disk is full.
        """
        with self._changed:
            pending = [snapshot for snapshot, _, _ in self._pending]
        for snapshot in pending:  # the thread may be busy with the one before: no more than one is in memory
            snapshot.write()
        self.submit(snapshots.take(version, self.submitted), num_eval_prompts=num_eval_prompts)

    def submit(self, snapshot: WeightSnapshot, *, num_eval_prompts: int | None = None, announce: bool = True) -> None:
        """Queue a snapshot for the thread; wait for a free place if MAX_UNPUBLISHED_VERSIONS snapshots are queued.

        Args:
            snapshot: its files are deleted once no later version can be a delta against them.
            num_eval_prompts: held-out prompts that the announced version is evaluated on; None: it is not evaluated.
            announce: False only stores it, for searchers that ask for the version by name.

        Raises:
            WaitTimeoutError: MAX_UNPUBLISHED_VERSIONS snapshots wait, and none was published in time.
            FencedError, ObjectExistsError, TbaError: the error that ended the thread.
        """
        self._wait_until_below(limits.MAX_UNPUBLISHED_VERSIONS)
        with self._changed:
            # The snapshot holds the weights as they were: theta may change from here on.
            self._pending.append((snapshot, num_eval_prompts, announce))
            self._changed.notify_all()
        if announce:
            self.submitted = snapshot.version

    def drain(self) -> None:
        """Wait until all submitted versions are published, or the process is told to stop."""
        self._wait_until_below(1)

    def _wait_until_below(self, count: int) -> None:
        self.check()
        if len(self._pending) < count:
            return
        wait_s = limits.RETRY_S
        deadline = time.monotonic() + wait_s
        with self._status.named_wait("unpublished-versions", wait_s):
            while len(self._pending) >= count:
                with self._changed:
                    self._changed.wait(timeout=_TICK_S)
                self.check()
                if self._stop.is_set():  # after SIGTERM the checkpoint counts, not the publication
                    return
                if time.monotonic() > deadline:
                    with self._changed:
                        others = self._pending[0][0].others if self._pending else None
                    missing = "" if others is None else others.missing()
                    waits = (
                        f"the share of {missing} is not stored yet" if missing else "the transfer is still in progress"
                    )
                    raise WaitTimeoutError(
                        f"{len(self._pending)} weight versions could not be published within {wait_s:g} s "
                        f"({self._retried_error or waits}); training stopped, and its "
                        "last checkpoint is kept: fix the cause and start the trainer again"
                    )

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                with self._changed:
                    self._changed.wait_for(lambda: self._closed.is_set() or self._pending)
                if self._closed.is_set():
                    return
                snapshot, num_eval_prompts, announce = self._pending[0]  # it stays in the queue until it is announced
                try:
                    self._publish(snapshot, num_eval_prompts, announce=announce)
                except Exception as error:  # a thread has nobody to raise to: the loop asks for it, in `check`
                    # the loop knows what a full disk is
                    is_known = isinstance(error, TbaError | OSError)
                    self._error = error if is_known else TbaError(f"publishing failed: {error!r}")
                with self._changed:
                    # it counts as unpublished until here, so the loop's limit covers a slow transfer too
                    if self._error is None and not self._closed.is_set():
                        self._pending.popleft()
                    self._changed.notify_all()
                if self._error is not None:
                    return
        finally:
            if self._base is not None:
                self._base[0].close()
            if self._start is not None:
                self._start.close()

    def _publish(self, snapshot: WeightSnapshot, num_eval_prompts: int | None, *, announce: bool) -> None:
        started = time.monotonic()
        snapshot.write()
        # Publishing the same version again is harmless: every object is create-only, and equal content is accepted.
        manifest = self._retry_while_away(lambda: self._put(snapshot), snapshot.version)
        store_s = time.monotonic() - started
        if not announce:
            self.discard(snapshot)
            return
        # Only now: a searcher that hears of a version must find all of it.
        request = VersionRequest(version=str(snapshot.version), token=self._token)
        self._retry_while_away(lambda: self._buffer.announce_version(request), snapshot.version)
        if manifest is None or self._closed.is_set():  # the retries may have been cut off: it may not be announced
            return
        self._store_s = store_s
        sizes = {
            "full": sum(file.size_bytes for file in manifest.full),
            "delta": manifest.delta_bytes,
            "adapter": manifest.adapter_bytes,
        }
        for kind, size_bytes in sizes.items():
            self._published_bytes[kind] += size_bytes
        log.info(
            "published",
            version=manifest.version,
            kind="+".join(kind for kind, size_bytes in sizes.items() if size_bytes),
            **{f"{kind}_bytes": size_bytes for kind, size_bytes in sizes.items() if size_bytes},
            store_s=round(store_s, 3),
            seconds=round(time.monotonic() - started, 3),
        )
        self._replace_base(snapshot, manifest)
        if num_eval_prompts is not None:
            self._evaluations.request(snapshot.version, num_eval_prompts)
        # a listing, a request and the deletions cost as much as an optimizer step of a small model
        if time.monotonic() >= self._next_deletion_s:
            self.delete_old_versions()

    def _put(self, snapshot: WeightSnapshot) -> Manifest:
        others = snapshot.others if snapshot.is_share else None
        if others is not None:
            others.base = None if self._base is None else self._base[0].others
        if snapshot.adapter is not None and self._start is not None and self._base is None:
            manifest, paths = self._versions.manifest(START), self._start.paths
            self._base = self._start, LocalVersion(START, paths, manifest)
        return self._versions.publish(
            version=snapshot.version,
            parent=snapshot.parent,
            dtype=snapshot.dtype,
            tensors_paths=snapshot.paths if snapshot.adapter is None else snapshot.adapter,
            files=self._files,
            canary=snapshot.canary,
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            base=None if self._base is None else self._base[1],
            deltas=self._deltas,
            others=others,
        )

    def discard(self, snapshot: WeightSnapshot) -> None:
        """Delete the files of a snapshot, unless it is the starting model that adapters are merged into."""
        if snapshot is not self._start:
            snapshot.close()

    def _replace_base(self, snapshot: WeightSnapshot, manifest: Manifest) -> None:
        """Keep the files of the version just published if the next may be a delta; delete the older version's files."""
        if self._start is not None:  # every other version is an adapter for it
            self.discard(snapshot)
            return
        if self._base is not None:
            self._base[0].close()
            # to encode costs as much as a delta that pays: not again before the next version that would be whole anyway
            self._num_without_base = 0 if manifest.delta is not None else self._deltas.keyframe_interval - 1
        elif self._num_without_base:
            self._num_without_base -= 1
        if not self._num_without_base:
            self._base = snapshot, LocalVersion(snapshot.version, snapshot.paths, manifest)
        else:
            self._base = None
            snapshot.close()

    def delete_old_versions(self) -> None:
        """Delete the versions that nothing keeps (`reasons_to_keep`). Log an error; a later call tries again."""
        try:
            existing, keep = self._versions.versions(), self._section.keep_versions
            if len(existing) > keep:
                checkpoints, info = self._checkpoints.versions(), self._buffer.run()
                kept = reasons_to_keep(existing, info, checkpoints, keep=keep, needed_by=self._versions.needed_by)
                # newest first: a kill in between leaves no version without its base
                for version in sorted(set(existing) - kept.keys(), reverse=True):
                    self._versions.delete(version)
                    log.info("version_deleted", version=str(version))
        except TbaError as error:  # the next version tries again
            log.warning("old_versions_not_deleted", error=str(error))
        else:
            self._next_deletion_s = time.monotonic() + _DELETE_INTERVAL_S

    def _retry_while_away(self, action: Callable[[], Result], version: PolicyVersion) -> Result | None:
        """Repeat an action until store and buffer answer, and return its result; None: the publisher was closed."""
        pause_s = _RETRY_FIRST_S
        while not self._closed.is_set():
            try:
                result = action()
                self._retried_error = ""
                return result
            except (StoreUnavailableError, UnavailableError) as error:
                if not self._retried_error:  # one line per outage
                    log.warning("publishing_fails", version=str(version), error=str(error))
                self._retried_error = str(error)
                self._closed.wait(pause_s)
                # no deadline here: the loop's wait for a free place has one, so the limit covers all retries together
                pause_s = min(2 * pause_s, _RETRY_MOST_S)
        return None

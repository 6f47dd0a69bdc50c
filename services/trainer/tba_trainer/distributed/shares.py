"""The shares of a weight version: every process of a team hashes, encodes and uploads its own tensors.

    leader's publisher                        a thread of every follower
    "describe_share", "upload_share"   -->    a job in another thread
    "share_reply", now and then        -->    whether it is done, and what the share is
             manifest, once all are stored
    "drop_share"                       -->    delete its files

These commands have their own process group (`Team.beside`), so that no step waits for a version, nor a version for a
step. A process that fails replies with its error; one that is gone breaks the team. Both times no manifest is written.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tba.config import Recipe
from tba.errors import DigestError, MalformedError, ObjectExistsError, StoreUnavailableError, TbaError, TeamError
from tba.logs import get_logger
from tba.store import open_store
from tba.weights.publishing import CheckedFiles, Share, ShareBase, ShareTable
from tba_trainer.checkpoints.weight_files import SharesOfTeam, WeightSnapshot
from tba_trainer.distributed.jobs import Job, Replies, Reply, give_reply
from tba_trainer.distributed.process_group import Team

_POLL_S = 0.1
_KINDS = (StoreUnavailableError, ObjectExistsError, DigestError, MalformedError)
"""Errors of a follower that keep their type in the leader, which tries again after StoreUnavailableError."""
log = get_logger("shares")


class FollowersShares(SharesOfTeam):
    """The followers' shares of one version (leader only).

    Waits here have no deadline of their own: the loop's wait `unpublished-versions` bounds them.
    """

    def __init__(self, team: Team, name: str, *, prefix: str, size_bytes: int) -> None:
        self.base: SharesOfTeam | None = None
        self._team, self.name, self._prefix, self._size_bytes = team, name, prefix, size_bytes
        self._given_up = threading.Event()
        self._replies: Replies | None = None

    @property
    def size_bytes(self) -> int:
        """See `OtherShares`."""
        return self._size_bytes

    def begin_describe(self, base: Mapping[str, str] | None, *, max_bytes: float) -> None:
        """See `OtherShares`."""
        of = None if base is None or not isinstance(self.base, FollowersShares) else self.base.name
        arguments = {"base": of, "digests": None if of is None else dict(base or {}), "max_bytes": max_bytes}
        with self._team.lead("describe_share", share=self.name, prefix=self._prefix, **arguments):
            pass

    def wait_described(self) -> list[ShareTable]:
        """See `OtherShares`.

        Raises:
            StoreUnavailableError, ObjectExistsError, DigestError, MalformedError: a process failed with this error.
            TbaError: a process failed with another error, or `give_up` was called.
            TeamError: a follower is gone.
        """
        return [ShareTable.model_validate(reply["table"]) for _, reply in sorted(self._wait().of_rank.items())]

    def begin_upload(self, *, whole: bool, changes: bool) -> None:
        """See `OtherShares`."""
        with self._team.lead("upload_share", share=self.name, whole=whole, changes=changes):
            pass

    def wait_uploaded(self) -> None:
        """See `OtherShares`. Raises the errors of `wait_described`."""
        self._wait()

    def give_up(self) -> None:
        """Make the thread that waits for the followers stop with a TbaError."""
        self._given_up.set()

    def missing(self) -> str:
        """See `SharesOfTeam`."""
        return ", ".join(f"process {rank}" for rank in (self._replies.missing if self._replies else ()))

    def close(self) -> None:
        """See `SharesOfTeam`. If a follower is gone, log it and raise nothing."""
        try:
            with self._team.lead("drop_share", share=self.name):
                pass
        except TeamError as error:
            log.info("share_not_dropped", share=self.name, reason=str(error))

    def _wait(self) -> Replies:
        self._replies = replies = Replies(self._team)
        # all of them are waited for: none may be busy with this version when it is tried again
        while not self._given_up.is_set():
            if replies.collect("share_reply", share=self.name):
                if (failure := replies.failure(_KINDS, TbaError)) is not None:
                    raise failure
                return replies
            self._given_up.wait(_POLL_S)
        raise TbaError(f"the shares {self.name} of the other processes are given up")


class KeptShares:
    """A follower's shares of the versions that the leader may still publish or encode changes against.

    Args:
        team: `Team.beside`.
        deadline_s: seconds that the leader's commands wait for this process to take a share.
    """

    def __init__(self, recipe: Recipe, team: Team, *, deadline_s: float) -> None:
        self._store, self._team, self._deadline_s = open_store(recipe.store), team, deadline_s
        self._kept: dict[str, _Kept] = {}
        self._dropped: set[str] = set()
        """Shares that were dropped before this process, which is slower than the leader, had taken them."""
        self._changed = threading.Condition()
        self._jobs: dict[str, Job] = {}
        self._checked = CheckedFiles()
        self.commands: dict[str, Callable[..., None]] = {
            "describe_share": self._describe,
            "upload_share": self._upload,
            "share_reply": lambda share: give_reply(self._team, self._jobs, share),
            "drop_share": self._drop,
        }
        self._thread = threading.Thread(target=self._run, name="shares", daemon=True)

    def start(self) -> None:
        """Follow the commands of the leader's publisher in a thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the leader has ended its commands, at most `deadline_s`: the leader may be gone."""
        self._thread.join(self._deadline_s)

    def make_room(self) -> None:
        """Write all kept shares to files, to free memory. If the disk is full, log it; that share stays in memory."""
        with self._changed:
            kept = list(self._kept.values())
        for each in kept:
            try:
                each.snapshot.write()
            except OSError as error:  # its job finds the same, and says it
                log.warning("share_not_written", version=str(each.snapshot.version), error=str(error))

    def keep(self, name: str, snapshot: WeightSnapshot | None) -> None:
        """Keep a share until the leader drops it. Close it now if the leader has dropped it already. Ignore None."""
        if snapshot is None:
            return
        with self._changed:
            if is_dropped := name in self._dropped:
                self._dropped.remove(name)
            else:
                self._kept[name] = _Kept(snapshot)
                self._changed.notify_all()
        if is_dropped:
            snapshot.close()

    def clear(self) -> None:
        """Drop all shares and forget their jobs, because the leader begins a new lineage."""
        self._jobs.clear()
        for name in list(self._kept):
            self._drop(share=name)
        self._dropped.clear()

    def _run(self) -> None:
        try:
            for command, arguments in self._team.commands():
                self.commands[command](**arguments)
        except TeamError as error:  # training finds it too, and says it
            log.info("leader_is_gone", reason=str(error))

    def _describe(
        self, *, share: str, prefix: str, base: str | None, digests: dict[str, str] | None, max_bytes: float
    ) -> None:
        def describe() -> Reply:
            kept = self._wait_for(share)
            kept.snapshot.write()
            with self._changed:
                others = list(self._kept.values())
            for each in others:  # only now: a version that is uploaded again may need them, if the store has lost them
                if each.changes is not None:
                    shutil.rmtree(each.changes, ignore_errors=True)
                    each.changes = None
            # beside the tensors: a share that is dropped meanwhile leaves nothing
            kept.changes = Path(tempfile.mkdtemp(prefix=".delta-", dir=kept.snapshot.folder))
            # named by the process: two that have no changes would write the same file
            kept.share = Share(
                self._store,
                prefix,
                kept.snapshot.paths,
                kept.changes,
                checked=self._checked,
                stem=f"delta-{self._team.rank}",
            )
            against = None
            if base is not None and digests is not None:
                against = ShareBase(self._wait_for(base).snapshot.paths, digests)
            table = kept.share.describe(against, max_bytes=max_bytes)
            return {"table": table.model_dump()}

        self._start(share, describe)

    def _upload(self, *, share: str, whole: bool, changes: bool) -> None:
        def upload() -> Reply:
            kept = self._wait_for(share)
            if kept.share is None:
                raise TbaError(f"share {share} is to be uploaded, and was not described")
            kept.share.upload(whole=whole, changes=changes)
            return {"stored": True}

        self._start(share, upload)

    def _start(self, share: str, work: Callable[[], Reply]) -> None:
        job = self._jobs[share] = Job("share")
        job.start(work)

    def _drop(self, *, share: str) -> None:
        with self._changed:
            kept = self._kept.pop(share, None)
            if kept is None:
                self._dropped.add(share)
        if kept is not None:
            kept.snapshot.close()

    def _wait_for(self, share: str) -> _Kept:
        # the leader has its own share, and asks, before all other processes have left the exchanges that made theirs
        with self._changed:
            if not self._changed.wait_for(lambda: share in self._kept, self._deadline_s):
                raise TbaError(
                    f"this process took no share {share} within {self._deadline_s:g} s (trainer.collective_timeout_s)"
                )
            return self._kept[share]


@dataclass(slots=True, eq=False)
class _Kept:
    """One share with its encoded changes."""

    snapshot: WeightSnapshot
    share: Share | None = None
    changes: Path | None = None
    """Folder of the encoded changes; None once a later share is described (they are encoded again if needed)."""

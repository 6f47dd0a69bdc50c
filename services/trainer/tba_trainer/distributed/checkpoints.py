"""Checkpoints of a team: every process writes and reads its own rows, and the leader writes the manifest.

    leader                                     followers
    begin    --"write_part"-->                 copy their rows off the device, upload in a thread
    wait     --"reply", now and then-->        answer whether their part is stored, with its objects
             manifest, once all are stored
    load     --"fetch_part"--> "reply"         fetch and verify their rows; `restore` takes them

The loop goes on between two replies. If a process cannot do its part, it replies with the error, and no checkpoint is
made. If a process is gone, the team is broken. A team of one exchanges nothing.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tba.config import Recipe
from tba.errors import DigestError, MalformedError, ObjectNotFoundError, StoreError, StoreUnavailableError, TbaError
from tba.logs import get_logger
from tba.store import ObjectStore, open_store
from tba.versions import PolicyVersion
from tba.weights import checkpoint_prefix
from tba.wire.checkpoint_manifest import CheckpointObject, object_key
from tba_trainer.checkpoints import weight_files
from tba_trainer.checkpoints.checkpoint import Checkpoint, CheckpointStore
from tba_trainer.checkpoints.parts import Part
from tba_trainer.distributed.jobs import Job, Replies, Reply, give_reply
from tba_trainer.distributed.process_group import Team
from tba_trainer.learner.learner import Learner, TrainerState
from tba_trainer.model.slices import Layout, Rows

_POLL_S = 0.2
NamedWait = Callable[[str, float], AbstractContextManager[object]]
"""Called with a name and a deadline in seconds; while its context is open, heartbeats report a wait of that name."""
_KINDS = (ObjectNotFoundError, DigestError, MalformedError)
"""Errors of a damaged checkpoint; any other means that the store or a disk cannot be used."""
log = get_logger("checkpoint")


class TeamCheckpoints(CheckpointStore):
    """The checkpoints of one run, which all processes of a team write and read (leader only).

    Args:
        team: the processes.
        store, run, folder, max_bytes, layout: as in `CheckpointStore`.
        retry_s: seconds to wait for followers once this process has fetched its part; more if its own fetch was slower.
        named_wait: reports a wait (`Status.named_wait`).
    """

    def __init__(
        self,
        store: ObjectStore,
        run: str,
        *,
        folder: Path,
        max_bytes: int,
        team: Team,
        layout: Layout,
        retry_s: float = 120.0,
        named_wait: NamedWait = lambda _name, _deadline_s: nullcontext(),
    ) -> None:
        super().__init__(
            store, run, folder=folder, max_bytes=max_bytes, layout=layout, num_sharers=team.num_local_ranks
        )
        self.team, self._retry_s, self._named_wait = team, retry_s, named_wait

    def of_run(self, run: str) -> TeamCheckpoints:
        """Return the checkpoints of another run in the same store."""
        other = copy.copy(self)
        other._run, other._prefix, other._committed = run, checkpoint_prefix(run), None
        return other

    def begin(self, state: TrainerState, rows: Rows, *, known: Mapping[str, int], in_background: bool) -> Upload:
        """Begin a checkpoint in all processes.

        Args:
            state: state of the trainer, with the version.
            rows: rows of this process (`Learner.capture`).
            known: `reusable_objects` of a checkpoint that stays until this one is registered.
            in_background: True copies the rows to memory, uploads them in threads and returns. If `Upload.is_staged` is
                false, some process had no room: the weights must not change until the upload has ended. False returns
                when this process's part is stored or has failed.

        Raises:
            OSError: the local disk is full; the followers have been told to stop.
            TeamError: a follower is gone.
        """
        version = PolicyVersion.parse(state.version)
        part: Part | None = None
        try:
            # all copy at the same time
            with self.team.lead("write_part", version=str(version), known=dict(known), in_background=in_background):
                try:
                    part = self.begin_part(version, rows, known=known, in_background=in_background)
                finally:  # the followers wait for it
                    is_staged = _are_all_staged(self.team, part)
        except OSError:
            self.drop(str(version))
            raise
        assert part is not None
        return Upload(self, state, part, in_background=in_background, is_staged=is_staged)

    def load(self, key: str) -> Checkpoint:
        """Load a checkpoint in all processes (see `CheckpointStore.load`). Followers keep their rows for `restore`.

        Raises:
            StoreUnavailableError: a follower did not fetch its part in time.
            TeamError: a follower is gone.
        """
        manifest = self.manifest_of(key)
        with self.team.lead("fetch_part", key=key, manifest=manifest):
            pass
        begin = time.monotonic()
        own: Checkpoint | None = None
        failure: Exception | None = None
        try:
            own = self.fetch(key, manifest)
        except (StoreError, MalformedError) as error:
            failure = error
        # the others are waited for in any case: none may be busy with this one when an older one is asked for
        wait_s = max(self._retry_s, time.monotonic() - begin)
        replies, deadline = Replies(self.team), time.monotonic() + wait_s
        with self._named_wait("checkpoint-download", wait_s):
            while not replies.collect("reply", job=key) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        if late := replies.missing:
            self.drop(key)
            error = (
                f"did not fetch its part of {key} within {wait_s:g} s, once that of process 0 was here "
                f"(as long as that took, {self._retry_s:g} s at least; the wait checkpoint-download)"
            )
            replies.of_rank |= {rank: {"error": error, "kind": ""} for rank in late}
        failure = failure or replies.failure(_KINDS, StoreUnavailableError)
        if failure is not None:
            if own is not None:
                own.close()
            raise failure
        assert own is not None
        return own

    def drop(self, job: str) -> None:
        """Tell the followers to stop a job, which is named by the version or the key of its checkpoint."""
        if self.team.num_ranks > 1:
            with self.team.lead("drop_part", job=job):
                pass

    def commit_parts(self, state: TrainerState, own: list[CheckpointObject], replies: Replies) -> str:
        """Commit `own` and the objects in `replies`, if the store has them, as a checkpoint; return its key.

        Raises:
            StoreUnavailableError: the store cannot be used, or a follower uses another one.
        """
        objects, key = list(own), self.key(PolicyVersion.parse(state.version))
        for rank, reply in sorted(replies.of_rank.items()):
            for each in reply["objects"]:
                stored = CheckpointObject.model_validate(each)
                if self._store.size_bytes(object_key(key, stored)) != stored.size_bytes:
                    raise StoreUnavailableError(
                        f"process {rank} has stored {object_key(key, stored)}, and it is not in {self._store.url}; all "
                        "processes need the same store: a folder must be shared by their machines (store.url)"
                    )
                objects.append(stored)
        return self.commit(state, objects)


class Upload:
    """The upload of one checkpoint: each process uploads its part in a thread, then the leader's thread commits it.

    Args:
        part: part of this process.
        in_background: upload `part` in the thread; otherwise the constructor returns after its upload.
        is_staged: every process has copied its part to memory.
    """

    def __init__(
        self, checkpoints: TeamCheckpoints, state: TrainerState, part: Part, *, in_background: bool, is_staged: bool
    ) -> None:
        self.version, self.is_staged = PolicyVersion.parse(state.version), is_staged
        self.key: str | None = None
        self.error: Exception | None = None
        """Why the checkpoint was not made; None: no error so far."""
        self._checkpoints, self._state, self._part = checkpoints, state, part
        self._replies = Replies(checkpoints.team)
        self._all_ended = threading.Event()
        """Set once no follower has anything left to do."""
        self._commits = threading.Lock()
        if checkpoints.team.num_ranks == 1:
            self._all_ended.set()
        if not in_background:
            self._try(part.upload)
        self._thread = threading.Thread(target=self._run, args=(in_background,), name="checkpoint-upload", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; return whether the upload has ended. Unless given up, `key` or `error` is then set.

        Raises:
            TeamError: a follower is gone.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if not self._all_ended.is_set():
                if self.error is None:
                    has_ended = self._replies.collect("reply", job=str(self.version))
                    failure = self._replies.failure(_KINDS, StoreUnavailableError)
                    if failure is not None:  # never store None: the thread may have set `error` by now
                        self.error = failure
                    elif has_ended:
                        self._all_ended.set()
                if self.error is not None:  # the others need not finish
                    self.give_up()
            left_s = deadline - time.monotonic()
            # the followers are asked again and again, if there are any
            self._thread.join(max(0.0, left_s if self._all_ended.is_set() else min(left_s, _POLL_S)))
            if not self._thread.is_alive():
                if self.error is not None:
                    self.give_up()
                return True
            if time.monotonic() >= deadline:
                return False

    def missing(self) -> str:
        """Return the names of the processes that have not stored their part, for a message."""
        return ", ".join(f"process {rank}" for rank in self._replies.missing) or "process 0"

    def give_up(self) -> None:
        """Stop the upload in all processes, without a manifest; if that is being written already, wait for it."""
        self._part.give_up()
        if not self._all_ended.is_set():
            self._checkpoints.drop(str(self.version))
            self._all_ended.set()
        # what is registered next may let objects go that this one shares with an older checkpoint
        with self._commits:
            pass

    def _run(self, in_background: bool) -> None:
        if in_background:
            self._try(self._part.upload)
        if self.error is None:
            self._try(self._commit)
        # in the background a full disk is no reason to end: the next try may find room
        if in_background and isinstance(self.error, OSError) and not isinstance(self.error, TbaError):
            self.error = StoreUnavailableError(f"the checkpoint was not stored: {self.error}")

    def _commit(self) -> None:
        self._all_ended.wait()
        with self._commits:
            if not self._part.is_given_up:
                self.key = self._checkpoints.commit_parts(self._state, self._part.objects, self._replies)

    def _try(self, step: Callable[[], None]) -> None:
        # a thread has nobody to raise to: the loop asks for the error
        try:
            step()
        except (TbaError, OSError) as error:
            self.error = error
        except Exception as error:
            self.error = TbaError(f"the checkpoint was not stored: {error!r}")


class FollowerCheckpoints:
    """The checkpoints of a run in a follower: it writes and fetches its rows at the commands of `TeamCheckpoints`."""

    def __init__(self, recipe: Recipe, learner: Learner, team: Team, *, folder: Path) -> None:
        self._learner, self._team = learner, team
        self._checkpoints = CheckpointStore(
            open_store(recipe.store),
            recipe.run.name,
            folder=folder,
            max_bytes=weight_files.FILE_BYTES,
            layout=learner.layout(),
            num_sharers=team.num_local_ranks,
        )
        self._jobs: dict[str, Job] = {}
        self._fetched: Checkpoint | None = None

    def write(self, *, version: str, known: Mapping[str, int], in_background: bool) -> None:
        """Begin this process's part of a checkpoint, and upload it in a thread."""
        job = self._jobs[version] = Job("checkpoint-part")
        try:
            part = job.part = self._checkpoints.begin_part(
                PolicyVersion.parse(version), self._learner.capture(), known=known, in_background=in_background
            )
        except (TbaError, OSError) as error:
            job.fail(error)
            _are_all_staged(self._team, None)
            return
        _are_all_staged(self._team, part)

        def upload() -> Reply:
            part.upload()
            return {"objects": [each.model_dump() for each in part.objects]}

        # in a thread in any case: the leader, which lets no step follow what is not in memory, has other commands
        job.start(upload)

    def fetch(self, *, key: str, manifest: bytes) -> None:
        """Begin to download this process's rows in a thread."""
        self.close()

        def fetch() -> Reply:
            found = self._checkpoints.fetch(key, manifest)
            if self._jobs.get(key) is not job:  # the leader waits for it no more
                found.close()
            else:
                self._fetched = found
            return {"fetched": True}

        job = self._jobs[key] = Job("checkpoint-part")
        job.start(fetch)

    def reply(self, *, job: str) -> None:
        """Send the leader the result of a job, or that it is busy."""
        give_reply(self._team, self._jobs, job)

    def drop(self, *, job: str) -> None:
        """Stop a job, whose result the leader no longer asks for."""
        found = self._jobs.pop(job, None)
        if found is not None and found.part is not None:
            found.part.give_up()

    def restore(self, state: TrainerState) -> None:
        """Put the learner into the state of the checkpoint that was fetched."""
        assert self._fetched is not None
        self._learner.restore(state, self._fetched.sections)
        self.close()

    def close(self) -> None:
        """Delete the files of the checkpoint that was fetched, if there is one."""
        if self._fetched is not None:
            self._fetched.close()
            self._fetched = None


def _are_all_staged(team: Team, part: Part | None) -> bool:
    """Return whether all parts that did not fail are in memory (a collective)."""
    is_staged = part is None or part.is_staged
    return is_staged if team.num_ranks == 1 else not any(team.gather(b"" if is_staged else b"not staged"))

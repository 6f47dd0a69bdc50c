"""Start a lineage: from the starting model, from the last checkpoint, or from a version of another run (a fork).

take the starting model's snapshot -> GET /v1/run -> checkpoint or none -> POST /v1/lineages (parent, fencing token)
-> restore
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from tba.api import LineageReply, LineageRequest, OriginInfo, RollbackInfo, RunCommand, RunInfo
from tba.clients import BufferClient
from tba.errors import (
    ConfigError,
    ConflictError,
    GuardError,
    ObjectNotFoundError,
    StoreError,
    TbaError,
    WaitTimeoutError,
)
from tba.logs import get_logger
from tba.versions import START, LineageTree, PolicyVersion
from tba.weights import WeightVersions, params_sha256_of_files
from tba_trainer.checkpoints.checkpoint import Checkpoint, CheckpointStore
from tba_trainer.checkpoints.choose_checkpoint import before_suspect, first_intact, lineages_of, newest_intact
from tba_trainer.checkpoints.weight_files import TensorFiles, WeightSnapshot
from tba_trainer.distributed.checkpoints import TeamCheckpoints
from tba_trainer.learner.guards import GuardState, Rollback
from tba_trainer.learner.learner import Learner, config_sha256
from tba_trainer.loop.status import Session
from tba_trainer.loop.trainer_context import TrainerContext

_POLL_S = 0.5
_MOST_CHOICES = 5
"""Most times that a start chooses its parent. It chooses again when an operator has withdrawn a rollback meanwhile."""
log = get_logger("startup")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parent:
    """The state that a new lineage starts from."""

    version: PolicyVersion
    checkpoint_key: str | None = None
    checkpoint: Checkpoint | None = None
    """The downloaded checkpoint, which the caller closes; None: there is no checkpoint to restore."""
    fails: str | None = None
    """Why the run must fail instead of starting; None: it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageStart:
    """Takes a lineage from the buffer, and restores the learner to the state of the lineage's parent."""

    context: TrainerContext
    checkpoints: TeamCheckpoints
    learner: Learner
    """Holds the starting model; it gets the state of the parent."""
    model_config_sha256: str
    """Digest of config.json in model.path."""
    rollback: Rollback | None
    """How the lineage before this one ended; None: this is the first one of the process."""

    def take(self) -> Session:
        """Start the lineage: choose its parent, load and check it (this may take minutes), and restore it.

        If an operator withdraws a rollback in between, the parent is chosen again.

        Raises:
            ConflictError: the run is done (one that failed can start), or rollbacks were withdrawn too often.
            ConfigError: the checkpoint belongs to another model or policy temperature.
            StoreError: the checkpoint or the version to fork is missing or damaged.
            GuardError: a rollback, of an alarm or an operator, finds none of the checkpoints that it could return to;
                the run has failed.
        """
        buffer, rollback = self.context.buffer, self.rollback
        for _ in range(_MOST_CHOICES):
            info = buffer.run()
            # a new lineage would make the run active again, and its searchers would start to generate
            if info.state == "done":
                raise ConflictError(
                    f"run {info.run!r} is done ({info.state_reason or 'no reason given'}); nothing is left to train: "
                    "choose another run.name, or let it continue (`tba resume`) where the recipe asks for more steps"
                )
            # An alarm's rollback comes first. Where it goes back as far, it does what was asked for too; else the
            # request waits on, and the new lineage does it at its first draw.
            asked = info.rollback if rollback is None or rollback.is_asked_for else None
            parent = self._resume_parent(info) if asked is None else self._asked_parent(info, asked)
            request = LineageRequest(
                trainer_id=self.context.status.trainer_id,
                parent=str(parent.version),
                checkpoint_key=parent.checkpoint_key,
                rollback=rollback is not None and not rollback.is_asked_for,
                obeys=None if asked is None else asked.request_id,
                fails=parent.fails,
                in_process=rollback is not None,
            )
            try:
                # from this call on a resume starts from the parent too, and never again from a suspect checkpoint
                reply = buffer.new_lineage(request)
            except ConflictError:
                # Not an error of this start: a stop that withdrew the rollback must end this run, not the next one.
                if asked is None or buffer.run().rollback == asked:
                    raise
                log.warning("rollback_withdrawn", asked_for=asked.version, parent=str(parent.version))
                if parent.checkpoint is not None:
                    parent.checkpoint.close()
                continue
            if parent.fails is not None:
                raise GuardError(parent.fails)
            if asked is not None:
                log.warning(
                    "rolled_back_for_operator", asked_for=asked.version, parent=str(parent.version), reason=asked.reason
                )
            return self._begin(info, parent, reply)
        raise ConflictError(
            f"a rollback was asked for and withdrawn {_MOST_CHOICES} times while this trainer started; start it again"
        )

    def _begin(self, before: RunInfo, parent: _Parent, reply: LineageReply) -> Session:
        """Delete the suspect checkpoints, restore the parent's state, and return the session of the lineage just taken.

        Args:
            before: the run as it was before the lineage was taken.
        """
        rollback, version, checkpoint = self.rollback, parent.version, parent.checkpoint
        # Nothing returns to the abandoned checkpoints after the parent, up to the suspect one. They go only now: the
        # older trainer, if it still runs, can register none of them again.
        if rollback is not None and rollback.suspect is not None:
            try:
                active = self.checkpoints.of_lineage(lineages_of(before).ancestry(version))
                for each in self.checkpoints.versions():
                    if version < each <= rollback.suspect and each not in active:
                        self.checkpoints.delete(each)
                        log.info("suspect_checkpoint_deleted", version=str(each))
            except StoreError as error:
                # harmless: checkpoints that stay behind take the place of none of the active lineage's
                log.warning("suspect_checkpoint_not_deleted", suspect=str(rollback.suspect), error=str(error))
        state = None
        if checkpoint is not None:
            state = checkpoint.state
            self.learner.restore(state, checkpoint.sections)
            checkpoint.close()
        fork = forked_version(before)
        announces_start = before.latest_version in (None, str(START)) and checkpoint is None and fork is None
        # A lineage that resumes announces its parent's weights under its own name, (lineage, parent step). That
        # supersedes what a dead lineage announced after its checkpoint, and puts the trainer at policy age 0 with its
        # searchers.
        first = START if announces_start else PolicyVersion(reply.lineage, version.step)
        start = START
        if fork is not None and before.origin is not None:
            # a fork that resumes from a checkpoint of its own was announced by its first lineage
            start = first if version == fork else PolicyVersion(before.origin.lineage + 1, fork.step)
        info = self.context.buffer.run()  # again: the counts of rollbacks and the parents now include this lineage
        guards = GuardState() if state is None else state.guards
        log.info("lineage_started", lineage=reply.lineage, parent=str(version), resumed=checkpoint is not None)
        return Session(
            trainer_id=self.context.status.trainer_id,
            lineage=reply.lineage,
            token=reply.token,
            parent=version,
            first=first,
            start=start,
            lineages=LineageTree({**lineages_of(info).parents, reply.lineage: version}),
            previous=None if state is None or state.previous is None else PolicyVersion.parse(state.previous),
            train_s=0.0 if state is None else state.train_s,
            num_rollouts_trained=0 if state is None else state.num_rollouts_trained,
            guards=guards.after_resume(
                num_rollbacks=info.num_rollbacks, rolled_back=None if rollback is None else rollback.guards
            ),
            announces_start=announces_start,
            has_no_checkpoint=checkpoint is None and fork is not None,
        )

    def _asked_parent(self, info: RunInfo, asked: RollbackInfo) -> _Parent:
        """Return the newest intact checkpoint at or before the step of an operator's rollback.

        If there is none, set `fails`: the run must not go on with weights that a person wanted to leave.
        """
        step = PolicyVersion.parse(asked.version).step
        active = self.checkpoints.of_lineage(lineages_of(info).ancestry(PolicyVersion(info.lineage, step)))
        checkpoint = first_intact(self.checkpoints, (each for each in reversed(active) if each.step <= step))
        if checkpoint is not None:
            return self._checked(checkpoint)
        # not loaded, and perhaps damaged too: the next start finds that out
        version = forked_version(info) or START if info.checkpoint is None else PolicyVersion.parse(info.checkpoint)
        sentence = (
            f"an operator has asked for a rollback to {asked.version}, but every checkpoint at or before it is gone or "
            f"damaged; restore one of them and ask again; the next start of the trainer continues from {version}, or "
            "from an older one if that is damaged too"
        )
        return _Parent(version=version, checkpoint_key=info.checkpoint_key, fails=sentence)

    def _resume_parent(self, info: RunInfo) -> _Parent:
        """Return the parent of a start or of an alarm's rollback. For a new fork, already restore its weights here.

        Raises:
            StoreError: the registered checkpoint is missing or damaged, and no older one is intact.
            GuardError: the checkpoints before the suspect one are gone or damaged; the run has failed.
        """
        rollback, checkpoints = self.rollback, self.checkpoints
        suspect = None if rollback is None else rollback.suspect
        if rollback is None or suspect is None:  # a good step followed the last checkpoint: its weights are sound
            checkpoint = newest_intact(checkpoints, info)
        else:
            older = before_suspect(checkpoints, lineages_of(info), suspect, last_good_step=rollback.last_good_step)
            checkpoint = first_intact(checkpoints, older)
            if checkpoint is None and rollback.previous is not None:
                sentence = (
                    f"rolling back from checkpoint {suspect}, which no good step followed: the checkpoints before it "
                    f"(the last one was {rollback.previous}) are gone or damaged, and tba does not discard the "
                    "training to begin again with the starting model; restore one of them, or start another run; the "
                    f"next start of the trainer continues from {suspect}"
                )
                try:
                    self.context.buffer.command("fail", RunCommand(reason=sentence, token=rollback.token))
                except TbaError as error:  # the GuardError ends the trainer in any case
                    log.warning("action_failed", action="fail", error=str(error))
                raise GuardError(sentence)
        if checkpoint is not None:
            return self._checked(checkpoint)
        fork = forked_version(info)
        if fork is not None and info.origin is not None:
            self._restore_fork(info.origin.run, fork)
        return _Parent(version=fork or START)

    def _checked(self, checkpoint: Checkpoint) -> _Parent:
        self._check_same_run(checkpoint)
        # allowed, since a run may get more steps or another rate; logged, since it may also be the wrong file
        if checkpoint.state.config_sha256 != config_sha256(self.context.recipe):
            log.warning("config_changed_since_checkpoint", checkpoint=checkpoint.state.version)
        version = PolicyVersion.parse(checkpoint.state.version)
        return _Parent(version=version, checkpoint_key=self.checkpoints.key(version), checkpoint=checkpoint)

    def _check_same_run(self, checkpoint: Checkpoint) -> None:
        state, section = checkpoint.state, self.context.recipe.model
        for name, now, then in (
            ("model.policy_temperature", section.policy_temperature, state.policy_temperature),
            ("[model.lora]", section.lora or "absent", state.lora or "absent"),
        ):
            if now != then:
                raise ConfigError(
                    f"{name} is {now}, but this run has trained with {then}; it is constant within a run: set it back, "
                    "or choose another run.name"
                )
        if state.model_config_sha256 != self.model_config_sha256:
            raise ConfigError(
                f"config.json in model.path is not the one that checkpoint {state.version} was trained with; "
                "restore that folder, or choose another run.name"
            )

    def _restore_fork(self, run: str, version: PolicyVersion) -> None:
        """Restore another run's whole state if it has a checkpoint of the version, else only its published weights.

        The starting model at `model.path` stays the reference and the origin of policy ages, so it must be the one
        that the other run started from (docs/adr/0009-fork.md).

        Raises:
            ConfigError: the version is not in the store, or is of another model.
            DigestError: it is damaged.
            StoreUnavailableError: the store cannot be reached.
        """
        # With a checkpoint the fork continues with AdamW's moments, the reference and the random numbers of the run.
        checkpoints, store = self.checkpoints.of_run(run), self.context.store
        if version in checkpoints.versions():
            checkpoint = checkpoints.load(checkpoints.key(version))
            self._check_same_run(checkpoint)
            self.learner.restore(checkpoint.state, checkpoint.sections)
            checkpoint.close()
            return
        what = f"version {version} of run {run!r}"
        try:
            weights = WeightVersions(store, run).download_tensors(version, self.checkpoints.folder / str(version))
        except ObjectNotFoundError:
            raise ConfigError(f"this run is forked from {what}, which is not in {store.url}") from None
        if weights.manifest.model_config_sha256 != self.model_config_sha256:
            raise ConfigError(f"config.json in model.path is not that of {what}; a fork trains the same model")
        self.learner.load_weights(TensorFiles(weights.paths), what=what)
        log.warning(
            "forked_without_checkpoint",
            version=str(version),
            run=run,
            meaning="the optimizer starts from zero, and the starting model is the reference until the next reset",
        )
        if weights.manifest.dtype != "float32":  # the master weights start from rounded ones
            log.warning("forked_from_rounded_weights", dtype=weights.manifest.dtype)


def forked_version(info: RunInfo) -> PolicyVersion | None:
    """Return the version of another run that this run starts from; None: it is no fork."""
    return None if info.origin is None or info.origin.version is None else PolicyVersion.parse(info.origin.version)


def wait_for_origin(buffer: BufferClient, *, wait_s: float, stop: threading.Event) -> OriginInfo | None:
    """Wait until the buffer has loaded the snapshot that the run begins with, and return it; None: there is none.

    Args:
        stop: set when the process should end; then the state of the load so far is returned.
    """
    deadline = time.monotonic() + wait_s
    while (origin := buffer.run().origin) is not None and origin.state == "loading" and not stop.wait(_POLL_S):
        if time.monotonic() > deadline:
            raise WaitTimeoutError(
                f"snapshot {origin.source} was not loaded within {wait_s:g} s (trainer.batch_wait_s): "
                f"{origin.num_loaded} rollouts so far"
            )
    if origin is not None and origin.state == "failed":
        raise ConflictError(f"snapshot {origin.source}, which this run begins with, was not loaded: {origin.reason}")
    return origin


def check_starting_model(start: WeightSnapshot, versions: WeightVersions, origin: OriginInfo | None) -> None:
    """Check that `model.path` holds the model that the run, and the run of its first snapshot, started from.

    This model is the reference, and every policy age counts from it.

    Raises:
        ConfigError: it is another model, or the same one in another dtype.
    """
    # By content, not by path: the folder may lie elsewhere, or hold another model, at the next start.
    manifest = versions.manifest(START) if versions.exists(START) else None
    origin_sha256 = None if origin is None else origin.start_params_sha256
    if manifest is None and origin_sha256 is None:
        return
    if manifest is not None and manifest.dtype != start.dtype:
        raise ConfigError(
            f"model.dtype is {start.dtype}, but this run began with {manifest.dtype}; it is constant within a run: set "
            "it back, or choose another run.name"
        )
    if manifest is not None and params_sha256_of_files(start.paths) != manifest.params_sha256:
        raise ConfigError(
            "model.path does not hold the model that this run started from (version 0-0 has other parameters); "
            "restore that folder, or choose another run.name"
        )
    if origin is not None and origin_sha256 is not None and params_sha256_of_files(start.paths) != origin_sha256:
        raise ConfigError(
            f"model.path, in model.dtype {start.dtype}, is not the model that run {origin.run!r} of "
            f"snapshot {origin.source} started from; a run that begins with its rollouts needs the same one"
        )


def delete_incomplete(
    versions: WeightVersions, checkpoints: CheckpointStore, *, before_lineage: int, registered: PolicyVersion
) -> None:
    """Delete versions and checkpoints of older lineages that have no manifest: half written, or half deleted.

    Call it once the lineage is taken: an older trainer that still writes can then neither announce nor register.

    Args:
        before_lineage: the lineage of this trainer; nothing of it is touched.
        registered: the checkpoint that a resume starts from; never touched.
    """
    try:
        # 0-0 stays: every lineage may publish it, and publishing it again completes it
        deleted = versions.delete_incomplete(before_lineage=before_lineage, keep={START})
        deleted_checkpoints = checkpoints.delete_incomplete(before_lineage=before_lineage, keep={registered})
    except StoreError as error:  # the next start tries again
        log.warning("incomplete_not_deleted", error=str(error))
        return
    if deleted or deleted_checkpoints:
        names = [[str(version) for version in versions] for versions in (deleted, deleted_checkpoints)]
        log.info("incomplete_deleted", versions=names[0], checkpoints=names[1])

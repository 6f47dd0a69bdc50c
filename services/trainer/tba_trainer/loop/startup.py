"""Start a lineage: from the starting model, from the last checkpoint, or from a version of another run (a fork).

take the starting model's snapshot -> GET /v1/run -> checkpoint or none -> POST /v1/lineages (parent, fencing token)
-> restore
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tba.api import LineageReply, LineageRequest, OriginInfo, RollbackInfo, RunCommand, RunInfo
from tba.clients import BufferClient
from tba.config import Recipe
from tba.config.trainer import LoraSection
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
from tba.store import ObjectStore
from tba.versions import START, LineageTree, PolicyVersion
from tba.weights import WeightVersions, params_sha256_of_files
from tba_trainer.checkpoints.checkpoint import Checkpoint, CheckpointStore
from tba_trainer.checkpoints.choice import before_suspect, first_intact, intact_at, lineages_of, newest_intact
from tba_trainer.checkpoints.weight_files import TensorFiles, WeightSnapshot
from tba_trainer.distributed.checkpoints import TeamCheckpoints
from tba_trainer.learner.guards import GuardState, Rollback
from tba_trainer.learner.learner import Learner, config_sha256
from tba_trainer.loop.status import Session
from tba_trainer.loop.trainer_context import TrainerContext

_POLL_S = 0.5
_MOST_CHOICES = 5
"""Rollbacks that may be asked for and withdrawn, one after the other, while a start chooses its parent."""
log = get_logger("startup")


def start_lineage(
    context: TrainerContext,
    *,
    checkpoints: TeamCheckpoints,
    learner: Learner,
    model_config_sha256: str,
    rollback: Rollback | None = None,
) -> Session:
    """Take a lineage from the buffer, and put the learner where the lineage's parent was.

    Args:
        checkpoints: of this run.
        learner: holds the starting model; it gets the state of the parent.
        model_config_sha256: digest of config.json in model.path.
        rollback: how the lineage before this one ended; None: this is the first one of the process.

    Raises:
        ConflictError: the run is done. A run that failed continues from its last checkpoint.
        ConfigError: the checkpoint belongs to another model or policy temperature.
        StoreError: the checkpoint or the version to fork is missing or damaged.
        GuardError: a rollback, of an alarm or an operator, finds none of the checkpoints that it could return to; the
            run has failed.
    """
    info, parent, reply = _take_lineage(
        context, checkpoints=checkpoints, learner=learner, model_config_sha256=model_config_sha256, rollback=rollback
    )
    # After the lineage is taken: the older trainer, if it still runs, can then register none of them again.
    if rollback is not None and rollback.suspect is not None:
        history = _tree(info, reply.lineage, parent.version).ancestry(parent.version)
        _delete_suspects(checkpoints, history, parent.version, rollback.suspect)
    if parent.checkpoint is not None:
        learner.restore(parent.checkpoint.state, parent.checkpoint.sections)
        parent.checkpoint.close()
    session = _session(context, reply, parent, before=info, rollback=rollback)
    log.info("lineage_started", lineage=session.lineage, parent=str(session.parent), resumed=bool(parent.checkpoint))
    return session


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parent:
    """What a new lineage starts from."""

    version: PolicyVersion
    checkpoint_key: str | None = None
    checkpoint: Checkpoint | None = None
    """On this machine; the caller closes it."""
    fails: str | None = None
    """Why the run fails instead; nothing was loaded."""


def _take_lineage(
    context: TrainerContext,
    *,
    checkpoints: TeamCheckpoints,
    learner: Learner,
    model_config_sha256: str,
    rollback: Rollback | None,
) -> tuple[RunInfo, _Parent, LineageReply]:
    """Choose a parent and take the lineage; return the run as it was before, both. Arguments as of `start_lineage`.

    The choice may take minutes. Where an operator's rollback was withdrawn meanwhile, the parent is chosen again.
    """
    for _ in range(_MOST_CHOICES):
        info = context.buffer.run()
        # a new lineage would make the run active again, and its searchers would start to generate
        if info.state == "done":
            raise ConflictError(
                f"run {info.run!r} is done ({info.state_reason or 'no reason given'}); nothing is left to train: "
                "choose another run.name, or let it continue (`tba resume`) where the recipe asks for more steps"
            )
        # An alarm's rollback comes first. Where it goes back as far, it does what was asked for too; else the request
        # waits on, and the new lineage does it at its first draw.
        asked = info.rollback if rollback is None or rollback.is_asked_for else None
        if asked is None:
            parent = _resume_parent(context, info, checkpoints, learner, model_config_sha256, rollback)
        else:
            parent = _asked_parent(context, info, checkpoints, model_config_sha256, asked)
        request = LineageRequest(
            trainer_id=context.status.trainer_id,
            parent=str(parent.version),
            checkpoint_key=parent.checkpoint_key,
            rollback=rollback is not None and not rollback.is_asked_for,
            obeys=None if asked is None else asked.request_id,
            fails=parent.fails,
            in_process=rollback is not None,
        )
        try:
            # from this call on a resume starts from the parent too, and never again from a suspect checkpoint
            reply = context.buffer.new_lineage(request)
        except ConflictError:
            # Not an error of this start: a stop that withdrew the rollback must end this run, not the next one.
            if asked is None or context.buffer.run().rollback == asked:
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
        return info, parent, reply
    raise ConflictError(
        f"a rollback was asked for and withdrawn {_MOST_CHOICES} times while this trainer started; start it again"
    )


def _asked_parent(
    context: TrainerContext,
    info: RunInfo,
    checkpoints: CheckpointStore,
    model_config_sha256: str,
    asked: RollbackInfo,
) -> _Parent:
    """Return the checkpoint of an operator's rollback, or an older one; where all are lost, why the run fails.

    The run must not continue with the weights that a person wanted to leave.
    """
    checkpoint = intact_at(checkpoints, info, step=PolicyVersion.parse(asked.version).step)
    if checkpoint is not None:
        return _checked(checkpoint, checkpoints, context.recipe, model_config_sha256)
    # not loaded, and perhaps damaged too: the next start finds that out
    version = _first_parent(info) if info.checkpoint is None else PolicyVersion.parse(info.checkpoint)
    sentence = (
        f"an operator has asked for a rollback to {asked.version}, but every checkpoint at or before it is gone or "
        f"damaged; restore one of them and ask again; the next start of the trainer continues from {version}, or from "
        "an older one if that is damaged too"
    )
    return _Parent(version=version, checkpoint_key=info.checkpoint_key, fails=sentence)


def _resume_parent(
    context: TrainerContext,
    info: RunInfo,
    checkpoints: TeamCheckpoints,
    learner: Learner,
    model_config_sha256: str,
    rollback: Rollback | None,
) -> _Parent:
    """Return what a start, or an alarm's rollback, continues from. The state of a fork is restored already."""
    checkpoint = _resume_point(rollback, context.buffer, checkpoints, info)
    if checkpoint is not None:
        return _checked(checkpoint, checkpoints, context.recipe, model_config_sha256)
    if (fork := Fork.of(info.origin)) is not None:
        _restore_fork(fork, context.store, checkpoints, learner, context.recipe, model_config_sha256)
    return _Parent(version=_first_parent(info))


def _first_parent(info: RunInfo) -> PolicyVersion:
    """Return what the run began with."""
    fork = Fork.of(info.origin)
    return START if fork is None else fork.version


def _checked(checkpoint: Checkpoint, checkpoints: CheckpointStore, recipe: Recipe, model_config_sha256: str) -> _Parent:
    _check_same_run(checkpoint, recipe, model_config_sha256)
    # allowed, since a run may get more steps or another rate; logged, since it may also be the wrong file
    if checkpoint.state.config_sha256 != config_sha256(recipe):
        log.warning("config_changed_since_checkpoint", checkpoint=checkpoint.state.version)
    version = PolicyVersion.parse(checkpoint.state.version)
    return _Parent(version=version, checkpoint_key=checkpoints.key(version), checkpoint=checkpoint)


def _session(
    context: TrainerContext, reply: LineageReply, chosen: _Parent, *, before: RunInfo, rollback: Rollback | None
) -> Session:
    """Return the lineage just taken as the trainer's session."""
    parent, checkpoint, fork = chosen.version, chosen.checkpoint, Fork.of(before.origin)
    announces_start = before.latest_version in (None, str(START)) and checkpoint is None and fork is None
    # A lineage that resumes announces its parent's weights under its own name, (lineage, parent step). That supersedes
    # what a dead lineage announced after its checkpoint, and puts the trainer at policy age 0 with its searchers.
    first = START if announces_start else PolicyVersion(reply.lineage, parent.step)
    info = context.buffer.run()  # again: the counts of rollbacks and the parents now include this lineage
    state = None if checkpoint is None else checkpoint.state
    guards = GuardState() if state is None else state.guards
    return Session(
        trainer_id=context.status.trainer_id,
        lineage=reply.lineage,
        token=reply.token,
        parent=parent,
        first=first,
        start=_first_version_of_run(first, parent, fork),
        lineages=_tree(info, reply.lineage, parent),
        previous=None if state is None or state.previous is None else PolicyVersion.parse(state.previous),
        train_s=0.0 if state is None else state.train_s,
        num_rollouts_trained=0 if state is None else state.num_rollouts_trained,
        guards=guards.after_resume(
            num_rollbacks=info.num_rollbacks, rolled_back=None if rollback is None else rollback.guards
        ),
        announces_start=announces_start,
        has_no_checkpoint=checkpoint is None and fork is not None,
    )


def wait_for_origin(buffer: BufferClient, *, wait_s: float, stop: threading.Event) -> OriginInfo | None:
    """Return what the run begins with, once the buffer has loaded it (the buffer shows its wait "snapshot-load").

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

    It is the reference, and every policy age counts from it.

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
        log.info(
            "incomplete_deleted",
            num_versions=len(deleted),
            num_checkpoints=len(deleted_checkpoints),
            versions=[str(version) for version in deleted],
            checkpoints=[str(version) for version in deleted_checkpoints],
        )


@dataclass(frozen=True, slots=True)
class Fork:
    """The version of another run that this run starts from (docs/adr/0009-fork.md).

    The starting model at `model.path` stays the reference and the origin of policy ages, so it must be the one that
    the other run started from.
    """

    run: str
    version: PolicyVersion
    last_lineage: int
    """The other run's last lineage; this run's own lineages come after it."""

    @classmethod
    def of(cls, origin: OriginInfo | None) -> Fork | None:
        """Read the fork from the run's origin; None when the run is no fork."""
        if origin is None or origin.version is None:
            return None
        return cls(origin.run, PolicyVersion.parse(origin.version), origin.lineage)

    def checkpoint(self, own: TeamCheckpoints) -> Checkpoint | None:
        """Return the other run's checkpoint of exactly this version, from the store of this run's checkpoints."""
        checkpoints = own.of_run(self.run)
        return checkpoints.load(checkpoints.key(self.version)) if self.version in checkpoints.versions() else None

    def load_weights(self, store: ObjectStore, learner: Learner, model_config_sha256: str, *, folder: Path) -> None:
        """Put the published weights of the version into the learner, which holds the starting model.

        Raises:
            ConfigError: the version is not in the store, or is of another model.
            DigestError: it is damaged.
            StoreUnavailableError
        """
        what = f"version {self.version} of run {self.run!r}"
        versions = WeightVersions(store, self.run)
        try:
            weights = versions.download_tensors(self.version, folder / str(self.version))
        except ObjectNotFoundError:
            raise ConfigError(f"this run is forked from {what}, which is not in {store.url}") from None
        if weights.manifest.model_config_sha256 != model_config_sha256:
            raise ConfigError(f"config.json in model.path is not that of {what}; a fork trains the same model")
        learner.load_weights(TensorFiles(weights.paths), what=what)
        log.warning(
            "forked_without_checkpoint",
            version=str(self.version),
            run=self.run,
            meaning="the optimizer starts from zero, and the starting model is the reference until the next reset",
        )
        if weights.manifest.dtype != "float32":  # the master weights start from rounded ones
            log.warning("forked_from_rounded_weights", dtype=weights.manifest.dtype)


def _restore_fork(
    fork: Fork,
    store: ObjectStore,
    checkpoints: TeamCheckpoints,
    learner: Learner,
    recipe: Recipe,
    model_config_sha256: str,
) -> None:
    """Restore the other run's whole state where it has a checkpoint of the version, else its published weights."""
    # With a checkpoint the fork continues with AdamW's moments, the reference and the random numbers of the other run.
    checkpoint = fork.checkpoint(checkpoints)
    if checkpoint is None:
        fork.load_weights(store, learner, model_config_sha256, folder=checkpoints.folder)
        return
    _check_same_run(checkpoint, recipe, model_config_sha256)
    learner.restore(checkpoint.state, checkpoint.sections)
    checkpoint.close()


def _first_version_of_run(first: PolicyVersion, parent: PolicyVersion, fork: Fork | None) -> PolicyVersion:
    if fork is None:
        return START
    # a fork that resumes from a checkpoint of its own was announced by its first lineage
    return first if parent == fork.version else PolicyVersion(fork.last_lineage + 1, fork.version.step)


def _resume_point(
    rollback: Rollback | None, buffer: BufferClient, checkpoints: CheckpointStore, info: RunInfo
) -> Checkpoint | None:
    """Return the checkpoint that a start, or an alarm's rollback, continues from; None for the start of the run, if
    nothing else is before it.

    Raises:
        StoreError: the registered checkpoint is missing or damaged, and no older one is intact.
        GuardError: the checkpoints before the suspect one are gone or damaged; the run has failed.
    """
    suspect = None if rollback is None else rollback.suspect
    if rollback is None or suspect is None:  # a good step followed the last checkpoint: its weights are sound
        return newest_intact(checkpoints, info)
    older = before_suspect(checkpoints, lineages_of(info), suspect, last_good_step=rollback.last_good_step)
    checkpoint = first_intact(checkpoints, older)
    if checkpoint is not None or rollback.previous is None:
        return checkpoint
    sentence = (
        f"rolling back from checkpoint {suspect}, which no good step followed: the checkpoints before it (the last one "
        f"was {rollback.previous}) are gone or damaged, and tba does not discard the training to begin again with "
        f"the starting model; restore one of them, or start another run; the next start of the trainer continues "
        f"from {suspect}"
    )
    try:
        buffer.command("fail", RunCommand(reason=sentence, token=rollback.token))
    except TbaError as error:  # the GuardError ends the trainer in any case
        log.warning("action_failed", action="fail", error=str(error))
    raise GuardError(sentence)


def _delete_suspects(
    checkpoints: CheckpointStore, history: list[PolicyVersion], parent: PolicyVersion, suspect: PolicyVersion
) -> None:
    """Delete the abandoned checkpoints after the parent, up to the suspect one: nothing returns to them."""
    try:
        active = checkpoints.of_lineage(history)
        for version in checkpoints.versions():
            if parent < version <= suspect and version not in active:
                checkpoints.delete(version)
                log.info("suspect_checkpoint_deleted", version=str(version))
    except StoreError as error:
        # harmless: checkpoints that stay behind take the place of none of the active lineage's
        log.warning("suspect_checkpoint_not_deleted", suspect=str(suspect), error=str(error))


def _check_same_run(checkpoint: Checkpoint, recipe: Recipe, model_config_sha256: str) -> None:
    state = checkpoint.state
    if state.policy_temperature != recipe.model.policy_temperature:
        raise ConfigError(
            f"model.policy_temperature is {recipe.model.policy_temperature:g}, but this run has trained with "
            f"{state.policy_temperature:g}; it is constant within a run: set it back, or choose another run.name"
        )
    if state.lora != recipe.model.lora:
        raise ConfigError(
            f"[model.lora] is {_lora_text(recipe.model.lora)}, but this run has trained with {_lora_text(state.lora)}; "
            "it is constant within a run: set it back, or choose another run.name"
        )
    if state.model_config_sha256 != model_config_sha256:
        raise ConfigError(
            f"config.json in model.path is not the one that checkpoint {state.version} was trained with; "
            "restore that folder, or choose another run.name"
        )


def _lora_text(section: LoraSection | None) -> str:
    return "absent" if section is None else str(section)


def _tree(info: RunInfo, lineage: int, parent: PolicyVersion) -> LineageTree:
    return LineageTree({**lineages_of(info).parents, lineage: parent})

"""How a trainer starts: from the starting model, from the last checkpoint, or from a version of another run (a fork),
in a lineage of its own.

    verify (0, 0) -> GET /v1/run -> checkpoint or none -> POST /v1/lineages (parent, fencing token) -> restore

The first version of a lineage that resumes is its parent's weights under its own name, (lineage, parent step): what a
dead lineage announced later than its checkpoint is then superseded, and the trainer is at policy age 0 with its
searchers again.
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass

from tba.api import LineageRequest, OriginInfo, RunCommand, RunInfo
from tba.clients import BufferClient
from tba.config import Recipe
from tba.config.lora import LoraSection
from tba.errors import ConfigError, ConflictError, GuardError, StoreError, TbaError, WaitTimeoutError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import START, LineageTree, PolicyVersion
from tba.weights import WeightVersions, params_sha256_of_files
from tba_trainer.checkpoint import Checkpoint, Checkpoints
from tba_trainer.fallback import newest_whole, older_whole
from tba_trainer.fork import Fork
from tba_trainer.guards import GuardState, Rollback
from tba_trainer.learner import Learner
from tba_trainer.snapshots import Snapshot, Snapshots

_POLL_S = 0.5
log = get_logger("startup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One start of the trainer."""

    trainer_id: str
    lineage: int
    token: str
    """Fencing token of the lineage."""
    parent: PolicyVersion
    """What this lineage started from."""
    first: PolicyVersion
    """The first version that this lineage announces: the starting model, or the parent's weights."""
    start: PolicyVersion
    """What the run began with, under the name that it was announced by: the starting model, or the fork's version."""
    lineages: LineageTree
    previous: PolicyVersion | None
    """The checkpoint before the parent's; None: there is none."""
    train_s: float
    """Seconds trained before this start, along the living lineage."""
    num_rollouts_trained: int
    guards: GuardState
    """What the guards remembered at the parent; the rollbacks are those of the whole run."""
    fresh: bool
    """True when the starting model is still to be announced."""
    borrowed: bool
    """True when the state of this start is in another run's folders only: it is checkpointed after the first step."""


def begin(
    recipe: Recipe,
    *,
    trainer_id: str,
    buffer: BufferClient,
    store: ObjectStore,
    checkpoints: Checkpoints,
    learner: Learner,
    model_config_sha256: str,
    rollback: Rollback | None = None,
) -> Session:
    """Take a lineage, and put the learner where its parent was.

    Args:
        rollback: how the lineage before ended that this one follows; None: this is the first one of the process.

    Raises:
        ConflictError: the run is done. One that failed goes on from its last checkpoint.
        ConfigError: the checkpoint belongs to another model or policy temperature.
        StoreError: the checkpoint or the version to fork is missing or damaged.
        GuardError: a rollback has no checkpoint to go back to, although there were some; the run has failed.
    """
    info = buffer.run()
    fork = Fork.of(info.origin)
    if info.state == "done":
        raise ConflictError(
            f"run {info.run!r} is done ({info.state_reason or 'no reason given'}); nothing is left to train: "
            "choose another run.name"
        )
    checkpoint = newest_whole(checkpoints, info) if rollback is None else _back_to(rollback, buffer, checkpoints, info)
    if checkpoint is not None:
        _check_same_run(checkpoint, recipe, model_config_sha256)
        if checkpoint.state.config_sha256 != config_sha256(recipe):
            log.warning("config_changed_since_checkpoint", checkpoint=checkpoint.state.version)
        parent = PolicyVersion.parse(checkpoint.state.version)
    elif fork is not None:
        _start_fork(fork, store, checkpoints, learner, recipe, model_config_sha256)
        parent = fork.version
    else:
        parent = START
    reply = buffer.new_lineage(
        LineageRequest(  # from here on a resume starts from the parent too, and never again from a suspect
            trainer_id=trainer_id,
            parent=str(parent),
            checkpoint_key=None if checkpoint is None else checkpoints.key(parent),
            rollback=rollback is not None,
        )
    )
    if rollback is not None and rollback.suspect is not None:
        _delete_suspects(checkpoints, _tree(info, reply.lineage, parent).ancestry(parent), parent, rollback.suspect)
    if checkpoint is not None:
        learner.restore(checkpoint.state, checkpoint.sections)
        checkpoint.close()
    fresh = info.latest_version in (None, str(START)) and checkpoint is None and fork is None
    first = START if fresh else PolicyVersion(reply.lineage, parent.step)
    info = buffer.run()
    guards = GuardState() if checkpoint is None else checkpoint.state.guards
    session = Session(
        trainer_id=trainer_id,
        lineage=reply.lineage,
        token=reply.token,
        parent=parent,
        first=first,
        start=_start(first, parent, fork),
        lineages=_tree(info, reply.lineage, parent),
        previous=None if checkpoint is None else _version_or_none(checkpoint.state.previous),
        train_s=0.0 if checkpoint is None else checkpoint.state.train_s,
        num_rollouts_trained=0 if checkpoint is None else checkpoint.state.num_rollouts_trained,
        guards=guards.gone_on_with(
            num_rollbacks=info.num_rollbacks, before=None if rollback is None else rollback.guards
        ),
        fresh=fresh,
        borrowed=checkpoint is None and fork is not None,
    )
    log.info("lineage_started", lineage=session.lineage, parent=str(parent), resumed=checkpoint is not None)
    return session


def _back_to(rollback: Rollback, buffer: BufferClient, checkpoints: Checkpoints, info: RunInfo) -> Checkpoint | None:
    """The checkpoint that a rollback goes back to; None: the start of the run, nothing else lies before the suspect.

    Raises:
        GuardError: the checkpoints before the suspect one are gone or damaged: the run has failed.
    """
    suspect = rollback.suspect
    if suspect is None:
        return newest_whole(checkpoints, info)
    checkpoint = older_whole(checkpoints, info, suspect, last_good_step=rollback.last_good_step)
    if checkpoint is not None or rollback.previous is None:
        return checkpoint
    sentence = (
        f"rolling back from checkpoint {suspect}, which no good step followed: the checkpoints before it (the last one "
        f"was {rollback.previous}) are gone or damaged, and what was trained is not given up for the starting model; "
        f"put one back, or start another run; the next start of the trainer goes on from {suspect}"
    )
    try:
        buffer.command("fail", RunCommand(reason=sentence, token=rollback.token))
    except TbaError as error:  # what is raised is why, in any case
        log.warning("action_failed", action="fail", error=str(error))
    raise GuardError(sentence)


def _delete_suspects(
    checkpoints: Checkpoints, history: list[PolicyVersion], parent: PolicyVersion, suspect: PolicyVersion
) -> None:
    """Delete what lies between the parent and the suspect checkpoint of the abandoned line: nothing goes back to it.
    A store that is away is logged: it takes no living one's place either way."""
    try:
        living = checkpoints.living(history)
        for version in checkpoints.versions():
            if parent < version <= suspect and version not in living:
                checkpoints.delete(version)
                log.info("suspect_checkpoint_deleted", version=str(version))
    except StoreError as error:
        log.warning("suspect_checkpoint_not_deleted", suspect=str(suspect), error=str(error))


def _version_or_none(text: str | None) -> PolicyVersion | None:
    return None if text is None else PolicyVersion.parse(text)


def _start_fork(
    fork: Fork,
    store: ObjectStore,
    checkpoints: Checkpoints,
    learner: Learner,
    recipe: Recipe,
    model_config_sha256: str,
) -> None:
    checkpoint = fork.checkpoint(checkpoints)
    if checkpoint is None:
        fork.load_weights(store, learner, model_config_sha256, folder=checkpoints.folder)
        return
    _check_same_run(checkpoint, recipe, model_config_sha256)
    learner.restore(checkpoint.state, checkpoint.sections)
    checkpoint.close()


def _start(first: PolicyVersion, parent: PolicyVersion, fork: Fork | None) -> PolicyVersion:
    """A fork that goes on from a checkpoint of its own was announced by its first lineage."""
    if fork is None:
        return START
    return first if parent == fork.version else PolicyVersion(fork.last_lineage + 1, fork.version.step)


def wait_for_origin(buffer: BufferClient, *, wait_s: float, stop: threading.Event) -> OriginInfo | None:
    """What the run begins with, once the buffer has loaded it (the buffer shows its wait "snapshot-load").

    Args:
        stop: set when the process should end; then what is loaded so far is answered, and no lineage is given out.

    Raises:
        ConflictError: it could not be loaded.
        WaitTimeoutError: it takes longer than `wait_s`.
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


def check_starting_model(start: Snapshot, versions: WeightVersions, origin: OriginInfo | None) -> None:
    """The model at `model.path` must be the one that the run, and the run of the snapshot that it began with, started
    from: it is the reference, and every policy age counts from it.

    Raises:
        ConfigError: it is another model, or the same one in another dtype.
    """
    manifest = versions.manifest(START) if versions.exists(START) else None
    adopted = None if origin is None else origin.start_params_sha256
    if manifest is None and adopted is None:
        return
    if manifest is not None and manifest.dtype != start.dtype:
        raise ConfigError(
            f"model.dtype is {start.dtype}, but this run began with {manifest.dtype}; it is constant within a run: set "
            "it back, or choose another run.name"
        )
    found = params_sha256_of_files(start.paths)
    if manifest is not None and manifest.params_sha256 != found:
        raise ConfigError(
            "model.path holds another model than the one this run started from (version 0-0 has other parameters); "
            "restore that folder, or choose another run.name"
        )
    if origin is not None and adopted is not None and adopted != found:
        raise ConfigError(
            f"model.path, in model.dtype {start.dtype}, is another model than the one that run {origin.run!r} of "
            f"snapshot {origin.source} started from; a run that begins with its rollouts needs the same one"
        )


def starting_snapshot(snapshots: Snapshots) -> Snapshot:
    """(0, 0), to be taken before anything is restored."""
    return snapshots.take(START, None)


def config_sha256(recipe: Recipe) -> str:
    """Digest of what is trained and how; addresses and paths may differ between two starts. A change is logged."""
    trained = {"run", "model", "sampling", "searcher", "objective", "trainer", "eval"}
    return hashlib.sha256(recipe.model_dump_json(include=trained).encode()).hexdigest()


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
    parents = {number: PolicyVersion.parse(text) for number, text in info.parents.items()}
    return LineageTree({**parents, lineage: parent})

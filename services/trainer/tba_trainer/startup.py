"""How a trainer starts: from the starting model or from the last checkpoint, in a lineage of its own.

    verify (0, 0) -> GET /v1/run -> checkpoint or none -> POST /v1/lineages (parent, fencing token) -> restore

The first version of a lineage that resumes is its parent's weights under its own name, (lineage, parent step): what a
dead lineage announced later than its checkpoint is then superseded, and the trainer is at policy age 0 with its
searchers again.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from tba.api import LineageRequest, RunInfo
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import ConfigError, ConflictError
from tba.logs import get_logger
from tba.versions import START, LineageTree, PolicyVersion
from tba.weights import WeightVersions, params_sha256_of_file
from tba_trainer.checkpoint import Checkpoint, Checkpoints, restore
from tba_trainer.learner import Learner
from tba_trainer.snapshots import Snapshot, Snapshots

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
    lineages: LineageTree
    train_s: float
    """Seconds trained before this start, along the living lineage."""
    num_rollouts_trained: int
    fresh: bool
    """True when nothing was announced before: the starting model is evaluated."""


def begin(
    recipe: Recipe,
    *,
    trainer_id: str,
    buffer: BufferClient,
    checkpoints: Checkpoints,
    learner: Learner,
    model_config_sha256: str,
) -> Session:
    """Take a lineage, and put the learner where its parent was.

    Raises:
        ConflictError: the run is done. One that failed goes on from its last checkpoint.
        ConfigError: the checkpoint belongs to another model or policy temperature.
        StoreError: the checkpoint is missing or damaged.
    """
    info = buffer.run()
    if info.state == "done":
        raise ConflictError(
            f"run {info.run!r} is done ({info.state_reason or 'no reason given'}); nothing is left to train: "
            "choose another run.name"
        )
    checkpoint = None if info.checkpoint_key is None else checkpoints.load(info.checkpoint_key)
    if checkpoint is not None:
        _check_same_run(checkpoint, recipe, model_config_sha256)
    parent = START if checkpoint is None else PolicyVersion.parse(checkpoint.state.version)
    reply = buffer.new_lineage(LineageRequest(trainer_id=trainer_id, parent=str(parent)))
    if checkpoint is not None:
        restore(learner, checkpoint)
    fresh = info.latest_version in (None, str(START)) and checkpoint is None
    session = Session(
        trainer_id=trainer_id,
        lineage=reply.lineage,
        token=reply.token,
        parent=parent,
        first=START if fresh else PolicyVersion(reply.lineage, parent.step),
        lineages=_tree(buffer.run(), reply.lineage, parent),
        train_s=0.0 if checkpoint is None else checkpoint.state.train_s,
        num_rollouts_trained=0 if checkpoint is None else checkpoint.state.num_rollouts_trained,
        fresh=fresh,
    )
    log.info("lineage_started", lineage=session.lineage, parent=str(parent), resumed=checkpoint is not None)
    return session


def check_starting_model(start: Snapshot, versions: WeightVersions) -> None:
    """If (0, 0) exists, it must be the model at `model.path`: it is the reference, and every policy age counts from it.

    Raises:
        ConfigError: it is another model, or the same one in another dtype.
    """
    if not versions.exists(START):
        return
    manifest = versions.manifest(START)
    if manifest.dtype != start.dtype:
        raise ConfigError(
            f"model.dtype is {start.dtype}, but this run began with {manifest.dtype}; it is constant within a run: set "
            "it back, or choose another run.name"
        )
    with tempfile.TemporaryDirectory(prefix="tba-start-") as folder:
        path = Path(folder) / "model.safetensors"
        save_file(start.tensors, path)
        found = params_sha256_of_file(path)
    if manifest.params_sha256 != found:
        raise ConfigError(
            "model.path holds another model than the one this run started from (version 0-0 has other parameters); "
            "restore that folder, or choose another run.name"
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
    if state.model_config_sha256 != model_config_sha256:
        raise ConfigError(
            f"config.json in model.path is not the one that checkpoint {state.version} was trained with; "
            "restore that folder, or choose another run.name"
        )
    if state.config_sha256 != config_sha256(recipe):
        log.warning("config_changed_since_checkpoint", checkpoint=state.version)


def _tree(info: RunInfo, lineage: int, parent: PolicyVersion) -> LineageTree:
    parents = {number: PolicyVersion.parse(text) for number, text in info.parents.items()}
    return LineageTree({**parents, lineage: parent})

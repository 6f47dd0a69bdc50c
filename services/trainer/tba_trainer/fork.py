"""Starting from a weight version of another run (docs/adr/0009-fork.md).

The policy begins at that version; the starting model at `model.path` stays the reference and what policy ages count
from, so it must be the one that the other run started from. Where the other run has a checkpoint of exactly that
version, everything goes on as there: master weights, optimizer, reference, random numbers. Otherwise the published
weights are taken and the rest begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tba.api import OriginInfo
from tba.errors import ConfigError, ObjectNotFoundError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba_trainer.checkpoint import Checkpoint, Checkpoints
from tba_trainer.learner import Learner
from tba_trainer.tensor_files import TensorFiles

log = get_logger("fork")


@dataclass(frozen=True, slots=True)
class Fork:
    """Which version of which run; `last_lineage` is the last one of that run, this run's own come after it."""

    run: str
    version: PolicyVersion
    last_lineage: int

    @classmethod
    def of(cls, origin: OriginInfo | None) -> Fork | None:
        """From what the buffer says the run began with; None when it is no fork."""
        if origin is None or origin.version is None:
            return None
        return cls(origin.run, PolicyVersion.parse(origin.version), origin.lineage)

    def checkpoint(self, own: Checkpoints) -> Checkpoint | None:
        """The other run's checkpoint of exactly this version, from the store that keeps this run's own ones.

        Raises:
            DigestError, MalformedError: it is damaged.
            StoreUnavailableError
        """
        checkpoints = own.of_run(self.run)
        return checkpoints.load(checkpoints.key(self.version)) if self.version in checkpoints.versions() else None

    def load_weights(self, store: ObjectStore, learner: Learner, model_config_sha256: str, *, folder: Path) -> None:
        """Put the published weights of the version into the learner, which holds the starting model.

        Args:
            folder: where the files lie on their way.

        Raises:
            ConfigError: the version is not in the store, or is of another model.
            DigestError: it is damaged.
            StoreUnavailableError
        """
        what = f"version {self.version} of run {self.run!r}"
        versions = WeightVersions(store, self.run)
        try:
            manifest, paths = versions.download_tensors(self.version, folder / str(self.version))
        except ObjectNotFoundError:
            raise ConfigError(f"this run is forked from {what}, which is not in {store.url}") from None
        if manifest.model_config_sha256 != model_config_sha256:
            raise ConfigError(f"config.json in model.path is not that of {what}; a fork trains the same model")
        learner.load_weights(TensorFiles(paths), what=what)
        log.warning(
            "forked_without_checkpoint",
            version=str(self.version),
            run=self.run,
            meaning="the optimizer begins anew, and the starting model is the reference until the next reset",
        )
        if manifest.dtype != "float32":
            log.warning("forked_from_rounded_weights", dtype=manifest.dtype)

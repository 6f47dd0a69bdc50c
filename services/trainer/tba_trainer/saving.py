"""Writing checkpoints: what the trainer is, into the store; then the buffer is told that a resume starts there."""

from __future__ import annotations

from contextlib import closing

from tba.api import CheckpointRequest
from tba.clients import BufferClient
from tba.config import Recipe
from tba.logs import get_logger
from tba.versions import START, PolicyVersion
from tba_trainer.checkpoint import Checkpoints
from tba_trainer.fallback import before_suspect
from tba_trainer.learner import Learner
from tba_trainer.progress import Progress
from tba_trainer.startup import Session, config_sha256
from tba_trainer.tensor_files import lockstep
from tba_trainer.trainer_state import TrainerState, encode_torch_rng

log = get_logger("saving")


class CheckpointSaver:
    """Writes checkpoints of one lineage.

    Args:
        progress: where the trainer stands; read at every save.
        model_config_sha256: digest of the model's config.json.
    """

    def __init__(
        self,
        recipe: Recipe,
        session: Session,
        progress: Progress,
        *,
        buffer: BufferClient,
        checkpoints: Checkpoints,
        learner: Learner,
        model_config_sha256: str,
    ) -> None:
        self._recipe, self._session, self._progress = recipe, session, progress
        self._buffer, self._checkpoints, self._learner = buffer, checkpoints, learner
        self._model_config_sha256 = model_config_sha256
        self.saved = session.parent
        """The version whose state a resume would start from."""
        self.previous = session.previous
        """The checkpoint before that one; None: there is none."""

    @property
    def is_proven(self) -> bool:
        """Whether a good step has followed what a resume would start from."""
        return self._progress.last_good_step > self.saved.step

    def save(self) -> None:
        """Write and register a checkpoint of the weights as they are; nothing to do without a step since the last.

        Raises:
            StoreUnavailableError: nothing was registered.
            FencedError: a newer lineage owns the run.
        """
        progress = self._progress
        if progress.step == self.saved.step:
            return
        learner, version = self._learner, progress.version
        state = TrainerState(
            run=self._recipe.run.name,
            version=str(version),
            train_s=progress.train_s,
            num_rollouts_trained=progress.num_rollouts_trained,
            reference_version=str(learner.reference.version),
            rng=dict(learner.rng.bit_generator.state),
            torch_rng=encode_torch_rng(),
            config_sha256=config_sha256(self._recipe),
            model_config_sha256=self._model_config_sha256,
            policy_temperature=self._recipe.model.policy_temperature,
            lora=self._recipe.model.lora,
            guards=progress.guards,
            previous=self._saved_checkpoint and str(self._saved_checkpoint),
            settings_revision=progress.settings_revision,
        )
        with closing(lockstep(learner.capture())) as tensors:
            key = self._checkpoints.save(state, tensors)
        self._buffer.register_checkpoint(CheckpointRequest(version=str(version), token=self._session.token, key=key))
        self.previous, self.saved = self._saved_checkpoint, version
        self._checkpoints.delete_all_but(
            self._recipe.trainer.keep_checkpoints,
            history=self._session.lineages.ancestry(version),
            last_good_step=progress.last_good_step,
        )
        log.info("checkpoint", version=str(version), key=key)

    def leave_suspect(self) -> str:
        """The weights are what may be wrong, and the run fails: the next start must not go on from a checkpoint that no
        good step followed, where there is an older one; that one is registered. Answers from where it goes on.

        Raises:
            StoreUnavailableError, UnavailableError: nothing was changed.
            FencedError: a newer lineage owns the run.
        """
        if self.is_proven or self._saved_checkpoint is None:
            return self.resume_point()
        suspect, good = self.saved, self._progress.last_good_step
        older = before_suspect(self._checkpoints, self._session.lineages, suspect, last_good_step=good)
        if not older:
            return f"{self.resume_point()}, the only one, which no good step followed"
        key = self._checkpoints.key(older[0])
        self._buffer.register_checkpoint(CheckpointRequest(version=str(older[0]), token=self._session.token, key=key))
        log.warning("checkpoint_suspect", suspect=str(suspect), resume_from=str(older[0]), last_good_step=good)
        return f"The next start of the trainer goes on from checkpoint {older[0]}: no good step followed {suspect}"

    def resume_point(self) -> str:
        """From where the next start goes on, as a sentence without its end."""
        if self._saved_checkpoint is None:
            return f"There is no checkpoint: the next start of the trainer begins again at {self.saved}"
        return f"The next start of the trainer goes on from checkpoint {self.saved}"

    @property
    def _saved_checkpoint(self) -> PolicyVersion | None:
        """`saved`, if it is a checkpoint of this run and not what the run began with."""
        session = self._session
        begun = self.saved == session.parent and (session.borrowed or self.saved == START)
        return None if begun else self.saved

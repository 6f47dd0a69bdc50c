"""Write checkpoints of one lineage to the store, and tell the buffer from which one a resume starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from tba.api import CheckpointRequest
from tba.logs import get_logger
from tba.versions import START, PolicyVersion
from tba_trainer.checkpoints.checkpoint import before_suspect
from tba_trainer.checkpoints.weight_files import lockstep
from tba_trainer.learner.learner import TrainerState, config_sha256, encode_torch_rng
from tba_trainer.loop.trainer_context import LineageContext

log = get_logger("checkpointing")


class CheckpointWriter:
    """Writes checkpoints of one lineage."""

    def __init__(self, context: LineageContext) -> None:
        self._context, self._session, self._progress = context, context.session, context.progress
        self.saved = context.session.parent
        """The version whose state a resume would start from."""
        self.previous = context.session.previous
        """The checkpoint before that one; None: there is none."""

    @property
    def is_proven(self) -> bool:
        """Whether a good step followed the state that a resume would start from."""
        return self._progress.last_good_step > self.saved.step

    def save(self) -> None:
        """Write and register a checkpoint of the current weights; do nothing without a step since the last one.

        Raises:
            StoreUnavailableError: nothing was registered.
            FencedError: a newer lineage owns the run.
        """
        # After a resume without a step: the same state again, in a new lineage, would only push an older one out.
        if self._progress.step == self.saved.step:
            return
        context, version = self._context, self._progress.version
        # every process of a sharded model takes part in the gathering, even after a failed upload
        with closing(lockstep(context.learner.capture())) as tensors:
            key = context.checkpoints.save(self._state(), tensors)
        keep = context.recipe.trainer.keep_checkpoints
        history, good = self._session.lineages.ancestry(version), self._progress.last_good_step
        kept = context.checkpoints.kept(keep, history=history, last_good_step=good)
        # registered only now: the buffer must never name a checkpoint that is half written
        self._register(version, key, kept=kept)
        self.previous, self.saved = self._saved_checkpoint, version
        # Last: until the new one is registered, a resume may still need an old one, and so may an operator's rollback.
        context.checkpoints.delete_all_but(kept, keep=keep)
        log.info("checkpoint", version=str(version), key=key)

    def register_unsuspected(self) -> str:
        """Register an older checkpoint where no good step followed the last one. Return where the next start continues.

        For a run that fails while its weights may be what is wrong.

        Raises:
            StoreUnavailableError, UnavailableError: nothing was changed.
            FencedError: a newer lineage owns the run.
        """
        # A good step after it says that its weights are sound: then the batches since are suspect, not the checkpoint.
        if self.is_proven or self._saved_checkpoint is None:
            return self.resume_point()
        suspect, good, checkpoints = self.saved, self._progress.last_good_step, self._context.checkpoints
        older = before_suspect(checkpoints, self._session.lineages, suspect, last_good_step=good)
        if not older:
            return f"{self.resume_point()}, the only one, which no good step followed"
        self._register(older[0], checkpoints.key(older[0]))
        log.warning("checkpoint_suspect", suspect=str(suspect), resume_from=str(older[0]), last_good_step=good)
        return f"The next start of the trainer continues from checkpoint {older[0]}: no good step followed {suspect}"

    def resume_point(self) -> str:
        """Return where the next start continues, as a sentence without its full stop."""
        if self._saved_checkpoint is None:
            return f"There is no checkpoint: the next start of the trainer starts over at {self.saved}"
        return f"The next start of the trainer continues from checkpoint {self.saved}"

    @property
    def _saved_checkpoint(self) -> PolicyVersion | None:
        """`saved` if it is a checkpoint of this run; None while it is the state that the run began with."""
        session = self._session
        # a fork starts from a checkpoint of another run, which this run's store folder does not hold
        is_start = self.saved == session.parent and (session.has_no_checkpoint or self.saved == START)
        return None if is_start else self.saved

    def _register(self, version: PolicyVersion, key: str, *, kept: Sequence[PolicyVersion] | None = None) -> None:
        names = None if kept is None else [str(each) for each in kept]
        request = CheckpointRequest(version=str(version), token=self._session.token, key=key, kept=names)
        self._context.buffer.register_checkpoint(request)

    def _state(self) -> TrainerState:
        context, progress = self._context, self._progress
        recipe, learner = context.recipe, context.learner
        return TrainerState(
            run=recipe.run.name,
            version=str(progress.version),
            train_s=progress.train_s,
            num_rollouts_trained=progress.num_rollouts_trained,
            reference_version=str(learner.reference.version),
            rng=dict(learner.rng.bit_generator.state),
            torch_rng=encode_torch_rng(),
            config_sha256=config_sha256(recipe),
            model_config_sha256=context.model_config_sha256,
            policy_temperature=recipe.model.policy_temperature,
            lora=recipe.model.lora,
            guards=progress.guards,
            previous=self._saved_checkpoint and str(self._saved_checkpoint),
            settings_revision=progress.settings_revision,
        )

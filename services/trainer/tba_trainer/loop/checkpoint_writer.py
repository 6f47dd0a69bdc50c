"""Write checkpoints of one lineage to the store, and tell the buffer from which one a resume starts.

    small    loop     write    copy, upload, register
    large    loop     write    copy to memory; without room there, wait for the upload (`checkpoints/parts.py`)
             thread            upload, manifest last
             loop     settle   after a later step: register it, delete old ones

Every process of the trainer copies and uploads the rows that it holds (`tba_trainer.distributed.checkpoints`).

A large checkpoint is registered some steps after it was taken. A trainer that is killed in between resumes from the
checkpoint before, which is deleted only after the new one is registered.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tba.api import CheckpointRequest
from tba.errors import StoreUnavailableError
from tba.logs import get_logger
from tba.store.open import TIMEOUT_S as STORE_TIMEOUT_S
from tba.versions import START, PolicyVersion
from tba_trainer.checkpoints.choose_checkpoint import before_suspect
from tba_trainer.distributed.checkpoints import Upload
from tba_trainer.learner.learner import TrainerState, config_sha256, encode_torch_rng
from tba_trainer.loop import limits
from tba_trainer.loop.trainer_context import LineageContext
from tba_trainer.model.parameters import trainable

_POLL_S = 0.5
log = get_logger("checkpointing")


class CheckpointWriter:
    """Writes checkpoints of one lineage."""

    def __init__(self, context: LineageContext) -> None:
        self._context, self._session, self._progress = context, context.session, context.progress
        self.saved = context.session.parent
        """The version whose state a resume would start from."""
        self.previous = context.session.previous
        """The checkpoint before `saved`; None: there is none."""
        self._upload: Upload | None = None

    @property
    def is_proven(self) -> bool:
        """Whether a good step followed the state that a resume would start from."""
        return self._progress.last_good_step > self.saved.step

    @property
    def is_uploading(self) -> bool:
        """Whether there is an upload whose checkpoint is not registered yet."""
        return self._upload is not None

    def write(self) -> None:
        """Write a checkpoint of the current weights. Upload a large one in the background, unless memory is short.

        Raises:
            StoreUnavailableError: nothing was registered.
            FencedError: a newer lineage owns the run.
            OSError: the local disk is full.
        """
        # what is trained and the moments of AdamW, in float32
        num_bytes = 12 * sum(parameter.numel() for parameter in trainable(self._context.learner.model).values())
        if num_bytes < limits.BACKGROUND_BYTES:
            self.save()
        elif self._progress.step > self.saved.step:
            self._upload = self._new(in_background=True)
            log.info("checkpoint_begun", version=str(self._upload.version), is_staged=self._upload.is_staged)
            if not self._upload.is_staged:
                self._wait_unstaged(self._upload)

    def save(self) -> None:
        """Write and register a checkpoint of the current weights; do nothing without a step since the last one.

        The upload of an older checkpoint is given up once the new one is registered.

        Raises:
            StoreUnavailableError: the new one was not registered: a process could not store its part, or did not in
                time.
            FencedError: a newer lineage owns the run.
            OSError: the local disk is full.
        """
        version = self._progress.version
        # one that has ended is registered first: this process may be killed before the new one is stored
        if self._upload is not None and (self._upload.version == version or self._upload.wait(0.0)):
            self.complete_upload()
        # After a resume without a step: the same state again, in a new lineage, would only push an older one out.
        if self._progress.step == self.saved.step:
            return
        begin = time.monotonic()
        try:
            upload = self._new(in_background=False)
            # the part of this process is stored; one as large, over a slower link, may take some time more
            wait_s = max(limits.RETRY_S, time.monotonic() - begin)
            with self._context.status.named_wait("checkpoint-upload", wait_s):
                has_ended = upload.wait(wait_s)
            if not has_ended:
                upload.give_up()
                raise StoreUnavailableError(
                    f"{upload.missing()} did not store its part of checkpoint {upload.version} within {wait_s:g} s, "
                    f"once that of process 0 was stored (as long as that took, {limits.RETRY_S:g} s at least; the wait "
                    "checkpoint-upload)"
                )
            if upload.error is not None:
                raise upload.error
        except StoreUnavailableError:
            self.complete_upload()  # an older state is worth more than none
            raise
        assert upload.key is not None
        if self._upload is not None:
            self._upload.give_up()
        self._register_saved(version, upload.key)
        self.give_up_upload()  # it waits, and the new one must not wait for that to be registered

    def _new(self, *, in_background: bool) -> Upload:
        """Begin a checkpoint of the current weights. Arguments and errors are those of `TeamCheckpoints.begin`."""
        context, progress = self._context, self._progress
        recipe, learner = context.recipe, context.learner
        state = TrainerState(
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
        # `saved` stays in the store until this one is registered
        known = context.checkpoints.reusable_objects(self.saved)
        return context.checkpoints.begin(state, learner.capture(), known=known, in_background=in_background)

    def _wait_unstaged(self, upload: Upload) -> None:
        """Wait for an upload that reads the weights, and register its checkpoint. SIGTERM ends the wait."""
        stop, deadline = self._context.stop, time.monotonic() + limits.UPLOAD_S
        with self._context.status.named_wait("checkpoint-upload", limits.UPLOAD_S):
            while not upload.wait(_POLL_S):
                if stop.is_set():
                    return
                if time.monotonic() > deadline:
                    self.give_up_upload()
                    raise StoreUnavailableError(
                        f"checkpoint {upload.version}, which memory had no room for, was not stored within "
                        f"{limits.UPLOAD_S:g} s (the wait checkpoint-upload)"
                    )
        self.settle()

    def settle(self) -> None:
        """If the upload has ended, register its checkpoint and delete old ones. Do not wait.

        Raises:
            StoreUnavailableError: the checkpoint could not be stored; nothing was registered.
            FencedError: a newer lineage owns the run.
        """
        upload = self._upload
        if upload is None or not upload.wait(0.0):
            return
        self._upload = None
        if upload.error is not None:
            raise upload.error
        if upload.key is not None:
            self._register_saved(upload.version, upload.key)

    def complete_upload(self) -> None:
        """Wait for the upload, RETRY_S at most, and register its checkpoint; otherwise log why not, and give it up."""
        if self._upload is None:
            return
        wait_s = limits.RETRY_S
        with self._context.status.named_wait("checkpoint-upload", wait_s):
            self._upload.wait(wait_s)
        try:
            self.settle()
        except StoreUnavailableError as error:
            log.warning("checkpoint_failed", step=self._progress.step, error=str(error))
        if self._upload is not None:
            log.warning("checkpoint_given_up", wait="checkpoint-upload", deadline_s=wait_s)
            self.give_up_upload()

    def give_up_upload(self) -> None:
        """Abandon the upload: write no more objects and no manifest.

        Waits until the object that is being written is done, at most for the timeout of one store operation.
        """
        if self._upload is not None:
            self._upload.give_up()
            self._upload.wait(STORE_TIMEOUT_S)
            self._upload = None

    def _register_saved(self, version: PolicyVersion, key: str) -> None:
        context = self._context
        keep = context.recipe.trainer.keep_checkpoints
        history, good = self._session.lineages.ancestry(version), self._progress.last_good_step
        kept = context.checkpoints.kept(keep, history=history, last_good_step=good)
        # registered only now: the buffer must never name a checkpoint that is half written
        self._register(version, key, kept=kept)
        self.previous, self.saved = self._saved_checkpoint, version
        # Last: until the new one is registered, a resume may still need an old one, and so may an operator's rollback.
        # Only the active lineage is counted: abandoned checkpoints are no place to resume from, and go by their age.
        for each in context.checkpoints.versions():
            if kept and each < kept[-keep:][0] and each not in kept:
                context.checkpoints.delete(each)
        log.info("checkpoint", version=str(version), key=key)

    def register_unsuspected(self) -> str:
        """Register an older checkpoint if no good step followed the last one. Return where the next start continues.

        Called when a run fails and its weights may be the cause.

        Raises:
            StoreUnavailableError, UnavailableError: nothing was changed.
            FencedError: a newer lineage owns the run.
        """
        self.complete_upload()
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
        """`saved` if this run has a checkpoint of it; None if `saved` is only the state that the run began with."""
        session = self._session
        # a fork starts from a checkpoint of another run, which this run's store folder does not hold
        is_start = self.saved == session.parent and (session.has_no_checkpoint or self.saved == START)
        return None if is_start else self.saved

    def _register(self, version: PolicyVersion, key: str, *, kept: Sequence[PolicyVersion] | None = None) -> None:
        names = None if kept is None else [str(each) for each in kept]
        request = CheckpointRequest(version=str(version), token=self._session.token, key=key, kept=names)
        self._context.buffer.register_checkpoint(request)

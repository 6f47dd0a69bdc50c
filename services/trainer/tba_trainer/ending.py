"""How a trainer ends: it leaves a run that goes on later, or it finishes the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from tba.api import RunCommand
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import StoreUnavailableError, WaitTimeoutError
from tba.local.setting_changes import whole_settings
from tba.logs import get_logger
from tba.store import ObjectStore
from tba_trainer.evaluations import Evaluations
from tba_trainer.export import upload_export
from tba_trainer.guards import holds_checkpoints
from tba_trainer.progress import Progress
from tba_trainer.publisher import Publisher
from tba_trainer.saving import CheckpointSaver
from tba_trainer.startup import Session
from tba_trainer.status import Status

_RETRY_PAUSE_S = 1.0
End = Literal["done", "stopped"]
"""How a trainer ends without an error: the run is over, or it was told to stop before and the run can be resumed."""
log = get_logger("ending")


class Ending:
    """What is done when training is over.

    Args:
        submit: hands the weights as they are now to the publisher, to be evaluated on so many prompts (None: not).
    """

    def __init__(
        self,
        recipe: Recipe,
        session: Session,
        progress: Progress,
        *,
        buffer: BufferClient,
        store: ObjectStore,
        saver: CheckpointSaver,
        submit: Callable[[int | None], None],
        publisher: Publisher,
        evaluations: Evaluations,
        status: Status,
        stop: threading.Event,
    ) -> None:
        self._recipe, self._session, self._progress = recipe, session, progress
        self._buffer, self._store, self._saver = buffer, store, saver
        self._submit, self._publisher, self._evaluations = submit, publisher, evaluations
        self._status, self._stop = status, stop

    def leave(self) -> None:
        """SIGTERM: keep what was trained; the run can be resumed.

        While an alarm that could roll back is on, nothing is kept that a rollback would have to undo: the last
        checkpoint stands.

        Raises:
            StoreUnavailableError: the last checkpoint cannot be written; a resume goes on from an older one.
        """
        self._status.set_state("stopping")
        progress, saver = self._progress, self._saver
        if holds_checkpoints(self._recipe.trainer.guards, progress.guards):
            log.warning("stopped_without_checkpoint", step=progress.step, resume_from=str(saver.saved))
            self._status.set_state("stopped")
            return
        try:
            saver.save()
        except StoreUnavailableError as error:
            raise StoreUnavailableError(
                f"stopped at step {progress.step} without a checkpoint of it ({error}); a resume repeats the steps "
                f"after {saver.saved.step}"
            ) from None
        self._status.set_state("stopped")
        log.info("stopped", version=str(progress.version))

    def finish(self, why_early: str | None) -> End:
        """The run is over: publish, checkpoint, evaluate, export, done. Told to stop before that, it can be resumed.

        Args:
            why_early: why it is over before `num_steps`; None: it is not.
        """
        progress = self._progress
        progress.stop_clock()
        self._status.set_state("finishing")
        if progress.submitted != progress.version:
            self._submit(None)
        self._publisher.drain()
        if not self._stop.is_set():
            evaluation = self._evaluations.request(progress.version, self._evaluations.num_prompts_final)
            self._until_stored("the last checkpoint", self._saver.save)
            if evaluation is not None:
                self._evaluations.wait(evaluation, self._status, self._stop)
            if self._recipe.trainer.export:
                self._until_stored("the export", self._export)
        if self._stop.is_set():
            self.leave()
            return "stopped"
        reason = f"trained to version {progress.version}"
        if why_early is not None:
            reason += f", step {progress.step} of {self._recipe.trainer.num_steps}: {why_early}"
        self._buffer.command("done", RunCommand(reason=reason, token=self._session.token))
        self._status.set_state("done")
        log.info("done", version=str(progress.version), train_s=round(progress.train_s, 1))
        return "done"

    def _export(self) -> None:
        info, changes = self._buffer.run(), whole_settings(self._buffer).changes
        upload_export(self._recipe, info, self._store, last=self._progress.version, changes=changes)

    def _until_stored(self, what: str, action: Callable[[], None]) -> None:
        """Do it, again while the store is away; left undone only when the process is told to stop."""
        wait_s = self._recipe.trainer.retry_s
        deadline = time.monotonic() + wait_s
        with self._status.waiting("object-store", wait_s):
            while not self._stop.is_set():
                try:
                    action()
                    return
                except StoreUnavailableError as error:
                    if time.monotonic() > deadline:
                        raise WaitTimeoutError(f"{what} could not be stored within {wait_s:g} s: {error}") from None
                    log.warning("store_away", what=what, error=str(error))
                    self._stop.wait(_RETRY_PAUSE_S)

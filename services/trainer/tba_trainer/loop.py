"""The training loop: one thread that steps, three that serve it.

      buffer --draw--> [prefetch thread] --batch--> [loop: gradients -> ack -> apply] --snapshot--> [publisher thread]
        ^                                              |        |                                     |        |
        |<---------------- ack (lineage, step) --------+        +--checkpoint--> store <--objects-----+        |
        |<---------------- mark (sync), evaluation request ------------------------------------------------------+
        |<---------------- heartbeat, every second [heartbeat thread]

    who            waits for                        name of the wait        deadline
    loop           the batch of its step            as the buffer says      trainer.batch_wait_s
    loop           a place for a snapshot           unpublished-versions    trainer.retry_s
    loop           the store, for a checkpoint      -                       store.timeout_s, then at the next sync
    loop (end)     the last checkpoint, the export  object-store            trainer.retry_s
    loop (end)     the evaluation of the result     final-evaluation        eval.timeout_s
    prefetch       permission to draw one more      -                       until the loop takes a batch
    publisher      a snapshot; store; buffer        -                       none: the loop's wait bounds it

Step N: gradients from the batch at the weights after step N - 1, then the ack, then the update. An ack that is
refused because the batch is void costs one gradient; the ledger never names a step whose weights do not follow from
it, because a crash between ack and update is undone by the resume, which abandons entries after the checkpoint.

How it ends: `num_steps` or `max_train_s` reached, or the run is stopping -> publish, checkpoint, evaluate, export,
`done`. SIGTERM at any moment before `done` -> finish the step, checkpoint, exit 0; the run stays as it is and can be
resumed. A newer lineage (FencedError) -> exit 3, nothing more is written. A loss or gradient that is not finite -> the
run is marked failed; it can be resumed from its last checkpoint.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tba.api import AckRequest, CheckpointRequest, RunCommand
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import (
    ConflictError,
    FencedError,
    MalformedError,
    RunOverError,
    StoreUnavailableError,
    TbaError,
    VoidBatchError,
    WaitTimeoutError,
)
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.versions import PolicyVersion
from tba.wire import Batch
from tba_trainer.checkpoint import Checkpoint, Checkpoints, TrainerState, capture, encode_torch_rng
from tba_trainer.evaluations import Evaluations
from tba_trainer.export import upload_export
from tba_trainer.learner import Learner
from tba_trainer.optim import NonFiniteError
from tba_trainer.prefetch import Prefetcher
from tba_trainer.publisher import Publisher
from tba_trainer.snapshots import Snapshots
from tba_trainer.startup import Session, config_sha256
from tba_trainer.status import Status
from tba_trainer.values import scheduled

MAX_REFUSED_ACKS = 5
"""Batches in a row that may be void at their ack; more means that a step is slower than `batch_deadline_s`."""
MAX_ON_POLICY_GAP = 0.05
"""Nats per token between trainer and sampler log-probs at policy age 0; more is logged: two models are in play."""
_RETRY_PAUSE_S = 1.0
log = get_logger("loop")


class TrainingLoop:
    """Steps until the run is over. Dependencies are built by `tba_trainer.run`."""

    def __init__(
        self,
        recipe: Recipe,
        session: Session,
        *,
        buffer: BufferClient,
        store: ObjectStore,
        checkpoints: Checkpoints,
        learner: Learner,
        snapshots: Snapshots,
        publisher: Publisher,
        prefetcher: Prefetcher,
        evaluations: Evaluations,
        status: Status,
        files: Mapping[str, Path],
        model_config_sha256: str,
        stop: threading.Event,
    ) -> None:
        self._recipe, self._session = recipe, session
        self._buffer, self._store, self._checkpoints = buffer, store, checkpoints
        self._learner, self._snapshots, self._publisher = learner, snapshots, publisher
        self._prefetcher, self._evaluations, self._status = prefetcher, evaluations, status
        self._files, self._model_config_sha256, self._stop = files, model_config_sha256, stop
        self.step = session.parent.step
        self._submitted = session.first
        self._saved_step = self.step
        self._checkpoint_due = session.borrowed
        self._num_rollouts_trained = session.num_rollouts_trained
        self._num_refused_acks = 0
        self._started = time.monotonic()
        self._train_s: float | None = None

    @property
    def version(self) -> PolicyVersion:
        """The weights as they are now."""
        return self._session.first if self.step == self._session.parent.step else self._own(self.step)

    @property
    def train_s(self) -> float:
        """Seconds of training along the living lineage, waits included, the end (evaluation, export) not."""
        if self._train_s is not None:
            return self._train_s
        return self._session.train_s + time.monotonic() - self._started

    def run(self) -> None:
        """Train to the end of the run, or until SIGTERM.

        Raises:
            TbaError: one clear sentence; FencedError means that nothing more may be written.
        """
        self._started = time.monotonic()
        self._status.set_state("training")
        self._status.set_version(self.version)
        try:
            self._train()
        except (NonFiniteError, MalformedError) as error:
            self._buffer.command("fail", RunCommand(reason=str(error), token=self._session.token))
            raise
        if self._stop.is_set():
            self._leave()
        else:
            self._finish()

    def _train(self) -> None:
        section = self._recipe.trainer
        while self.step < section.num_steps and not self._stop.is_set():
            if section.max_train_s is not None and self.train_s >= section.max_train_s:
                log.info("max_train_s_reached", step=self.step, train_s=round(self.train_s, 1))
                return
            try:
                if self._one_step():
                    self._after_step()
            except RunOverError as error:
                log.info("run_is_over", step=self.step, reason=str(error))
                return

    def _one_step(self) -> bool:
        """One optimizer step; False when it was not made (told to stop, or the batch had expired)."""
        step, waited_s = self.step + 1, self._status.waited_s
        batch = self._prefetcher.take(step)
        if batch is None:
            return False
        waited_s, started = self._status.waited_s - waited_s, time.monotonic()
        # ages are taken when the batch is consumed, not when it was drawn
        ages = [self._session.lineages.policy_age(r.version, self._own(self.step)) for r in batch.rollouts]
        values = scheduled(self._recipe, step=step)
        metrics = self._learner.gradients(batch, step=step, policy_ages=ages, values=values)
        metrics |= {
            "step_s": time.monotonic() - started,
            "wait_s": waited_s,
            "waited_s_total": self._status.waited_s,  # with the waits of refused acks and for places of snapshots
            "train_s": self.train_s,
        }
        if not self._ack(batch, step, metrics, ages):
            return False
        self._learner.apply(step=step, lineage=self._session.lineage, values=values)
        self.step = step
        self._num_rollouts_trained += len(batch.rollouts)
        self._status.set_step(self.version, metrics)
        self._log_step(metrics)
        return True

    def _ack(self, batch: Batch, step: int, metrics: dict[str, float | None], ages: list[int]) -> bool:
        request = AckRequest(
            lineage=self._session.lineage,
            step=step,
            token=self._session.token,
            metrics={n: v if v is not None and math.isfinite(v) else None for n, v in metrics.items()},
            policy_ages=ages,
        )
        try:
            self._buffer.ack(batch.batch_id, request)
        except (FencedError, RunOverError):
            raise
        except VoidBatchError as error:
            self._num_refused_acks += 1
            log.warning("batch_void", step=step, batch_id=batch.batch_id, error=str(error))
            if self._num_refused_acks >= MAX_REFUSED_ACKS:
                raise TbaError(
                    f"{self._num_refused_acks} batches in a row were void before step {step} could use them ({error}); "
                    f"raise buffer.batch_deadline_s (now {self._recipe.buffer.batch_deadline_s:g} s) above the "
                    "duration of a step"
                ) from None
            self._learner.optimizer.discard()
            self._prefetcher.discard(step)
            return False
        except ConflictError as error:
            raise TbaError(
                f"the ledger and this trainer disagree about step {step}: {error}; nothing was trained with this "
                "batch: start the trainer again, it goes on from the last checkpoint"
            ) from None
        self._num_refused_acks = 0
        return True

    def _after_step(self) -> None:
        section = self._recipe.trainer
        self._publisher.check()
        at_sync = self.step % section.sync_interval == 0
        if at_sync and self.step < section.num_steps:
            self._submit(self._evaluations.num_prompts_due(self.step))
        self._checkpoint_due |= self.step % section.checkpoint_interval == 0
        if self._checkpoint_due and self.step < section.num_steps:
            try:
                self._save()
            except StoreUnavailableError as error:
                log.warning("checkpoint_failed", step=self.step, error=str(error))
                self._checkpoint_due = at_sync or self.step % section.checkpoint_interval == 0

    def _submit(self, num_eval_prompts: int | None) -> None:
        self._publisher.submit(self._snapshots.take(self.version, self._submitted), num_eval_prompts=num_eval_prompts)
        self._submitted = self.version

    def _save(self) -> None:
        """Write and register a checkpoint of the weights as they are; nothing to do without a step since the last."""
        if self.step == self._saved_step:
            return
        learner, version = self._learner, self.version
        state = TrainerState(
            run=self._recipe.run.name,
            version=str(version),
            train_s=self.train_s,
            num_rollouts_trained=self._num_rollouts_trained,
            reference_version=str(learner.reference.version),
            rng=dict(learner.rng.bit_generator.state),
            torch_rng=encode_torch_rng(),
            config_sha256=config_sha256(self._recipe),
            model_config_sha256=self._model_config_sha256,
            policy_temperature=self._recipe.model.policy_temperature,
        )
        key = self._checkpoints.save(Checkpoint(state=state, tensors=capture(learner)))
        self._buffer.register_checkpoint(CheckpointRequest(version=str(version), token=self._session.token, key=key))
        self._saved_step, self._checkpoint_due = self.step, False
        self._checkpoints.delete_all_but(self._recipe.trainer.keep_checkpoints, registered=version)
        log.info("checkpoint", version=str(version), key=key)

    def _leave(self) -> None:
        """SIGTERM: keep what was trained; the run can be resumed.

        Raises:
            StoreUnavailableError: the last checkpoint cannot be written; a resume goes on from an older one.
        """
        self._status.set_state("stopping")
        self._prefetcher.close()
        try:
            self._save()
        except StoreUnavailableError as error:
            raise StoreUnavailableError(
                f"stopped at step {self.step} without a checkpoint of it ({error}); a resume repeats the steps after "
                f"{self._saved_step}"
            ) from None
        log.info("stopped", version=str(self.version))

    def _finish(self) -> None:
        """The run is over: publish, checkpoint, evaluate, export, done. Told to stop before that, it can be resumed."""
        self._train_s = self.train_s
        self._status.set_state("finishing")
        self._prefetcher.close()
        num_prompts = self._evaluations.num_prompts_final
        if self._submitted != self.version:
            self._submit(None)
        self._publisher.drain()
        if not self._stop.is_set():
            evaluation = self._evaluations.request(self.version, num_prompts)
            self._until_stored("the last checkpoint", self._save)
            if self._recipe.trainer.export:
                self._until_stored("the export", self._export)
            if evaluation is not None:
                self._evaluations.wait(evaluation, self._status, self._stop)
        if self._stop.is_set():
            self._leave()
            return
        self._buffer.command("done", RunCommand(reason=f"trained to version {self.version}", token=self._session.token))
        self._status.set_state("done")
        log.info("done", version=str(self.version), train_s=round(self.train_s, 1))

    def _export(self) -> None:
        prefix = upload_export(self._snapshots, self._files, self._store, self._recipe.run.name)
        log.info("exported", prefix=prefix, store=self._store.url)

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

    def _own(self, step: int) -> PolicyVersion:
        return PolicyVersion(self._session.lineage, step)

    def _log_step(self, metrics: Mapping[str, float | None]) -> None:
        shown = ("loss", "reward_mean", "policy_age_mean", "ess", "grad_norm", "step_s", "wait_s")
        numbers = {name: round(value, 4) for name in shown if (value := metrics[name]) is not None}
        log.info("step", version=str(self.version), **numbers)
        gap = metrics["logprob_gap_on_policy"]
        if gap is not None and gap > MAX_ON_POLICY_GAP:
            log.warning(
                "logprob_gap_on_policy",
                gap=round(gap, 4),
                limit=MAX_ON_POLICY_GAP,
                hint="at policy age 0 trainer and sampler log-probs must agree: same weights, same temperature?",
            )

"""The training loop: one thread that makes optimizer steps, and three that serve it.

    buffer --draw--> [prefetch] --batch--> [loop: filter -> gradients -> guards -> ack -> apply or skip] --> [publisher]
      ^                                             |                                 |            snapshot      |    |
      |<---------------- ack (lineage, step) -------+                                 +--checkpoint--> store <---+    |
      |<---------------- announced version, evaluation request -------------------------------------------------------+
      |<---------------- heartbeat, every second [heartbeat thread]

    thread         waits for                        name of the wait        deadline
    loop           the batch of its step            as the buffer says      trainer.batch_wait_s
    loop           a place for a snapshot           unpublished-versions    limits.RETRY_S
    loop           the store, for a small           -                       30 s, then at the next sync
                   checkpoint; a large one is uploaded by a thread of its own
    loop           the upload of a checkpoint       checkpoint-upload       limits.UPLOAD_S
                   that does not fit into memory
    loop (end)     a large checkpoint under way     checkpoint-upload       limits.RETRY_S
    start          followers' checkpoint parts      checkpoint-download     limits.RETRY_S, or as long as its own took
    loop (end)     the last checkpoint, the export  object-store            limits.RETRY_S
    loop (end)     the final evaluation             final-evaluation        eval.timeout_s
    prefetch       permission to draw one more      -                       until the loop takes a batch
    publisher      a snapshot; store; buffer        -                       none: the loop's wait bounds it

How training ends:

    num_steps or max_train_s reached, or the run is over    publish, checkpoint, evaluate, export, `done`
    SIGTERM before `done`                                   finish the step, checkpoint, exit 143; a resume continues
    a newer lineage (FencedError)                           exit 3; nothing more is written
    an alarm that rolls back, or an operator's rollback     `tba_trainer.trainer` starts a lineage from a checkpoint
    an alarm that fails, too many skipped batches           the run is marked failed; a resume continues
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tba.api import RunCommand
from tba.config.trainer import REMEDIES
from tba.errors import (
    ConflictError,
    FencedError,
    GuardError,
    RollbackError,
    RunFailedError,
    RunOverError,
    StoreUnavailableError,
    TbaError,
    VoidBatchError,
)
from tba.fields import bounded_or_none
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba_trainer.learner.guards import (
    Rollback,
    StepAction,
    check_step,
    holds_checkpoints,
    suspects_weights,
    usual_grad_norm,
)
from tba_trainer.loop.batches import batch_counts, filter_batch
from tba_trainer.loop.checkpoint_writer import CheckpointWriter
from tba_trainer.loop.shutdown import RunEnd, finish, interrupt
from tba_trainer.loop.step_record import StepRecord
from tba_trainer.loop.trainer_context import LineageContext

MAX_VOID_BATCHES = 5
"""Batches in a row that may be void at their ack. More means that a step is slower than `batch_deadline_s`."""
log = get_logger("loop")


class TrainingLoop:
    """Makes the optimizer steps of one lineage until the run is over."""

    def __init__(self, context: LineageContext) -> None:
        self._context, self._progress, self._token = context, context.progress, context.session.token
        self._guards = context.recipe.trainer.guards
        # Where searchers sample at other temperatures than the policy's, the distance of theta from its data measures
        # those too, and says nothing of old data. An alarm with an action was set for the run, and goes off anyway.
        others = context.recipe.samples_at_other_temperatures
        alarm_of = {"ess": self._guards.ess_collapse, "log_ratio_token_mean": self._guards.log_ratio_drift}
        self._unjudged = {name for name, alarm in alarm_of.items() if others and alarm.action == "none"}
        self._writer = CheckpointWriter(context)
        # a fork until its first checkpoint: the other run's folders may be deleted, and a resume could not start
        self._checkpoint_due = context.session.has_no_checkpoint
        self._checkpoint_failed = False
        """Whether the last attempt to write the checkpoint that is due failed."""
        self._num_void_in_row = 0
        self._has_left_out_advantages = False

    def run(self) -> Rollback | RunEnd:
        """Train to the end of the run, until SIGTERM, or until an alarm or an operator rolls back.

        Returns:
            The rollback, after which training continues in a new lineage; else how training ended.

        Raises:
            TbaError: one clear sentence. FencedError means that nothing more may be written.
        """
        context = self._context
        self._progress.start_clock()
        context.status.set_state("training", self._progress.version)
        try:
            return self._train()
        except RollbackError as error:  # raised by whichever comes first: a draw, an ack, a checkpoint or the end
            return self._rollback(str(error), is_asked_for=True)
        except GuardError as error:
            log.error("run_fails", step=self._progress.step, reason=str(error))
            command = RunCommand(reason=str(error), token=self._token)
            # a failed report is only logged: the GuardError ends the trainer in any case
            self._try("fail", lambda: context.buffer.command("fail", command))
            raise
        except FencedError:
            self._writer.give_up_upload()  # nothing more may be written
            raise
        except (TbaError, OSError):
            if self._writer.is_uploading:  # kept at an end that is not a kill
                self._try("complete_upload", self._writer.complete_upload)
            raise

    def _train(self) -> Rollback | RunEnd:
        context, section, progress = self._context, self._context.recipe.trainer, self._progress
        early_end: str | None = None
        while progress.step < section.num_steps and not context.stop.is_set():
            if section.max_train_s is not None and progress.train_s >= section.max_train_s:
                log.info("max_train_s_reached", step=progress.step, train_s=round(progress.train_s, 1))
                early_end = f"trainer.max_train_s ({section.max_train_s:g} s) is over"
                break
            try:
                action = self._one_step()
            except RunFailedError:  # the buffer has failed the run: that must not end as a run that is done
                raise
            except RunOverError as error:
                log.info("run_is_over", step=progress.step, reason=str(error))
                early_end = str(error)
                break
            if action is None:  # void or stopped: the loop's condition decides, and the same step is drawn again
                continue
            if (rollback := self._react(action)) is not None:
                return rollback
            self._after_step()
        context.prefetcher.close()  # batches that were drawn ahead expire at the buffer
        if context.stop.is_set():
            interrupt(context, self._writer)
            return "stopped"
        return finish(context, self._writer, early_end=early_end)

    def _one_step(self) -> StepAction | None:
        """Make one optimizer step, applied or skipped, and return its action; None after SIGTERM or a void batch."""
        context, progress, session = self._context, self._progress, self._context.session
        step, waited_s = progress.step + 1, context.status.waited_s
        batch = context.prefetcher.take(step)
        if batch is None:
            return None
        waited_s, started = context.status.waited_s - waited_s, time.monotonic()
        batch = filter_batch(batch, context.requirements, lineages=session.lineages, trainer=progress.newest)
        # ages are taken when the batch is consumed, not when it was drawn
        ages = [session.lineages.policy_age(r.version, progress.newest) for r in batch.rollouts]
        values = context.schedules.at(step)
        measured = judged = None
        if batch.groups:  # else every rollout was refused: the step is skipped, and the ledger says so
            usual = usual_grad_norm(self._guards, progress.guards)
            measured = context.learner.gradients(
                batch, step=step, policy_ages=ages, values=values, usual_grad_norm=usual
            )
            judged = {name: value for name, value in measured.items() if name not in self._unjudged}
        action = check_step(self._guards, progress.guards, judged)
        metrics = {
            "learning_rate": values.learning_rate,
            "beta": values.beta,
            **(measured or {}),
            **{f"alarm_{alarm.name}": 1.0 for alarm in action.alarms},
            "skipped": float(action.skip is not None),
            "num_rollouts_refused": float(len(batch.refused)),
            **batch_counts(batch),
            "step_s": time.monotonic() - started,
            "wait_s": waited_s,
            "waited_s_total": context.status.waited_s,  # with the waits of refused acks and for places of snapshots
            "train_s": progress.train_s,
        }
        record = StepRecord(
            version=PolicyVersion(session.lineage, step),
            batch=batch,
            policy_ages=ages,
            results=context.learner.results if batch.groups else [],
            action=action,
            settings_revision=context.schedules.revision,
            metrics={name: bounded_or_none(value) for name, value in metrics.items()},
        )
        # The ack comes before the update: a refused one costs one gradient, and the weights stay those of the ledger.
        # A crash between the two is undone by the resume, which abandons the ledger's entries after the checkpoint.
        if not self._ack(record):
            context.learner.discard()
            context.prefetcher.discard(step)
            return None
        if action.skip is None:
            context.learner.apply(step=step, lineage=session.lineage, values=values)
            progress.num_rollouts_trained += len(batch.rollouts)
        else:
            # A skipped batch consumes its step, so every step is in the ledger exactly once: the weights stay, the
            # schedules move on, and the reference is reset where that is due.
            context.learner.skip(step=step, lineage=session.lineage)
        # Only now, after the ack: a step that was refused is made again, and must find the guards as they were.
        progress.step, progress.guards = step, action.state
        progress.settings_revision = record.settings_revision
        context.status.set_step(record.version, record.metrics)
        context.trackers.step(record.version, record.metrics, skipped=action.skip)
        record.log(metrics)
        return action

    def _ack(self, record: StepRecord) -> bool:
        """Ack the batch; return False if the batch is void, so that nothing may be applied.

        Raises:
            FencedError, RunOverError: this trainer, or the run, is over.
            RollbackError: an operator has asked for a rollback.
            TbaError: too many void batches in a row; or the ledger knows another history.
        """
        context, step, batch_id = self._context, record.version.step, record.batch.batch_id
        request = record.ack_request(self._token, max_bytes=context.recipe.buffer.max_body_bytes // 2)
        if record.results and request.trained is None and not self._has_left_out_advantages:
            self._has_left_out_advantages = True  # said once: batches of a run have about the same size
            num_rollouts = len(record.results)
            log.warning("advantages_not_kept", step=step, num_rollouts=num_rollouts, key="buffer.max_body_bytes")
        try:
            context.buffer.ack(batch_id, request)
        except (FencedError, RunOverError, RollbackError):  # conflicts too, but they end the lineage in another way
            raise
        except VoidBatchError as error:  # its deadline passed while the step ran: its rollouts may be in other batches
            self._num_void_in_row += 1
            log.warning("batch_void", step=step, batch_id=batch_id, error=str(error))
            if self._num_void_in_row >= MAX_VOID_BATCHES:
                deadline_s = context.recipe.buffer.batch_deadline_s
                raise TbaError(
                    f"{self._num_void_in_row} batches in a row were void before step {step} could use them ({error}); "
                    f"raise buffer.batch_deadline_s (now {deadline_s:g} s) above the duration of a step"
                ) from None
            return False
        except ConflictError as error:
            raise TbaError(
                f"the ledger and this trainer disagree about step {step}: {error}; nothing was trained with this "
                "batch: start the trainer again, it continues from the last checkpoint"
            ) from None
        self._num_void_in_row = 0
        return True

    def _react(self, action: StepAction) -> Rollback | None:
        """Do what the alarms of the step ask for: return a rollback, which ends this lineage, or raise GuardError."""
        context, token = self._context, self._token
        reason = f"step {self._progress.version}: {action.reason}"
        if "fail" in action.actions:
            if self._writer.is_uploading:
                self._try("complete_upload", self._writer.complete_upload)
            resume_point = None
            # the last checkpoint may hold the weights that make every batch fail: the next start would fail too
            if suspects_weights(self._guards, self._progress.guards):
                try:
                    resume_point = self._writer.register_unsuspected()
                except FencedError:
                    raise
                except TbaError as error:
                    step, tried = self._progress.step, "register_unsuspected"
                    log.warning("action_failed", action=tried, step=step, error=str(error))
            is_gap = any(alarm.name == "on_policy_gap" for alarm in action.alarms)
            remedy = "consider a lower trainer.learning_rate or a larger objective.beta"
            raise GuardError(
                f"{reason}; that batch was not applied. {resume_point or self._writer.resume_point()}; "
                f"{REMEDIES['on_policy_gap'] if is_gap else remedy}"
            )
        if "rollback" in action.actions:
            return self._rollback(reason, is_asked_for=False)
        if "pause" in action.actions:
            command = RunCommand(reason=reason, token=token)
            self._try("pause", lambda: context.buffer.command("pause", command))
            context.prefetcher.discard(self._progress.step + 1)  # batches drawn ahead must wait for `tba resume` too
        return None

    def _rollback(self, reason: str, *, is_asked_for: bool) -> Rollback:
        writer, progress = self._writer, self._progress
        writer.give_up_upload()  # the next lineage deletes what is incomplete: nothing may be written into it any more
        suspect = None if writer.is_proven or is_asked_for else writer.saved
        self._context.status.set_state("rolling-back")
        log.warning("rolled_back", step=progress.step, reason=reason, suspect=suspect and str(suspect))
        return Rollback(
            is_asked_for=is_asked_for,
            guards=progress.guards,
            suspect=suspect,
            previous=writer.previous,
            last_good_step=progress.last_good_step,
            token=self._token,
        )

    def _try(self, name: str, action: Callable[[], object]) -> None:
        """Run an action whose failure must not end the run: log a TbaError, and raise only FencedError."""
        try:
            action()
        except FencedError:
            raise
        except TbaError as error:
            log.warning("action_failed", action=name, step=self._progress.step, error=str(error))
        else:
            log.info("action", action=name, step=self._progress.step)

    def _after_step(self) -> None:
        """Publish and checkpoint if that is due after this step."""
        context, progress, section = self._context, self._progress, self._context.recipe.trainer
        context.publisher.check()
        at_sync = progress.step % section.sync_interval == 0
        if at_sync and progress.step < section.num_steps:  # the last version is published by `finish`
            every_steps = context.schedules.eval_every_steps
            due = context.evaluations.num_prompts_due(progress.step, every_steps=every_steps)
            context.publisher.publish(context.snapshots, progress.version, num_eval_prompts=due)
            context.learner.remember(progress.version)
        try:
            self._writer.settle()
        except StoreUnavailableError as error:
            log.warning("checkpoint_failed", step=progress.step, error=str(error))
            self._checkpoint_due = self._checkpoint_failed = True
        at_interval = progress.step % section.checkpoint_interval == 0
        self._checkpoint_due |= at_interval
        # An attempt costs 30 s while the store is away, so a failed one is not repeated in every step.
        is_time = at_sync or at_interval or not self._checkpoint_failed
        # `finish` writes the last one; one that is still being uploaded comes first
        if not (self._checkpoint_due and is_time) or progress.step >= section.num_steps or self._writer.is_uploading:
            return
        if holds_checkpoints(self._guards, progress.guards):
            log.warning("checkpoint_held_back", step=progress.step, reason="an alarm is on")
            return
        try:
            self._writer.write()
            self._checkpoint_due = self._checkpoint_failed = False
        except StoreUnavailableError as error:
            log.warning("checkpoint_failed", step=progress.step, error=str(error))
            self._checkpoint_due = self._checkpoint_failed = True

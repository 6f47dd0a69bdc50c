"""The training loop: one thread that steps, three that serve it.

    buffer --draw--> [prefetch] --batch--> [loop: screen -> gradients -> guards -> ack -> apply or skip] --> [publisher]
      ^                                             |                                 |            snapshot      |    |
      |<---------------- ack (lineage, step) -------+                                 +--checkpoint--> store <---+    |
      |<---------------- mark (sync), evaluation request -------------------------------------------------------------+
      |<---------------- heartbeat, every second [heartbeat thread]

    who            waits for                        name of the wait        deadline
    loop           the batch of its step            as the buffer says      trainer.batch_wait_s
    loop           a place for a snapshot           unpublished-versions    trainer.retry_s
    loop           the store, for a checkpoint      -                       store.timeout_s, then at the next sync
    loop (end)     the last checkpoint, the export  object-store            trainer.retry_s
    loop (end)     the evaluation of the result     final-evaluation        eval.timeout_s
    prefetch       permission to draw one more      -                       until the loop takes a batch
    publisher      a snapshot; store; buffer        -                       none: the loop's wait bounds it

Step N: what cannot be trained on is dropped from the batch (screening.py), gradients at the weights after step N - 1,
the verdict of the guards (guards.py), then the ack, then the update. An ack that is refused because the batch is void
costs one gradient; the ledger never names a step whose weights do not follow from it, because a crash between ack and
update is undone by the resume, which abandons entries after the checkpoint.

A skipped batch (an alarm, or nothing of it could be trained on) consumes its step: the weights and the optimizer stay
as they are, the schedules move on, the reference is reset or averaged when that is due, and its line of the ledger says
why. So every step stands in the ledger exactly once, and what is due at a step happens at that step.

How it ends: `num_steps` or `max_train_s` reached, or the run is stopping -> publish, checkpoint, evaluate, export,
`done`. SIGTERM at any moment before `done` -> finish the step, checkpoint, exit 143; the run stays as it is and can be
resumed. A newer lineage (FencedError) -> exit 3, nothing more is written. An alarm that rolls back -> this lineage ends
and `tba_trainer.run` starts the next one from the last checkpoint. An alarm that fails, or too many skipped batches ->
the run is marked failed; it can be resumed from its last checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tba.api import RunCommand
from tba.clients import BufferClient
from tba.config import Recipe
from tba.config.guards import REMEDIES
from tba.errors import FencedError, GuardError, RunFailedError, RunOverError, StoreUnavailableError, TbaError
from tba.logs import get_logger
from tba.store import ObjectStore
from tba.wire import Batch
from tba_trainer.acking import Acks
from tba_trainer.checkpoint import Checkpoints
from tba_trainer.ending import End, Ending
from tba_trainer.evaluations import Evaluations
from tba_trainer.guards import Rollback, Verdict, holds_checkpoints, look, suspects_weights
from tba_trainer.learner import Learner
from tba_trainer.prefetch import Prefetcher
from tba_trainer.progress import Progress
from tba_trainer.publisher import Publisher
from tba_trainer.saving import CheckpointSaver
from tba_trainer.screening import Needs, count_reasons, screen
from tba_trainer.snapshots import Snapshots
from tba_trainer.startup import Session
from tba_trainer.status import Status
from tba_trainer.tracking import Tracking
from tba_trainer.values import StepValues, Values

MAX_ON_POLICY_GAP = 0.05
"""Nats per token between trainer and sampler log-probs at policy age 0; more is logged: two models are in play."""
Metrics = dict[str, float | None]
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
        needs: Needs,
        values: Values,
        snapshots: Snapshots,
        publisher: Publisher,
        prefetcher: Prefetcher,
        evaluations: Evaluations,
        status: Status,
        tracking: Tracking,
        model_config_sha256: str,
        stop: threading.Event,
    ) -> None:
        self._recipe, self._session, self._buffer, self._learner = recipe, session, buffer, learner
        self._needs, self._values, self._snapshots, self._publisher = needs, values, snapshots, publisher
        self._prefetcher, self._evaluations, self._status, self._stop = prefetcher, evaluations, status, stop
        self._tracking = tracking
        self.progress = Progress(session)
        self._why_early: str | None = None
        """Why training ends before `num_steps`."""
        self._acks = Acks(buffer, session, batch_deadline_s=recipe.buffer.batch_deadline_s)
        self._saver = CheckpointSaver(
            recipe,
            session,
            self.progress,
            buffer=buffer,
            checkpoints=checkpoints,
            learner=learner,
            model_config_sha256=model_config_sha256,
        )
        self._ending = Ending(
            recipe,
            session,
            self.progress,
            buffer=buffer,
            store=store,
            saver=self._saver,
            submit=self._submit,
            publisher=publisher,
            evaluations=evaluations,
            status=status,
            stop=stop,
        )
        self._checkpoint_due = session.borrowed

    def run(self) -> Rollback | End:
        """Train to the end of the run, or until SIGTERM, or until an alarm rolls back.

        Returns:
            The rollback: training goes on from a checkpoint in a new lineage. Else how it ended.

        Raises:
            TbaError: one clear sentence; FencedError means that nothing more may be written.
        """
        self.progress.start_clock()
        self._status.set_state("training")
        self._status.set_version(self.progress.version)
        try:
            rollback = self._train()
        except GuardError as error:
            log.error("run_fails", step=self.progress.step, reason=str(error))
            command = RunCommand(reason=str(error), token=self._session.token)
            self._try("fail", lambda: self._buffer.command("fail", command))  # what is raised is why, in any case
            raise
        self._prefetcher.close()
        if rollback is not None:
            return rollback
        if self._stop.is_set():
            self._ending.leave()
            return "stopped"
        return self._ending.finish(self._why_early)

    def _train(self) -> Rollback | None:
        section, progress = self._recipe.trainer, self.progress
        while progress.step < section.num_steps and not self._stop.is_set():
            if section.max_train_s is not None and progress.train_s >= section.max_train_s:
                log.info("max_train_s_reached", step=progress.step, train_s=round(progress.train_s, 1))
                self._why_early = f"trainer.max_train_s ({section.max_train_s:g} s) is over"
                break
            try:
                verdict = self._one_step()
            except RunFailedError:  # the buffer has failed it: that must not end as a run that is done
                raise
            except RunOverError as error:
                log.info("run_is_over", step=progress.step, reason=str(error))
                self._why_early = str(error)
                break
            if verdict is None:
                continue
            if (rollback := self._react(verdict)) is not None:
                return rollback
            self._after_step()
        return None

    def _one_step(self) -> Verdict | None:
        """One optimizer step, used or skipped; None when it was not made (told to stop, or the batch had expired)."""
        progress, step, waited_s = self.progress, self.progress.step + 1, self._status.waited_s
        batch = self._prefetcher.take(step)
        if batch is None:
            return None
        waited_s, started = self._status.waited_s - waited_s, time.monotonic()
        batch = screen(batch, self._needs, lineages=self._session.lineages, trainer=progress.newest)
        # ages are taken when the batch is consumed, not when it was drawn
        ages = [self._session.lineages.policy_age(r.version, progress.newest) for r in batch.rollouts]
        values = self._values.at(step)
        metrics = self._gradients(batch, step, ages, values)
        verdict = look(self._recipe.trainer.guards, progress.guards, metrics)
        metrics = {
            "learning_rate": values.learning_rate,
            "beta": values.beta,
            **(metrics or {}),
            **{f"alarm_{alarm.name}": 1.0 for alarm in verdict.alarms},
            "skipped": float(verdict.skip is not None),
            "num_rollouts_refused": float(len(batch.refused)),
            "step_s": time.monotonic() - started,
            "wait_s": waited_s,
            "waited_s_total": self._status.waited_s,  # with the waits of refused acks and for places of snapshots
            "train_s": progress.train_s,
        }
        if not self._acks.ack(
            batch,
            step,
            metrics=metrics,
            policy_ages=ages,
            skipped=verdict.skip,
            settings_revision=self._values.revision,
        ):
            self._learner.discard()
            self._prefetcher.discard(step)
            return None
        if verdict.skip is None:
            self._learner.apply(step=step, lineage=self._session.lineage, values=values)
            progress.num_rollouts_trained += len(batch.rollouts)
        else:
            self._learner.skip(step=step, lineage=self._session.lineage)
        progress.step, progress.guards = step, verdict.state
        progress.settings_revision = self._values.revision
        self._status.set_step(progress.version, metrics)
        self._tracking.step(progress.version, metrics, skipped=verdict.skip)
        self._log_step(metrics, batch, verdict)
        return verdict

    def _gradients(self, batch: Batch, step: int, ages: list[int], values: StepValues) -> Metrics | None:
        """Metrics of the step; None when nothing of the batch can be trained on."""
        if not batch.groups:
            return None
        return self._learner.gradients(batch, step=step, policy_ages=ages, values=values)

    def _react(self, verdict: Verdict) -> Rollback | None:
        """Do what the alarms of the step say; a rollback ends this lineage.

        Raises:
            GuardError: the run has failed.
            FencedError: a newer lineage owns the run.
        """
        guards, reason = self._recipe.trainer.guards, f"step {self.progress.version}: {verdict.reason}"
        values, token = self._values, self._session.token
        if "lower_rate" in verdict.actions:
            self._try("lower_rate", lambda: values.lower_rate(guards.lower_rate_factor, token=token, reason=reason))
        if "raise_m" in verdict.actions:
            self._try("raise_m", lambda: values.raise_m(guards.raise_m_by, token=token, reason=reason))
        if "fail" in verdict.actions:
            raise GuardError(
                f"{reason}; that batch was not applied. {self._leave_suspect()}; consider a lower "
                "trainer.learning_rate or a larger objective.beta"
            )
        if "rollback" in verdict.actions:
            self._status.set_state("rolling-back")
            return self._rollback(reason)
        if "pause" in verdict.actions:
            command = RunCommand(reason=reason, token=self._session.token)
            self._try("pause", lambda: self._buffer.command("pause", command))
            self._prefetcher.discard(self.progress.step + 1)  # what was drawn ahead must wait for `tba resume` too
        return None

    def _leave_suspect(self) -> str:
        """From where the next start goes on, as a sentence without its end; not from suspect weights, if possible."""
        if suspects_weights(self._recipe.trainer.guards, self.progress.guards):
            try:
                return self._saver.leave_suspect()
            except FencedError:
                raise
            except TbaError as error:
                log.warning("action_failed", action="leave_suspect", step=self.progress.step, error=str(error))
        return self._saver.resume_point()

    def _rollback(self, reason: str) -> Rollback:
        saver, progress = self._saver, self.progress
        suspect = None if saver.is_proven else saver.saved
        log.warning("rolled_back", step=progress.step, reason=reason, suspect=suspect and str(suspect))
        return Rollback(
            guards=progress.guards,
            suspect=suspect,
            previous=saver.previous,
            last_good_step=progress.last_good_step,
            token=self._session.token,
        )

    def _try(self, action: str, do: Callable[[], object]) -> None:
        """An action that the run can go without."""
        try:
            result = do()
        except FencedError:
            raise
        except TbaError as error:
            log.warning("action_failed", action=action, step=self.progress.step, error=str(error))
        else:
            log.info("action", action=action, step=self.progress.step, **_number(result))

    def _after_step(self) -> None:
        section, progress = self._recipe.trainer, self.progress
        self._publisher.check()
        at_sync = progress.step % section.sync_interval == 0
        if at_sync and progress.step < section.num_steps:
            self._submit(self._evaluations.num_prompts_due(progress.step, every_steps=self._values.eval_every_steps))
        self._checkpoint_due |= progress.step % section.checkpoint_interval == 0
        if not self._checkpoint_due or progress.step == section.num_steps:
            return
        if holds_checkpoints(section.guards, progress.guards):
            log.warning("checkpoint_held_back", step=progress.step, reason="an alarm is on")
            return
        try:
            self._saver.save()
            self._checkpoint_due = False
        except StoreUnavailableError as error:
            log.warning("checkpoint_failed", step=progress.step, error=str(error))
            self._checkpoint_due = at_sync or progress.step % section.checkpoint_interval == 0

    def _submit(self, num_eval_prompts: int | None) -> None:
        progress = self.progress
        snapshot = self._snapshots.take(progress.version, progress.submitted)
        self._publisher.submit(snapshot, num_eval_prompts=num_eval_prompts)
        progress.submitted = progress.version

    def _log_step(self, metrics: Metrics, batch: Batch, verdict: Verdict) -> None:
        version = str(self.progress.version)
        shown = ("loss", "reward_mean", "policy_age_mean", "ess", "grad_norm", "step_s", "wait_s")
        numbers = {name: round(value, 4) for name in shown if (value := metrics.get(name)) is not None}
        log.info("step", version=version, **numbers, **({} if verdict.skip is None else {"skipped": verdict.skip}))
        if batch.refused:
            log.warning(
                "rollouts_refused", version=version, **count_reasons(batch.refused), first=batch.refused[0].detail
            )
        for alarm in verdict.alarms:
            remedy = REMEDIES[alarm.name]
            log.warning("alarm", version=version, name=alarm.name, action=alarm.action, what=alarm.text, do=remedy)
        gap = metrics.get("logprob_gap_on_policy")
        if gap is not None and gap > MAX_ON_POLICY_GAP:
            log.warning(
                "logprob_gap_on_policy",
                gap=round(gap, 4),
                limit=MAX_ON_POLICY_GAP,
                hint="at policy age 0 trainer and sampler log-probs must agree: same weights, same temperature?",
            )


def _number(result: object) -> dict[str, float]:
    return {"value": result} if isinstance(result, float) else {}

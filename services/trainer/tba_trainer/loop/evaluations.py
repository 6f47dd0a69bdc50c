"""Which versions are evaluated on held-out prompts, and when: the trainer asks, searchers evaluate."""

from __future__ import annotations

import threading
import time

from tba.api import EvalInfo, EvalRequest
from tba.clients import BufferClient
from tba.config.evaluation import EvalSection
from tba.errors import FencedError, RollbackError, TbaError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba_trainer.loop.status import Status

_POLL_S = 0.5
log = get_logger("evaluations")


class Evaluations:
    """Asks for the evaluations that are due, and waits for the last one."""

    def __init__(
        self,
        buffer: BufferClient,
        section: EvalSection,
        *,
        token: str,
        start_step: int,
        sync_interval: int,
        enabled: bool = True,
    ) -> None:
        self._buffer, self._section, self._token, self._enabled = buffer, section, token, enabled
        # an evaluation that was due at the last published version or before was requested then; one that became due
        # after it was not
        self._last_step = start_step - start_step % sync_interval

    def num_prompts_due(self, step: int, *, every_steps: int) -> int | None:
        """Return the number of held-out prompts for the version published at `step`; None: no evaluation is due.

        An evaluation is due if a multiple of `every_steps` is above the last call's `step` and at most this `step`.

        Args:
            step: a multiple of the sync interval, larger than in the last call.
            every_steps: the current interval of evaluations.
        """
        # Not `step % every_steps == 0`: versions are published every sync_interval steps, and may miss that multiple.
        due = step // every_steps > self._last_step // every_steps
        self._last_step = step
        return self._section.num_prompts if due else None

    def request(self, version: PolicyVersion, num_prompts: int) -> EvalInfo | None:
        """Ask for an evaluation of a published version. Return None if evaluations are off, or after a (logged) error.

        Args:
            num_prompts: number of held-out prompts, the first ones in upload order.

        Raises:
            FencedError: a newer lineage owns the run.
        """
        if not self._enabled:
            return None
        try:
            return self._buffer.request_eval(
                EvalRequest(version=str(version), token=self._token, num_prompts=num_prompts)
            )
        except FencedError:
            raise
        except TbaError as error:  # an evaluation is worth less than the run
            log.warning("evaluation_not_requested", version=str(version), error=str(error))
            return None

    def wait(self, evaluation: EvalInfo, status: Status, stop: threading.Event) -> None:
        """Wait for the last evaluation until it is done, `eval.timeout_s` has passed, or `stop` is set.

        Raises:
            RollbackError: an operator has asked for a rollback meanwhile.
        """
        deadline = time.monotonic() + self._section.timeout_s
        with status.named_wait("final-evaluation", self._section.timeout_s):
            while evaluation.state == "pending" and time.monotonic() < deadline and not stop.wait(_POLL_S):
                evaluation = self._buffer.get_eval(evaluation.eval_id)
                if (asked := self._buffer.run().rollback) is not None:  # these weights are given up
                    raise RollbackError(f"an operator has asked for a rollback to {asked.version}")
        found = evaluation.model_dump(
            include={"version", "state", "num_done", "num_prompts", "accuracy", "greedy_accuracy"}
        )
        if evaluation.state == "done":
            log.info("final_evaluation", **found)
        elif not stop.is_set():
            log.warning("final_evaluation_missing", **found)

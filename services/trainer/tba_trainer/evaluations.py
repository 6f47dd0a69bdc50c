"""Evaluations on held-out prompts: the trainer asks for them, searchers do them, nothing here blocks training.

A run without searchers has none.
"""

from __future__ import annotations

import threading
import time

from tba.api import EvalInfo, EvalRequest
from tba.clients import BufferClient
from tba.config.evaluation import EvalSection
from tba.errors import FencedError, TbaError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba_trainer.status import Status

_POLL_S = 0.5
log = get_logger("evaluations")


class Evaluations:
    """Decides when a version is evaluated, and asks the buffer for it.

    Args:
        token: of the lineage.
        start_step: step that this trainer starts from.
        sync_interval: steps between published versions. What became due after the last of them before `start_step`
            has not been asked for; what was due before has, and is not asked for again.
        enabled: False when nobody would do them.
    """

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
        self._last_step = start_step - start_step % sync_interval

    def num_prompts_due(self, step: int, *, every_steps: int) -> int | None:
        """Held-out prompts for the version published at `step`; None when no evaluation is due. Asking settles it.

        Args:
            every_steps: the interval as it is now; a multiple of it since the last time that this was asked is due.
        """
        due = step // every_steps > self._last_step // every_steps
        self._last_step = step
        return self._section.num_prompts if due else None

    @property
    def num_prompts_final(self) -> int:
        """Held-out prompts of the first and the last evaluation."""
        return self._section.num_prompts_final

    def request(self, version: PolicyVersion, num_prompts: int) -> EvalInfo | None:
        """Ask for an evaluation of a published version; a refusal is logged and training goes on.

        Raises:
            FencedError: a newer lineage owns the run.
        """
        if not self._enabled:
            return None
        try:
            return self._buffer.request_eval(
                EvalRequest(
                    version=str(version),
                    token=self._token,
                    num_prompts=num_prompts,
                    num_samples=self._section.num_samples,
                    pass_at=self._section.pass_at,
                    success_reward=self._section.success_reward,
                    timeout_s=self._section.timeout_s,
                )
            )
        except FencedError:
            raise
        except TbaError as error:
            log.warning("evaluation_not_requested", version=str(version), error=str(error))
            return None

    def wait(self, evaluation: EvalInfo, status: Status, stop: threading.Event) -> EvalInfo | None:
        """Wait for one evaluation, `eval.timeout_s` at most; what did not finish is logged, never invented.

        Returns:
            The finished evaluation; None when its time is over, or when `stop` is set.
        """
        deadline = time.monotonic() + self._section.timeout_s
        with status.waiting("final-evaluation", self._section.timeout_s):
            while evaluation.state == "pending" and time.monotonic() < deadline and not stop.wait(_POLL_S):
                evaluation = self._buffer.get_eval(evaluation.eval_id)
        if evaluation.state != "done":
            if stop.is_set():
                return None
            log.warning(
                "final_evaluation_missing",
                version=evaluation.version,
                state=evaluation.state,
                num_done=evaluation.num_done,
                num_prompts=evaluation.num_prompts,
            )
            return None
        log.info(
            "final_evaluation",
            version=evaluation.version,
            accuracy=evaluation.accuracy,
            greedy_accuracy=evaluation.greedy_accuracy,
        )
        return evaluation

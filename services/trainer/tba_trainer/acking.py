"""Acks: the statement that a step consumed its batch, used or skipped. It comes before the weights are touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tba.api import AckRequest
from tba.clients import BufferClient
from tba.errors import ConflictError, FencedError, RunOverError, TbaError, VoidBatchError
from tba.logs import get_logger
from tba.numbers import known
from tba.wire import Batch
from tba_trainer.screening import count_reasons
from tba_trainer.startup import Session

MAX_REFUSED_ACKS = 5
"""Batches in a row that may be void at their ack; more means that a step is slower than `batch_deadline_s`."""
log = get_logger("acking")


class Acks:
    """Acks the batches of one lineage.

    Args:
        batch_deadline_s: the setting, for the message.
    """

    def __init__(self, buffer: BufferClient, session: Session, *, batch_deadline_s: float) -> None:
        self._buffer, self._session, self._batch_deadline_s = buffer, session, batch_deadline_s
        self._num_refused = 0

    def ack(
        self,
        batch: Batch,
        step: int,
        *,
        metrics: Mapping[str, float | None],
        policy_ages: Sequence[int],
        skipped: str | None,
        settings_revision: int,
    ) -> bool:
        """Ack a batch; False when it was void: nothing of it may be applied, and another one is drawn for the step.

        Args:
            batch: screened.
            policy_ages: [N] of its rollouts, in optimizer steps.
            skipped: why the batch is not applied.
            settings_revision: of the live settings that the step was made with.

        Raises:
            FencedError, RunOverError: this trainer, or the run, is over.
            TbaError: too many void batches in a row; or the ledger knows another history.
        """
        request = AckRequest(
            lineage=self._session.lineage,
            step=step,
            token=self._session.token,
            metrics={name: known(value) for name, value in metrics.items()},
            policy_ages=list(policy_ages),
            settings_revision=settings_revision,
            skipped=skipped,
            refused=count_reasons(batch.refused),
        )
        try:
            self._buffer.ack(batch.batch_id, request)
        except (FencedError, RunOverError):
            raise
        except VoidBatchError as error:
            self._num_refused += 1
            log.warning("batch_void", step=step, batch_id=batch.batch_id, error=str(error))
            if self._num_refused >= MAX_REFUSED_ACKS:
                raise TbaError(
                    f"{self._num_refused} batches in a row were void before step {step} could use them ({error}); "
                    f"raise buffer.batch_deadline_s (now {self._batch_deadline_s:g} s) above the duration of a step"
                ) from None
            return False
        except ConflictError as error:
            raise TbaError(
                f"the ledger and this trainer disagree about step {step}: {error}; nothing was trained with this "
                "batch: start the trainer again, it goes on from the last checkpoint"
            ) from None
        self._num_refused = 0
        return True

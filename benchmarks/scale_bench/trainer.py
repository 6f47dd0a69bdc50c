"""A trainer without a model: draws a batch and acks it, step after step, publishes versions, asks for evaluations."""

from __future__ import annotations

import threading

from benchmarks.scale_bench.services import Services
from tba.api import AckRequest, BatchRequest, EvalRequest, LineageRequest, VersionRequest
from tba.errors import BusyError
from tba.versions import START, PolicyVersion

WAIT_S = 0.5
EVAL_PROMPTS = 8


class PretendTrainer(threading.Thread):
    """Runs until `over` is set.

    Args:
        step_s: seconds between two steps.
        sync_interval: steps between two versions.
    """

    def __init__(self, services: Services, *, step_s: float, sync_interval: int) -> None:
        super().__init__(daemon=True, name="pretend-trainer")
        self._services, self._step_s, self._sync_interval = services, step_s, sync_interval
        self._client = services.stack.client
        services.publish(START, None)
        self._lineage = self._client.new_lineage(LineageRequest(trainer_id="pretend", parent=str(START)))
        self._client.announce_version(VersionRequest(version=str(START), token=self._lineage.token))
        self.over = threading.Event()
        self.num_steps = 0
        self.num_versions = 1
        self.eval_ids: list[str] = []
        self._newest = START
        self.error: BaseException | None = None

    def run(self) -> None:
        """Step after step."""
        try:
            while not self.over.wait(self._step_s):
                if self._step(self.num_steps + 1):
                    self.num_steps += 1
                    if self.num_steps % self._sync_interval == 0:
                        self._publish()
        except BaseException as error:  # the verdict names it
            self.error = error

    def _step(self, step: int) -> bool:
        lineage = self._lineage
        request = BatchRequest(
            trainer_id="pretend", lineage=lineage.lineage, step=step, token=lineage.token, wait_s=WAIT_S
        )
        try:
            batch = self._client.draw_batch(request)
        except BusyError:
            return False
        ages = [0] * len(batch.rollouts)
        ack = AckRequest(lineage=lineage.lineage, step=step, token=lineage.token, policy_ages=ages)
        self._client.ack(batch.batch_id, ack)
        return True

    def _publish(self) -> None:
        version = PolicyVersion(self._lineage.lineage, self.num_steps)
        self._services.publish(version, self._newest)
        self._client.announce_version(VersionRequest(version=str(version), token=self._lineage.token))
        self._newest = version
        self.num_versions += 1
        if not self.eval_ids or self._client.get_eval(self.eval_ids[-1]).state != "pending":
            request = EvalRequest(version=str(version), token=self._lineage.token, num_prompts=EVAL_PROMPTS)
            self.eval_ids.append(self._client.request_eval(request).eval_id)

"""Training requests in flight whose rollouts would be too old when they arrive (`searcher.abort_stale_requests`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tba.config import Recipe
from tba.versions import PolicyVersion
from tba_searcher.engines.engine import Request
from tba_searcher.generation.engine_thread import StepResult
from tba_searcher.generation.visits import Visit, WorkQueue


class StaleRequests:
    """Follows every training request from its submission to its end: the version with which it began decides its age.

    Engines begin requests in the order of their submission, so those that wait are the last ones.
    """

    def __init__(self, recipe: Recipe, queue: WorkQueue) -> None:
        self._queue = queue
        self._max_age_steps = recipe.buffer.max_policy_age_steps if recipe.searcher.abort_stale_requests else None
        self._lag_steps = recipe.sampling.lag_steps
        self._began: dict[str, PolicyVersion | None] = {}
        """Request id -> version, in order of submission; None: it waits for a slot, and cannot become old."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Follow requests that the engine gets in its next step."""
        if self._max_age_steps is None:
            return
        for request in requests:
            visit = self._queue.visit_of(request.request_id)
            # an evaluation is about one version, however old that is
            if visit is not None and visit.pinned is None:
                self._began[request.request_id] = None

    def end(self, request_ids: Iterable[str]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            self._began.pop(request_id, None)

    def after_step(self, result: StepResult, version: PolicyVersion, num_waiting: int) -> None:
        """Note what a step with `version` has ended and begun: all but the last `num_waiting` requests."""
        self.end(completion.request_id for completion in result.completions)
        self.end(request.request_id for request, _ in result.rejected)
        request_ids = list(self._began)
        for request_id in request_ids[: max(0, len(request_ids) - num_waiting)]:
            # spans of later versions change nothing: policy age is measured from the oldest one
            self._began[request_id] = self._began[request_id] or version

    def visits(self, newest: PolicyVersion) -> list[Visit]:
        """Return the visits with a request whose rollout is too old already.

        The trainer is at `newest` or beyond; so many as `sampling.lag_steps` beyond once `newest` has moved on.
        Of another lineage it is not known here where it parted: the age is then the least that it can be.
        """
        limit = self._max_age_steps
        if limit is None:
            return []

        def least_age(began: PolicyVersion) -> int:
            has_moved_on = newest.lineage == began.lineage and newest.step > began.step
            return newest.step - began.step + (self._lag_steps if has_moved_on else 0)

        stale = [name for name, began in self._began.items() if began is not None and least_age(began) > limit]
        found = (self._queue.visit_of(name) for name in stale)
        return list({visit.lease.lease_id: visit for visit in found if visit is not None}.values())

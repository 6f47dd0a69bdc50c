"""A rehearsal of a faster or slower accelerator: engine and trainer are real and slowed down to the pace of given GPUs.

    searcher.engine   = studies.pace:paced_engine      an engine of one's own around the embedded one
    tracking.trackers = ["studies.pace:PacedTrainer"]  a tracker of one's own, which makes steps of the trainer longer
    TOKENS_VARIABLE, STEP_VARIABLE                     the two paces, in the environment of `tba run` (`paced`)

The model of the GPU: decoding is bound by the bandwidth of its memory, so one decode step gives one token to every
active request, and takes the same time however few there are. The pace of a searcher is its rate with all slots busy; a
step therefore takes num_slots / pace seconds, one request gets at most pace / num_slots tokens per second, and a lone
straggler holds up a round as long as it would on a GPU. Prompts cost nothing (their prefill is bound by arithmetic and
rides along with a step); loading weights takes the time that it really takes.

    real step |##|                    |###|                  |##############################|      (in this process)
    GPU's step|-- waits, asleep ------|-- waits, asleep -----|---- late: nothing to wait ---|
              ^ began                 ^ due: completions are handed out              due ^  ^ the schedule moves by this

A real engine that is slower than the pace must not be hidden: `Pace.late_s` is the time by which the schedule moved.
With more than a few percent of it the rehearsal says nothing about that GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from tba_searcher.engines.engine import Completion, Engine, EngineError, EngineSettings, Request, StagingEngine

from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire import Manifest

TOKENS_VARIABLE, STEP_VARIABLE = "STUDY_PACE_TOKENS_PER_S", "STUDY_PACE_STEP_S"
MAX_LATE_SHARE = 0.03
"""Where real engines or the trainer are behind their pace for more of the time, a rehearsal says nothing about the
rehearsed GPUs."""

MAX_SLEEP_S = 0.05
"""A call of `step` sleeps no longer, so that new weights, aborts and a drain never wait for a slow GPU's step."""
LOG_EVERY_S = 2.0
MAX_TAKE_S = 0.002
"""A trainer that takes a batch for longer has waited for it."""
_KEPT = re.compile(r"pace kept .*\bbusy_s=([0-9.e+-]+) late_s=([0-9.e+-]+)")
log = get_logger("pace")


def paced(*, tokens_per_s: float, step_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the changes of a recipe, by dotted key, and the variables that give a run these paces."""
    changes = {"searcher.engine": "studies.pace:paced_engine", "tracking.trackers": '["studies.pace:PacedTrainer"]'}
    return changes, {TOKENS_VARIABLE: str(tokens_per_s), STEP_VARIABLE: str(step_s)}


def late_share(logs: Path) -> float | None:
    """Return the share of the time in which the engines of a run were too late, as its logs say; None: no engine was
    paced."""
    found = (_KEPT.findall(path.read_text()) for path in sorted(logs.glob("searcher-*.log")))
    # searchers count from their start, so the last line is that of the run
    last = [(float(busy_s), float(late_s)) for *_, (busy_s, late_s) in filter(None, found)]
    busy_s = sum(busy_s for busy_s, _ in last)
    return sum(late_s for _, late_s in last) / busy_s if busy_s else None


def paced_engine(folder: Path, version: PolicyVersion, settings: EngineSettings) -> PacedEngine:
    """Build the embedded engine at the pace that the environment gives."""
    from tba_searcher.engines.torch.engine import EmbeddedEngine

    return PacedEngine(EmbeddedEngine(folder, version, settings), tokens_per_s=float(os.environ[TOKENS_VARIABLE]))


@dataclasses.dataclass(slots=True)
class Pace:
    """How well a paced engine keeps its pace."""

    tokens_per_s: float
    step_s: float
    """Seconds of one decode step of the rehearsed GPU."""
    busy_s: float = 0.0
    """Seconds of decode steps so far, late ones included."""
    late_s: float = 0.0
    """Seconds of these in which the real engine, or the loop around it, was slower than the pace."""

    @property
    def late_share(self) -> float:
        """Share of the busy time in which it was too late."""
        return self.late_s / self.busy_s if self.busy_s else 0.0


class PacedEngine:
    """Implements `tba_searcher.engines.engine.Engine` around another engine.

    A completion stays active until the step that decoded its last token is due. Weights may be loaded and requests
    aborted meanwhile; an abort forgets a completion that waits, too.

    Args:
        engine: decodes one token for every active request in a step.
        clock: returns seconds.
        sleep: called to let time pass.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        tokens_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._engine, self._clock, self._sleep = engine, clock, sleep
        self.pace = Pace(tokens_per_s, engine.num_slots / tokens_per_s)
        self._held: list[Completion] = []
        """Decoded, and not handed out before the step in progress is due."""
        self._due_s: float | None = None
        """When the step in progress ends; None: there is none."""
        self._last_due_s: float | None = None
        """When the last step ended, while the engine has had work since; None: it was idle."""
        self._logged_s = self._clock()

    @property
    def version(self) -> PolicyVersion:
        """The version of the weights in use."""
        return self._engine.version

    @property
    def default_eos_ids(self) -> tuple[int, ...]:
        """Those of the real engine."""
        return self._engine.default_eos_ids

    @property
    def num_slots(self) -> int:
        """Most requests that are active at once."""
        return self._engine.num_slots

    @property
    def num_active(self) -> int:
        """Requests that are being decoded now, those whose completion is held back included."""
        return min(self.num_slots, self._engine.num_active + len(self._held))

    @property
    def num_waiting(self) -> int:
        """Submitted requests that have no slot yet."""
        return self._engine.num_active + self._engine.num_waiting + len(self._held) - self.num_active

    @property
    def num_prefilled_tokens(self) -> int:
        """Those of the real engine."""
        return self._engine.num_prefilled_tokens

    def submit(self, request: Request) -> None:
        """Queue a request (see `Engine.submit`)."""
        # for the caller it is still being decoded
        if any(held.request_id == request.request_id for held in self._held):
            raise EngineError(f"request {request.request_id} is already being worked on")
        self._engine.submit(request)

    def abort(self, request_id: str) -> None:
        """Forget a request, also one whose completion is held back (see `Engine.abort`)."""
        self._held = [held for held in self._held if held.request_id != request_id]
        self._engine.abort(request_id)
        self._forget_idle()

    def step(self) -> list[Completion]:
        """Begin a step or wait for the one in progress; return its completions once it is due (see `Engine.step`).

        Returns nothing when the step is not due after `MAX_SLEEP_S`: call it again.
        """
        if self._due_s is None:
            if not self._engine.num_active + self._engine.num_waiting:
                return []
            began_s = self._began_s()
            self._held = self._engine.step()
            self._due_s = began_s + self.pace.step_s
            self.pace.busy_s += self.pace.step_s
        left_s = self._due_s - self._clock()
        if left_s > 0:
            self._sleep(min(left_s, MAX_SLEEP_S))
            if left_s > MAX_SLEEP_S:
                return []
        self._last_due_s, self._due_s = self._due_s, None
        now_s, held, self._held = time.time(), self._held, []
        self._forget_idle()
        self._log()
        # rollouts carry their times: on the rehearsed GPU they would have been finished now
        return [dataclasses.replace(completion, finished_at_s=now_s) for completion in held]

    def stage_weights(self, tensors_paths: Sequence[Path]) -> None:
        """Prepare weights, if the real engine can (see `StagingEngine`)."""
        if isinstance(self._engine, StagingEngine):
            self._engine.stage_weights(tensors_paths)

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Replace all parameters (see `Engine.load_weights`); it takes as long as it really takes."""
        began_s = self._clock()
        self._engine.load_weights(tensors_paths, version)
        self._shift(self._clock() - began_s)

    def verify(self, manifest: Manifest) -> None:
        """Check the loaded weights (see `Engine.verify`)."""
        began_s = self._clock()
        self._engine.verify(manifest)
        self._shift(self._clock() - began_s)

    def close(self) -> None:
        """Free everything (see `Engine.close`)."""
        self._held, self._due_s, self._last_due_s = [], None, None
        self._engine.close()

    def _began_s(self) -> float:
        """Return when the step that comes now begins on the GPU, and count what the real engine has lost."""
        now_s = self._clock()
        if self._last_due_s is None:
            return now_s
        # sleeps that took a little too long and hand-overs between threads are made up for by a shorter sleep
        behind_s = now_s - self._last_due_s
        if behind_s <= self.pace.step_s:
            return self._last_due_s
        self.pace.busy_s += behind_s
        self.pace.late_s += behind_s
        return now_s

    def _shift(self, seconds: float) -> None:
        """Let a step that is in progress go on after a change of weights, which holds up a GPU just so."""
        if self._due_s is not None:
            self._due_s += seconds
        elif self._last_due_s is not None:
            self._last_due_s += seconds

    def _forget_idle(self) -> None:
        """Begin a new schedule with the next request: a GPU without work is not late."""
        if not self.num_active + self.num_waiting:
            self._due_s = self._last_due_s = None

    def _log(self) -> None:
        if self._clock() - self._logged_s >= LOG_EVERY_S:
            self._logged_s = self._clock()
            log.info("pace kept", busy_s=round(self.pace.busy_s, 3), late_s=round(self.pace.late_s, 3))


class StepPace:
    """When the steps of a trainer end that takes `step_s` for each.

    Args:
        sleep: called to let time pass.
    """

    def __init__(
        self, step_s: float, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._step_s, self._clock, self._sleep = step_s, clock, sleep
        self._due_s: float | None = None
        """When the last step ended on the rehearsed GPU."""
        self._began_s = 0.0

    def begin(self, *, has_waited: bool) -> None:
        """Begin a step, which may have waited for its batch."""
        # a step without a wait for data begins with the end of the last one: the update and the copy for the publisher,
        # which come after the gradients, are part of it
        self._began_s = self._clock() if has_waited or self._due_s is None else self._due_s

    def end(self) -> float:
        """Sleep until the step would have ended; return by how much the real one was too late."""
        self._due_s = self._began_s + self._step_s
        late_s = self._clock() - self._due_s
        if late_s < 0:
            self._sleep(-late_s)
            return 0.0
        self._due_s += late_s  # what is late stays late: steps that catch up would be faster than the GPU
        return late_s


class PacedTrainer:
    """A tracker that records nothing: it is made in the process of the trainer, and lengthens its steps there.

    A tracker, because it leaves the recipe its objective. It wraps how the trainer takes a batch, and its gradients:
    they come before the ack, which ends the training phase of `sampling.alternate`.
    """

    name = "pace"

    def __init__(self, recipe: dict[str, Any]) -> None:
        from tba_trainer.learner.learner import Learner
        from tba_trainer.loop.batches import Prefetcher

        pace = StepPace(float(os.environ[STEP_VARIABLE]))
        take, gradients = Prefetcher.take, Learner.gradients

        @functools.wraps(take)
        def paced_take(prefetcher: Prefetcher, step: int) -> Any:
            asked_s = time.monotonic()
            batch = take(prefetcher, step)
            pace.begin(has_waited=time.monotonic() - asked_s > MAX_TAKE_S)
            return batch

        @functools.wraps(gradients)
        def paced_gradients(learner: Learner, *args: Any, **keywords: Any) -> dict[str, float | None]:
            metrics = gradients(learner, *args, **keywords)
            return {**metrics, "pace_late_s": pace.end()}

        prefetchers, learners = cast("Any", Prefetcher), cast("Any", Learner)
        prefetchers.take, learners.gradients = paced_take, paced_gradients
        log.warning("this is a rehearsal", step_s=os.environ[STEP_VARIABLE])

    def start(self, record: Any) -> None:
        """Do nothing."""

    def log(self, record: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

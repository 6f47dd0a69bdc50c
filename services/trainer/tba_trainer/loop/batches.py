"""The batches of the steps: drawn from the buffer ahead of time, then filtered.

    loop     take(step)      waits for the batch of its step; the wait has the name of what the buffer waits for
    thread   draws           at most `ahead` steps beyond the one that the loop asked for, with long polls, until the
                             buffer gives a batch or an error ends it
    loop     filter_batch    refuses rollouts, each with a reason that is counted

The wire has checked every rollout by itself (tba.wire.decode_batch). The filter checks what only the trainer knows: the
model's vocabulary and length, the versions that exist, the needs of the objective. A refused rollout takes the rest of
its group with it only if a single rollout would be left.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from tba.api import BatchRequest
from tba.clients import BufferClient
from tba.config import Recipe
from tba.errors import BusyError, TbaError, WaitTimeoutError, WireError
from tba.logs import get_logger
from tba.versions import START, LineageTree, PolicyVersion
from tba.wire import Batch, Refusal, Rollout
from tba_trainer.loop.status import Session, Status

LONG_POLL_S = 5.0
MAX_DAMAGED = 5
"""Damaged answers in a row that end the trainer: buffer and trainer are then of different releases."""
_DAMAGED_PAUSE_S = 0.2
_TICK_S = 0.1
PAUSED = "run-paused"
MAX_ABS_REWARD = 1e9
"""Larger rewards are refused: in float32 a KL of some nats is lost beside them, and sums of squares may overflow."""
MIN_SAMPLER_LOGPROB = -1000.0
"""Lowest plausible log-prob of a sampled token, in nats. A rollout with a lower one cannot have been sampled."""
REASON = re.compile("[a-z][a-z0-9_-]{0,31}")
MAX_FAILED_REASONS = 8
"""Most reasons of failed scores with a metric of their own, the commonest."""
log = get_logger("prefetch")


def draw_batch(buffer: BufferClient, session: Session, step: int, wait_s: float) -> Batch:
    """Draw the batch of a step for a lineage; the buffer may wait `wait_s` for it."""
    request = BatchRequest(
        trainer_id=session.trainer_id, lineage=session.lineage, step=step, token=session.token, wait_s=wait_s
    )
    return buffer.draw_batch(request)


class Prefetcher:
    """Draws the batches of steps `first_step`, `first_step + 1`, ... in order.

    Args:
        draw: draws the batch of a step; the buffer may wait some seconds. Raises the errors of BufferClient.draw_batch.
        status: shows the wait for a batch.
        first_step: the step that the loop makes first.
        last_step: nothing is drawn beyond it.
        ahead: number of steps beyond the current one to draw for.
        batch_wait_s: deadline of the wait for one batch, without the time in which the run is paused.
        batch_deadline_s: seconds from the draw until the buffer voids a batch.
        stop: set when the process should end.
    """

    def __init__(
        self,
        draw: Callable[[int, float], Batch],
        *,
        status: Status,
        first_step: int,
        last_step: int,
        ahead: int,
        batch_wait_s: float,
        batch_deadline_s: float,
        stop: threading.Event,
    ) -> None:
        self._draw, self._status, self._stop = draw, status, stop
        self._last_step, self._ahead = last_step, ahead
        self._batch_wait_s, self._batch_deadline_s = batch_wait_s, batch_deadline_s
        self._changed = threading.Condition()
        self._next_step = first_step
        self._requested_step = first_step
        self._round = 0
        """Counts `discard`; a batch that was drawn in an older round is dropped."""
        self._ready: dict[int, tuple[Batch, float]] = {}  # step -> batch, monotonic time after which it is void
        self._error: Exception | None = None
        self._wait_name = "batch"
        self.num_damaged = 0
        """Answers so far that could not be decoded as a batch."""
        self._num_damaged_in_row = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop drawing. Do not wait for a long poll in progress, which ends by itself."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()

    def take(self, step: int) -> Batch | None:
        """Wait for the batch of `step`, and return it; None: the process was told to stop.

        Raises:
            WaitTimeoutError: no batch within `batch_wait_s`.
            RunOverError, FencedError, RollbackError, ServiceError: the error that ended the thread.
        """
        batch = self._poll(step, timeout_s=0.0)
        if batch is not None:  # the usual case: it was drawn during the step before, and no wait is reported
            return batch
        name, since = self._wait_name, time.monotonic()
        with self._status.named_wait(name, self._batch_wait_s):
            while not self._stop.is_set():
                batch = self._poll(step, timeout_s=_TICK_S)
                if batch is not None:
                    return batch
                if self._wait_name == PAUSED:  # the time in which the run is paused does not count
                    since = time.monotonic()
                # The buffer may name several waits one after another (rollouts, then rewards): all share one deadline.
                left_s = self._batch_wait_s - (time.monotonic() - since)
                if self._wait_name != name:
                    name = self._wait_name
                    self._status.begin_wait(name, left_s)
                if left_s <= 0:
                    raise WaitTimeoutError(
                        f"no batch for step {step} within {self._batch_wait_s:g} s: the wait is {name!r}; check that "
                        "searchers run and that rewards arrive (`tba status`), or raise trainer.batch_wait_s"
                    )
        return None

    def discard(self, step: int) -> None:
        """Forget every batch drawn so far and draw again from `step` on."""
        with self._changed:
            # a draw may be under way, and its thread cannot be interrupted: the round tells it that its batch is stale
            self._round += 1
            self._ready.clear()
            self._next_step = self._requested_step = step
            self._changed.notify_all()

    def _poll(self, step: int, timeout_s: float) -> Batch | None:
        with self._changed:
            self._requested_step = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: step in self._ready or self._error is not None, timeout=timeout_s)
            # A batch comes before an error: what was drawn may still be trained on.
            batch, void_after = self._ready.pop(step, (None, 0.0))
            if batch is None and self._error is not None:
                raise self._error
        # measured on this machine's clock from the end of the draw: its ack would be refused, so it is not used at all
        if batch is not None and void_after <= time.monotonic():
            self.discard(step)
            return None
        return batch

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._changed:
                # no further ahead: while a batch waits, its rollouts grow older and its deadline runs
                self._changed.wait_for(
                    lambda: (
                        self._closed.is_set()
                        or self._next_step <= min(self._requested_step + self._ahead, self._last_step)
                    )
                )
                step, drawn_in_round = self._next_step, self._round
            if self._closed.is_set():
                return
            try:
                batch = self._draw(step, LONG_POLL_S)
            except BusyError as error:  # no batch yet; the buffer names what it waits for
                self._wait_name = error.wait
                self._closed.wait(min(error.retry_after_s, 1.0))  # not `sleep`: `close` must not wait for this
                continue
            except WireError as error:  # to ask for the same step again gives the same batch
                self.num_damaged += 1
                self._num_damaged_in_row += 1
                log.warning("batch_damaged", step=step, num_in_row=self._num_damaged_in_row, error=str(error))
                self._closed.wait(_DAMAGED_PAUSE_S)
                if self._num_damaged_in_row < MAX_DAMAGED:
                    continue
                self._fail(
                    TbaError(
                        f"{MAX_DAMAGED} answers in a row to the request for the batch of step {step} were not a batch "
                        f"({error}); run the same tba release on every service, and start the trainer again"
                    )
                )
                return
            except Exception as error:  # this thread must not die silently: the loop would wait until its deadline
                self._fail(error if isinstance(error, TbaError) else TbaError(f"drawing a batch failed: {error}"))
                return
            self._num_damaged_in_row = 0
            with self._changed:
                self._wait_name = "batch"
                if drawn_in_round == self._round:  # else `discard` came while this batch was on its way
                    self._ready[step] = (batch, time.monotonic() + self._batch_deadline_s)
                    self._next_step = step + 1
                    self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Make the loop raise an error at its next call."""
        with self._changed:
            self._error = error
            self._changed.notify_all()


GROUP_OF_ONE = Refusal("group-of-one", "no other rollout of its group is left to compare it with")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Properties that every rollout must have to be trained on."""

    vocab_size: int
    max_tokens: int | None
    """Most tokens of one sequence, prompt included, of model and recipe; None: neither has a limit."""
    ref_logprobs: bool
    """Rollouts must carry the starting model's log-prob, because the trainer computes none."""
    min_group: int
    """Fewest rollouts of a group."""

    @classmethod
    def of(cls, recipe: Recipe, model: Any) -> Requirements:
        """Return the requirements of a policy and of the recipe's objective."""
        section, searcher = recipe.objective, recipe.searcher
        limits = [getattr(model.config.get_text_config(), "max_position_embeddings", None)]
        # the buffer refuses pushes of longer ones; those of a snapshot were made with the limits of another recipe
        if recipe.run.snapshot is None:
            limits.append(searcher.max_prompt_tokens + searcher.max_response_tokens)
        return cls(
            vocab_size=int(model.get_input_embeddings().num_embeddings),
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            ref_logprobs=section.needs_reference and section.reference_placement == "searcher",
            # every other objective compares the rollouts of a group with each other; groups of one are its own choice
            min_group=1 if section.preset == "reinforce" or recipe.sampling.group_size == 1 else 2,
        )


def filter_batch(batch: Batch, required: Requirements, *, lineages: LineageTree, trainer: PolicyVersion) -> Batch:
    """Return the batch without the rollouts that cannot be trained on; they join its `refused`.

    Args:
        required: requirements of the model and the objective.
        lineages: all lineages of the run.
        trainer: version of the current weights; rollouts of later versions are refused.
    """
    parents, groups, refused = lineages.parents, [], list(batch.refused)
    for group in batch.groups:
        found = [_check(rollout, group.prompt_id, required, parents, trainer) for rollout in group.rollouts]
        kinds = [_environment(rollout) for rollout in group.rollouts]
        wanted = next((kind for kind, refusal in zip(kinds, found, strict=True) if refusal is None), "")
        for at, kind in enumerate(kinds):
            if kind != wanted and found[at] is None:
                found[at] = Refusal("environment", f"it is of {kind}, and its group of {wanted}; they are not compared")
        if found.count(None) < required.min_group:
            found = [refusal or GROUP_OF_ONE for refusal in found]
        good = []
        for rollout, refusal in zip(group.rollouts, found, strict=True):
            if refusal is None:
                good.append(rollout)
            else:
                detail = f"rollout {rollout.rollout_id.hex()} of prompt {group.prompt_id!r}: {refusal.detail}"
                refused.append(Refusal(refusal.reason, detail))
        if good:
            groups.append(replace(group, rollouts=tuple(good)))
    return replace(batch, groups=tuple(groups), refused=tuple(refused))


def _environment(rollout: Rollout) -> str:
    episode = rollout.episode
    return "no environment" if episode is None else f"environment {episode.environment!r} {episode.environment_version}"


def batch_counts(batch: Batch) -> dict[str, float]:
    """Return metrics of what the buffer says about a batch: slots that wanted recent data, and scores that failed."""
    fallback = sum(group.fallback for group in batch.groups) / max(1, len(batch.groups))
    known = {reason: num for reason, num in batch.scores_failed.items() if REASON.fullmatch(reason)}
    # a scorer's own words are no name of a metric
    failed = dict(list(known.items())[:MAX_FAILED_REASONS])
    if rest := sum(batch.scores_failed.values()) - sum(failed.values()):
        failed["other"] = failed.get("other", 0) + rest
    return {"fallback_share": fallback} | {f"scores_failed/{reason}": float(num) for reason, num in failed.items()}


def count_reasons(refused: Iterable[Refusal]) -> dict[str, int]:
    """Count rollouts by reason, in alphabetical order."""
    return dict(sorted(Counter(item.reason for item in refused).items()))


def _check(
    rollout: Rollout,
    prompt_id: str,
    required: Requirements,
    parents: Mapping[int, PolicyVersion],
    trainer: PolicyVersion,
) -> Refusal | None:
    """Return why a rollout cannot be trained on; None: it can."""
    if rollout.prompt_id != prompt_id:
        return Refusal("prompt", f"it names prompt {rollout.prompt_id!r}")
    if rollout.reward is None:
        return Refusal("no-reward", f"its reward is {rollout.reward} (status {rollout.reward_status!r})")
    # finite, but one such reward would turn the group's mean, and with it every A_j of the group, into rounding errors
    if abs(rollout.reward) > MAX_ABS_REWARD:
        return Refusal(
            "reward-size", f"its reward is {rollout.reward:g}, beyond +-{MAX_ABS_REWARD:g}: scale the reward"
        )
    # an embedding that is asked for such an id would raise, or on a GPU end the process with a device assertion
    highest = int(max(sequence.tokens.max() for sequence in rollout.sequences))
    if highest >= required.vocab_size:
        text = f"token id {highest} is outside the model's vocabulary of {required.vocab_size}"
        return Refusal("vocabulary", f"{text}; searchers and trainer must use the same model")
    num_tokens = max(len(sequence.tokens) for sequence in rollout.sequences)
    if required.max_tokens is not None and num_tokens > required.max_tokens:
        return Refusal("too-long", f"{num_tokens} tokens in one sequence, model and recipe allow {required.max_tokens}")
    lowest = float(rollout.sampler_logprobs.min())
    if lowest < MIN_SAMPLER_LOGPROB:
        return Refusal("sampler-logprob", f"a sampler log-prob is {lowest:g}: no sampler draws such a token")
    if required.ref_logprobs and (rollout.ref_logprob is None or rollout.ref_logprob.version != START):
        text = "it has no ref log-prob of the starting model, which searchers compute in this run"
        return Refusal("ref-logprob", f'{text} (objective.reference_placement = "searcher")')
    for span in rollout.version_spans:
        version = span.version
        start = START if version.lineage == 0 else parents.get(version.lineage)
        # A version past the end of a dead lineage passes: where that lineage ended is not known here. Lineage 0 has one
        # version, the starting model.
        if start is None or version.step < start.step or (version.lineage == 0 and version != START):
            return Refusal("unknown-version", f"no trainer start of this run made version {version}")
        if version.lineage == trainer.lineage and version.step > trainer.step:
            return Refusal("future-version", f"version {version} comes after the trainer's own, {trainer}")
    return None

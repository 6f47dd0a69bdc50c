"""The simulated engine: takes the time that a real one would, holds no model, and makes responses up.

It stands in for an engine wherever everything else is to be real: fleets of hundreds of searchers on one machine, and
rehearsals of a deployment (`searcher.engine = "simulated"`). No torch. Time passes within `step` alone, as it does for
an engine that decodes: what the loop takes between two steps is lost.

Lengths, tokens and log-probs are a function of the seed and the request id (of the request's own seed and prompt where
it has a seed), so that nothing depends on the order in which requests arrive. End of sequence ends a response that fits
its limit; stop strings never come up.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tba.config.simulated import SimulatedSection
from tba.errors import DigestError
from tba.versions import PolicyVersion
from tba.weights.digest import params_sha256_of_files
from tba.wire import Manifest, VersionSpan
from tba_searcher.engines.base import Completion, EngineDiedError, Request, check_request
from tba_searcher.simulated_text import Vocabulary

MEAN_NATS = 1.0
"""Of the made-up log-prob of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """What the engine needs besides the files of the version."""

    num_slots: int
    max_prompt_tokens: int
    max_response_tokens: int
    seed: int
    """Of everything that is random here."""
    behaviour: SimulatedSection


def vanish() -> None:
    """End this process without a word, as when its machine is taken away."""
    os.kill(os.getpid(), signal.SIGKILL)


class SimulatedEngine:
    """Implements `tba_searcher.engines.base.Engine`.

    Args:
        folder: the version's files: `config.json` and what `tensors_paths` names.
        sleep: lets time pass.
        clock: seconds, for crashes and preemptions.
        preempt: called when the simulated machine is taken away.

    Raises:
        ConfigError: `config.json` names no vocabulary.
    """

    def __init__(
        self,
        folder: Path,
        tensors_paths: Sequence[Path],
        version: PolicyVersion,
        settings: SimulatedSettings,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        preempt: Callable[[], None] = vanish,
    ) -> None:
        self._settings, self._behaviour = settings, settings.behaviour
        self._sleep, self._clock, self._preempt = sleep, clock, preempt
        self._vocabulary = Vocabulary.of_folder(folder)
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []
        self._ids: set[str] = set()
        self._version, self._params_sha256 = version, params_sha256_of_files(tensors_paths)
        sleep(self._behaviour.start_s)
        rng, now = np.random.default_rng(settings.seed), clock()
        self._crash_at_s = _moment(rng, now, self._behaviour.crash_every_s)
        self._preempt_at_s = _moment(rng, now, self._behaviour.preempt_every_s)

    @property
    def version(self) -> PolicyVersion:
        """The version of the files in use."""
        return self._version

    @property
    def default_eos_ids(self) -> tuple[int, ...]:
        """The end of sequence that `config.json` names, or else the last id of its vocabulary."""
        return self._vocabulary.eos_ids

    @property
    def num_slots(self) -> int:
        """Completions decoded at once."""
        return self._settings.num_slots

    @property
    def num_active(self) -> int:
        """Completions being decoded now."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Submitted requests that have no slot yet."""
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        """Requests that could be submitted now and decoded in the next step."""
        return max(0, self.num_slots - self.num_active - self.num_waiting)

    def submit(self, request: Request) -> None:
        """Queue a request (see `Engine.submit`)."""
        check_request(request, self._settings, is_known=request.request_id in self._ids)
        self._ids.add(request.request_id)
        self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request (see `Engine.abort`)."""
        if request_id in self._ids:
            self._ids.discard(request_id)
            self._rows = [row for row in self._rows if row.request.request_id != request_id]
            self._waiting = deque(item for item in self._waiting if item.request_id != request_id)

    def step(self) -> list[Completion]:
        """Refill, let time pass for `tokens_per_step` tokens of every row, return what finished (see `Engine.step`)."""
        self._suffer()
        while self._waiting and len(self._rows) < self.num_slots:
            self._rows.append(self._begin(self._waiting.popleft()))
        if not self._rows:
            return []
        num_tokens = min(self._behaviour.tokens_per_step, max(row.num_left for row in self._rows))
        self._sleep(num_tokens / self._tokens_per_s())
        for row in self._rows:
            row.num_done += min(num_tokens, row.num_left)
        finished = [row for row in self._rows if not row.num_left]
        self._rows = [row for row in self._rows if row.num_left]
        self._ids.difference_update(row.request.request_id for row in finished)
        return [row.completion() for row in finished]

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Read the files and let time pass; active rows go on in a new span (see `Engine.load_weights`)."""
        self._params_sha256 = params_sha256_of_files(tensors_paths)
        self._sleep(self._behaviour.load_s)
        self._version = version
        for row in self._rows:
            row.span_starts[row.num_done] = version

    def verify(self, manifest: Manifest) -> None:
        """Compare the digest of the files' tensors with the published one; there is no model for a canary.

        Raises:
            DigestError
        """
        if self._params_sha256 != manifest.params_sha256:
            raise DigestError(
                f"weight version {manifest.version}: the files hold parameters with sha256 {self._params_sha256}, "
                f"published were {manifest.params_sha256}; this version is not used"
            )

    def close(self) -> None:
        """Forget every request."""
        self._rows, self._ids = [], set()
        self._waiting.clear()

    def _suffer(self) -> None:
        """Crash or vanish, when it is time for it."""
        now = self._clock()
        if self._preempt_at_s is not None and now >= self._preempt_at_s:
            self._preempt()
        if self._crash_at_s is not None and now >= self._crash_at_s:
            raise EngineDiedError(
                "the simulated engine crashed, as searcher.simulated.crash_every_s = "
                f"{self._behaviour.crash_every_s:g} asks for"
            )

    def _tokens_per_s(self) -> float:
        """Of one row, with as many rows as there are."""
        one, all_slots = self._behaviour.tokens_per_s, self._behaviour.batch_tokens_per_s
        return one if all_slots is None else min(one, all_slots / len(self._rows))

    def _begin(self, request: Request) -> _Row:
        """Decide what the response will be."""
        seed = request.sampling.seed
        source = f"{self._settings.seed}|{request.request_id}" if seed is None else f"{seed}|{request.prompt_tokens}"
        rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(source.encode(), digest_size=16).digest(), "big"))
        length = max(draw_length(rng, self._behaviour), request.min_response_tokens, 1)
        ends = length <= request.max_response_tokens and bool(request.eos_ids)
        tokens = self._vocabulary.draw(rng, min(length, request.max_response_tokens))
        if ends:
            tokens[-1] = request.eos_ids[0]
        logprobs = -rng.exponential(MEAN_NATS, size=len(tokens)).astype(np.float32)
        return _Row(request, tokens, logprobs, "stop" if ends else "length", {0: self._version}, time.time())


@dataclass(slots=True)
class _Row:
    """One response on its way: what it will be, and how far it is."""

    request: Request
    tokens: NDArray[np.int32]
    """[R]."""
    logprobs: NDArray[np.float32]
    """[R]."""
    finish_reason: str
    span_starts: dict[int, PolicyVersion]
    """First token -> the version that makes it and what follows."""
    started_at_s: float
    num_done: int = 0

    @property
    def num_left(self) -> int:
        """Tokens still to come."""
        return len(self.tokens) - self.num_done

    def completion(self) -> Completion:
        """The finished row as a value."""
        starts = sorted(self.span_starts)
        ends = [*starts[1:], len(self.tokens)]
        return Completion(
            request_id=self.request.request_id,
            response_tokens=self.tokens,
            sampler_logprobs=self.logprobs,
            sampling=self.request.sampling,
            finish_reason=self.finish_reason,
            version_spans=tuple(
                VersionSpan(version=self.span_starts[start], start=start, end=end)
                for start, end in zip(starts, ends, strict=True)
            ),
            started_at_s=self.started_at_s,
            finished_at_s=time.time(),
        )


def draw_length(rng: np.random.Generator, behaviour: SimulatedSection) -> int:
    """Tokens of a response, before any limit; at least 1."""
    median = behaviour.median_response_tokens
    match behaviour.lengths:
        case "fixed":
            length = median
        case "lognormal":
            length = median * np.exp(behaviour.lognormal_sigma * rng.standard_normal())
        case "pareto":
            length = median * (2 * (1 - rng.random())) ** (-1 / behaviour.pareto_tail)
    return max(1, round(min(length, 1e9)))


def _moment(rng: np.random.Generator, now_s: float, mean_s: float | None) -> float | None:
    """When something with this mean distance happens next."""
    distance_s = rng.exponential()  # drawn in any case: one rate does not change the moments of the other
    return None if mean_s is None else now_s + mean_s * distance_s

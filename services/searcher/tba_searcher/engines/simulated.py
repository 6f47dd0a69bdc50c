"""The simulated engine: takes the time that a real one would, holds no model, and makes up responses.

It replaces an engine where everything else is to be real: hundreds of searchers on one machine, and rehearsals of a
deployment (`searcher.engine = "simulated"`). It needs no torch. Time passes only within `step`, as in an engine that
decodes: the time that the loop takes between two steps is lost.

Lengths, tokens and log-probs are a function of the seed and the request id (of the request's own seed and prompt where
it has a seed), so that nothing depends on the order in which requests arrive. A response that fits its limit ends with
end of sequence; stop strings never come up. Its text has about four characters a token. Token ids are valid for the
run's real model, so that a trainer accepts them, and mean nothing to it.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tba.config.searcher import SimulatedSection
from tba.errors import ConfigError, DigestError
from tba.versions import PolicyVersion
from tba.weights import params_sha256_of_files
from tba.weights.publishing import MODEL_CONFIG_NAME
from tba.wire import Manifest, VersionSpan
from tba_searcher.engines.engine import Completion, EngineDiedError, Request, check_request

MEAN_NATS = 1.0
"""Mean of the negative made-up log-prob of a token."""
CHARS_PER_TOKEN = 4
LENGTH_SIGMA = 0.8
"""Standard deviation of the logarithm of a response's length."""
TOKENS_PER_STEP = 16
"""Tokens of each row that one step decodes; requests and weights wait for the step to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSettings:
    """Settings of the engine."""

    num_slots: int
    max_prompt_tokens: int
    max_response_tokens: int
    seed: int
    """Seeds everything that is random here."""
    behaviour: SimulatedSection


class SimulatedEngine:
    """Implements `tba_searcher.engines.engine.Engine`.

    Args:
        folder: the version's files: `config.json` and those of `tensors_paths`.
        sleep: called to let time pass.
        clock: returns seconds, for crashes.

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
    ) -> None:
        self._settings, self._behaviour = settings, settings.behaviour
        self._sleep, self._clock = sleep, clock
        self._vocabulary = Vocabulary.of_folder(folder)
        self._waiting: deque[Request] = deque()
        self._active: list[_ActiveRequest] = []
        self._ids: set[str] = set()
        # the tensors are read as a real engine reads them: a rehearsal has to show damaged files and slow disks
        self._version, self._params_sha256 = version, params_sha256_of_files(tensors_paths)
        sleep(self._behaviour.start_s)
        lived = np.random.default_rng(settings.seed).exponential()
        every_s = self._behaviour.crash_every_s
        self._crash_at_s = None if every_s is None else clock() + every_s * lived

    @property
    def version(self) -> PolicyVersion:
        """The version of the files in use."""
        return self._version

    @property
    def default_eos_ids(self) -> tuple[int, ...]:
        """The end-of-sequence ids of `config.json`, or else the last id of its vocabulary."""
        return self._vocabulary.eos_ids

    @property
    def num_slots(self) -> int:
        """Most requests that are active at once."""
        return self._settings.num_slots

    @property
    def num_active(self) -> int:
        """Requests that are being decoded now."""
        return len(self._active)

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

    def abort(self, request_id: str) -> int:
        """Forget a request (see `Engine.abort`)."""
        if request_id not in self._ids:
            return 0
        self._ids.discard(request_id)
        num_lost = sum(active.num_done for active in self._active if active.request.request_id == request_id)
        self._active = [active for active in self._active if active.request.request_id != request_id]
        self._waiting = deque(item for item in self._waiting if item.request_id != request_id)
        return num_lost

    def step(self) -> list[Completion]:
        """Let time pass for `TOKENS_PER_STEP` tokens of every active request (see `Engine.step`)."""
        self._crash()
        while self._waiting and len(self._active) < self.num_slots:
            self._active.append(self._begin(self._waiting.popleft()))
        if not self._active:
            return []
        # never past the end of the longest request: time would pass in which nothing is decoded
        num_tokens = min(TOKENS_PER_STEP, max(active.num_left for active in self._active))
        self._sleep(num_tokens / self._behaviour.tokens_per_s)
        for active in self._active:
            active.num_done += min(num_tokens, active.num_left)
        finished = [active for active in self._active if not active.num_left]
        self._active = [active for active in self._active if active.num_left]
        self._ids.difference_update(active.request.request_id for active in finished)
        return [active.completion() for active in finished]

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Read the files (see `Engine.load_weights`)."""
        self._params_sha256 = params_sha256_of_files(tensors_paths)
        self._version = version
        for active in self._active:
            # a second load before the next token replaces the first: no span is empty
            active.span_starts[active.num_done] = version

    def verify(self, manifest: Manifest) -> None:
        """Compare the digest of the files' tensors with the published one (see `Engine.verify`)."""
        # there is no model that could compute the canary
        if self._params_sha256 != manifest.params_sha256:
            raise DigestError(
                f"weight version {manifest.version}: the files hold parameters with sha256 {self._params_sha256}, "
                f"the published ones have {manifest.params_sha256}; this version is not used"
            )

    def close(self) -> None:
        """Forget all requests (see `Engine.close`)."""
        self._active, self._ids = [], set()
        self._waiting.clear()

    def _crash(self) -> None:
        """Crash when the time for it has come."""
        if self._crash_at_s is not None and self._clock() >= self._crash_at_s:
            raise EngineDiedError(
                "the simulated engine crashed, as searcher.simulated.crash_every_s = "
                f"{self._behaviour.crash_every_s:g} asks for"
            )

    def _begin(self, request: Request) -> _ActiveRequest:
        """Make up the response to a request."""
        # the id alone decides, so that the order in which requests arrive does not matter
        seed = request.sampling.seed
        source = f"{self._settings.seed}|{request.request_id}" if seed is None else f"{seed}|{request.prompt_tokens}"
        rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(source.encode(), digest_size=16).digest(), "big"))
        # drawn before the limits, so that a lower limit cuts responses off instead of changing all of them
        length = max(draw_length(rng, self._behaviour.median_response_tokens), request.min_response_tokens, 1)
        ends = length <= request.max_response_tokens and bool(request.eos_ids)
        tokens = self._vocabulary.draw(rng, min(length, request.max_response_tokens))
        if ends:
            tokens[-1] = request.eos_ids[0]
        logprobs = -rng.exponential(MEAN_NATS, size=len(tokens)).astype(np.float32)
        return _ActiveRequest(request, tokens, logprobs, "stop" if ends else "length", {0: self._version}, time.time())


@dataclass(slots=True)
class _ActiveRequest:
    """A request that is being decoded: its whole response, and how many tokens of it are done."""

    request: Request
    tokens: NDArray[np.int32]
    """[R]."""
    logprobs: NDArray[np.float32]
    """[R]."""
    finish_reason: str
    span_starts: dict[int, PolicyVersion]
    """Index of a token -> the version that samples it and those after it."""
    started_at_s: float
    num_done: int = 0

    @property
    def num_left(self) -> int:
        """Tokens that are not done."""
        return len(self.tokens) - self.num_done

    def completion(self) -> Completion:
        """Return the completion."""
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


def draw_length(rng: np.random.Generator, median: float) -> int:
    """Draw the length of a response in tokens, before any limit; at least 1."""
    return max(1, round(min(median * np.exp(LENGTH_SIGMA * rng.standard_normal()), 1e9)))


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The token ids of a model: 0 to `num_ids` - 1."""

    num_ids: int
    eos_ids: tuple[int, ...]
    """The ids that end a sequence."""
    plain_ids: NDArray[np.int32]
    """The ids that responses are made of: the first thousand, without the ends of sequence."""

    @classmethod
    def of_folder(cls, folder: Path) -> Vocabulary:
        """Read the `config.json` of a model; without an end of sequence, the last id is taken for it.

        Raises:
            ConfigError: it names no vocabulary.
        """
        path = folder / MODEL_CONFIG_NAME
        try:
            document = json.loads(path.read_bytes())
            # models with images keep the settings of their language model in a section of its own
            document = {**document.get("text_config", {}), **document}
            num_ids, eos = int(document["vocab_size"]), document.get("eos_token_id")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the simulated engine finds no vocab_size in {path} ({type(error).__name__}: {error}); "
                "the version must hold the config.json of a language model"
            ) from None
        ids = eos if isinstance(eos, list) else [num_ids - 1] if eos is None else [eos]
        known = tuple(sorted({int(number) for number in ids if 0 <= int(number) < num_ids}))
        eos_ids = known or (num_ids - 1,)
        plain_ids = np.setdiff1d(np.arange(min(num_ids, 1000 + len(eos_ids)), dtype=np.int32), eos_ids)
        if not len(plain_ids):
            raise ConfigError(f"{path}: all {num_ids} ids end a sequence, so the simulated engine cannot generate text")
        return cls(num_ids, eos_ids, plain_ids)

    def draw(self, rng: np.random.Generator, num_tokens: int) -> NDArray[np.int32]:
        """Draw ids [num_tokens], any but the ends of sequence."""
        return self.plain_ids[rng.integers(len(self.plain_ids), size=num_tokens)]


class SimulatedCodec:
    """Implements `tba_searcher.engines.tokenizer.Codec`.

    Raises:
        ConfigError: `config.json` names no vocabulary.
    """

    def __init__(self, folder: Path) -> None:
        self._vocabulary = Vocabulary.of_folder(folder)
        self.eos_ids = self._vocabulary.eos_ids

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return one id for every four bytes of a prompt; the same prompt always has the same ids."""
        # lone surrogates have no bytes, and no rehearsal may end over one
        raw = text.encode(errors="replace")
        parts = (raw[at : at + CHARS_PER_TOKEN] for at in range(0, len(raw), CHARS_PER_TOKEN))
        return tuple(zlib.crc32(part) % self._vocabulary.num_ids for part in parts)

    def decode_responses(self, completions: Sequence[Completion]) -> list[str]:
        """Return every token but the end of sequence as a number of three digits, with spaces between them."""
        return [
            " ".join(f"{token % 1000:03d}" for token in c.response_tokens[: -1 if c.finish_reason == "stop" else None])
            for c in completions
        ]

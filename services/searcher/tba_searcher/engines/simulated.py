"""The simulated engine: takes the time that a real one would, holds no model, and makes up responses.

It replaces an engine where everything else is to be real: hundreds of searchers on one machine, and rehearsals of a
deployment (`searcher.engine = "simulated"`). It needs no torch. It decodes only within `step`, like a real engine: time
that the loop spends between two steps is lost. A model trained on its rollouts is worth nothing.

A response depends only on the engine's seed and the request id, or on the request's own seed and prompt if it has a
seed. The order of requests does not matter. Token ids are random, but valid for the run's real model, so that a trainer
accepts them.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tba.api import Prompt
from tba.errors import DigestError, ModelError
from tba.versions import PolicyVersion
from tba.weights import params_sha256_of_files
from tba.weights.publishing import MODEL_CONFIG_NAME
from tba.wire import Manifest
from tba_searcher.engines.engine import (
    Completion,
    EngineSettings,
    Request,
    VersionMarks,
    check_request,
    make_completion,
)

CHARS_PER_TOKEN = 4
TOKENS_PER_S = 50.0
"""Tokens that one slot decodes per second."""
MEDIAN_RESPONSE_TOKENS = 128.0
"""Half of the responses are longer; those above the request's limit are cut."""
LENGTH_SIGMA = 0.8
"""Standard deviation of the logarithm of a response's length."""
TOKENS_PER_STEP = 16
"""Tokens that one step decodes per active request. New requests and weights wait until the step ends."""
NUM_PLAIN_IDS = 1000
"""Number of token ids that responses use: the lowest ones that do not end a sequence."""


@dataclass(slots=True)
class _Asked:
    """An active request, its whole response (drawn at the start), and how many tokens count as decoded."""

    request: Request
    tokens: NDArray[np.int32]
    """[R]."""
    logprobs: NDArray[np.float32]
    """[R]."""
    marks: VersionMarks
    started_at_s: float
    num_done: int = 0


class SimulatedEngine:
    """Implements `tba_searcher.engines.engine.Engine`.

    Args:
        folder: model folder; its `config.json` gives the vocabulary.
        sleep: called with the seconds that a step takes.
    """

    def __init__(
        self,
        folder: Path,
        tensors_paths: Sequence[Path],
        version: PolicyVersion,
        settings: EngineSettings,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings, self._sleep = settings, sleep
        num_ids, self.default_eos_ids = read_vocabulary(folder)
        ids = np.arange(min(num_ids, NUM_PLAIN_IDS + len(self.default_eos_ids)), dtype=np.int32)
        self._plain_ids = np.setdiff1d(ids, self.default_eos_ids)
        self._waiting: dict[str, Request] = {}
        self._active: dict[str, _Asked] = {}
        self.num_slots, self.num_prefilled_tokens = settings.num_slots, 0
        # the tensors are read as a real engine reads them: a rehearsal has to show damaged files and slow disks
        self.version, self._params_sha256 = version, params_sha256_of_files(tensors_paths)

    @property
    def num_active(self) -> int:
        """Number of requests that are being decoded now."""
        return len(self._active)

    @property
    def num_waiting(self) -> int:
        """Number of submitted requests that have no slot yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request (see `Engine.submit`)."""
        is_known = request.request_id in self._active or request.request_id in self._waiting
        check_request(request, self._settings, is_known=is_known)
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> None:
        """Forget a request (see `Engine.abort`)."""
        self._waiting.pop(request_id, None)
        self._active.pop(request_id, None)

    def step(self) -> list[Completion]:
        """Sleep as long as decoding up to `TOKENS_PER_STEP` tokens per request takes (see `Engine.step`)."""
        for request_id in list(self._waiting)[: self.num_slots - self.num_active]:
            request = self._waiting.pop(request_id)
            self.num_prefilled_tokens += len(request.prompt_tokens)
            seed, name = request.sampling.seed, f"{self._settings.seed}|{request_id}"
            source = (name if seed is None else f"{seed}|{request.prompt_tokens}").encode()
            rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(source, digest_size=16).digest(), "big"))
            # drawn before the limits, so that a lower limit cuts responses off instead of changing all of them
            length = round(MEDIAN_RESPONSE_TOKENS * np.exp(LENGTH_SIGMA * rng.standard_normal()))
            length, limit = max(length, request.min_response_tokens, 1), request.max_response_tokens
            tokens = rng.choice(self._plain_ids, size=min(length, limit))
            if length <= limit and request.eos_ids:
                tokens[-1] = request.eos_ids[0]
            logprobs = -rng.exponential(size=len(tokens)).astype(np.float32)
            self._active[request_id] = _Asked(request, tokens, logprobs, [(self.version, 0)], time.time())
        if not self._active:
            return []
        # never past the end of the longest request: time would pass in which nothing is decoded
        longest = max(len(asked.tokens) - asked.num_done for asked in self._active.values())
        num_tokens = min(TOKENS_PER_STEP, longest)
        self._sleep(num_tokens / TOKENS_PER_S)
        for asked in self._active.values():
            asked.num_done = min(asked.num_done + num_tokens, len(asked.tokens))
        finished = [asked for asked in self._active.values() if asked.num_done == len(asked.tokens)]
        for asked in finished:
            del self._active[asked.request.request_id]
        return [
            make_completion(
                asked.request,
                asked.tokens,
                asked.logprobs,
                "stop" if asked.tokens[-1] in asked.request.eos_ids else "length",
                marks=asked.marks,
                started_at_s=asked.started_at_s,
            )
            for asked in finished
        ]

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Read and hash the files (see `Engine.load_weights`)."""
        self._params_sha256, self.version = params_sha256_of_files(tensors_paths), version
        for asked in self._active.values():
            asked.marks.append((version, asked.num_done))

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
        self._active, self._waiting = {}, {}


def read_vocabulary(folder: Path) -> tuple[int, tuple[int, ...]]:
    """Return a model's number of token ids, and its end-of-sequence ids; the last id if config.json names none."""
    document = json.loads((folder / MODEL_CONFIG_NAME).read_bytes())
    # models with images have the settings of their language model in a section of its own
    document = {**(document.get("text_config") or {}), **document}
    num_ids, eos = document.get("vocab_size"), document.get("eos_token_id")
    if not isinstance(num_ids, int):
        raise ModelError(f"{folder / MODEL_CONFIG_NAME} names no vocab_size; model.path must hold a language model")
    named = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return num_ids, tuple(sorted({number for number in named if 0 <= number < num_ids})) or (num_ids - 1,)


class SimulatedCodec:
    """Implements `tba_searcher.engines.tokenizer.Codec`."""

    def __init__(self, folder: Path) -> None:
        self._num_ids, self.eos_ids = read_vocabulary(folder)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return one id for every four bytes of a prompt; the same prompt always has the same ids."""
        # lone surrogates have no bytes, and no rehearsal may end over one
        raw = text.encode(errors="replace")
        parts = (raw[at : at + CHARS_PER_TOKEN] for at in range(0, len(raw), CHARS_PER_TOKEN))
        return tuple(zlib.crc32(part) % self._num_ids for part in parts)

    def prompt_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids of a prompt's text; there is no chat template."""
        return self.encode_prompt(prompt.text)

    def decode_responses(self, completions: Sequence[Completion]) -> list[str]:
        """Return one text per completion: its token ids modulo 1000 in three digits, without end of sequence."""
        return [
            " ".join(f"{token % 1000:03d}" for token in c.response_tokens[: -1 if c.finish_reason == "stop" else None])
            for c in completions
        ]

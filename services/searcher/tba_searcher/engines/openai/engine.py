"""The engine protocol in front of a running vLLM server: one HTTP call per request and weight version.

    submit -> waiting -> (a slot is free) a call in a thread -> its answer -> completion
    load_weights: abort the calls, keep their tokens -> reload -> label -> `step` sends prompt and tokens again

* Version of a token: weights change only while no call is in flight. So a call's tokens come from the weights that were
  loaded when it was sent. `load_weights` gives the server a label, which is read again after each answer. A server
  that restarted, or got weights from somebody else, has lost the label; its answers are then dropped.
* Log-probs belong to the distribution that tokens are drawn from; `VllmServer.check` tests that at the start.
* `verify` compares the files that the server loaded with the manifest, and asks the server for the canary's log-probs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.concurrency import begin_in_thread
from tba.config.searcher import OpenAiSection
from tba.errors import BusyError, ServiceError, UnavailableError
from tba.fields import MAX_SEED
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire import Manifest
from tba.wire.rollout import MAX_LOGPROB
from tba_searcher.engines.engine import (
    ENGINE_TIMEOUT_S,
    Completion,
    EngineDiedError,
    EngineError,
    EngineSettings,
    Request,
    VersionMarks,
    as_ids,
    check_request,
    check_vllm_request,
    make_completion,
)
from tba_searcher.engines.openai.vllm_server import LOWEST_LOGPROB, Piece, connect
from tba_searcher.engines.openai.weight_folders import WeightFolders
from tba_searcher.engines.tokenizer import StopStringMatcher, load_tokenizer, response_decoder
from tba_searcher.engines.weight_check import check_loaded, read_headers
from tba_searcher.waits import RETRY_S

log = get_logger("openai")
POLL_S = 0.02
"""Longest time that one `step` waits for an answer."""
ABORT_EVERY_S = 0.05
"""Pause between two aborts of the same call: the call may reach the server after its first abort."""
RESEND_AFTER_S = 1.0
"""Pause before a call that was cut off is sent again. If the second try fails too, the engine ends."""
CHECK_EVERY_S = 10.0
"""Time between two reads of the label while no answer comes, to notice a hanging server before its calls time out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiSettings(EngineSettings):
    """Settings of the engine. The server has a seed, a dtype and a device of its own."""

    section: OpenAiSection = field(default_factory=OpenAiSection)
    ca_file: str | None = None
    """File with the certificate authorities that are trusted for an https address."""


@dataclass(slots=True)
class _Open:
    """A request whose completion has not been returned yet, with its response so far."""

    request: Request
    started_at_s: float
    call: Future[Piece] | None = None
    sent_id: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: VersionMarks = field(default_factory=list)
    finish_reason: str = ""
    """Empty until the response has ended."""
    is_resent: bool = False
    """Whether the last call failed and is sent again."""
    send_at_s: float = 0.0


class OpenAiEngine:
    """Implements `tba_searcher.engines.engine.Engine` with a server.

    Args:
        folder: model folder in Hugging Face format, with tokenizer; the server has a model of the same shape.
        tensors_paths: its safetensors files; later versions must have the same names, shapes and dtypes.

    Raises:
        ConfigError: the server cannot be an engine, or its token or folder cannot be used.
        EngineError: the server cannot load the weights.
        ServiceError: the server does not answer, or refuses this client.
    """

    def __init__(
        self, folder: Path, tensors_paths: Sequence[Path], version: PolicyVersion, settings: OpenAiSettings
    ) -> None:
        self._settings, self._folder = settings, folder
        self.num_slots, self.version, self.num_prefilled_tokens = settings.num_slots, version, 0
        from transformers import AutoConfig, GenerationConfig

        files: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code, "local_files_only": True}
        config: Any = AutoConfig.from_pretrained(folder, **files)
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except OSError:
            generation = GenerationConfig.from_model_config(config)
        self.vocab_size = int(config.get_text_config().vocab_size)
        self.default_eos_ids = as_ids(generation.eos_token_id)
        num_tokens = settings.max_prompt_tokens + settings.max_response_tokens
        self._patient = connect(settings.section, num_tokens=num_tokens, retry_s=RETRY_S, ca_file=settings.ca_file)
        """Retries its calls. `_server` does not, because the cause of a failure decides what happens next."""
        self._server = self._patient.without_retries()
        expected = {name: entry for name, (_, entry) in read_headers(tensors_paths).items()}
        self._folders = WeightFolders(settings.section, expected)
        self._name = f"tba-{secrets.token_hex(6)}"
        self._num_loads = self._num_calls = 0
        self._label, self._checked_at_s = "", 0.0
        self._open: dict[str, _Open] = {}
        self._aborted: dict[str, Future[Piece]] = {}
        """Unanswered calls of requests that were aborted, by call id."""
        self._failure: str | None = None
        """Why the next step raises EngineDiedError; the current step still returns finished requests."""
        self._params_sha256 = ""
        try:
            self.load_weights(tensors_paths, version)
        except BaseException:
            self._folders.close()
            raise

    @property
    def num_active(self) -> int:
        """Number of requests at the server, including those that the next step sends."""
        return min(len(self._open), self.num_slots)

    @property
    def num_waiting(self) -> int:
        """Number of submitted requests that have no slot yet."""
        return len(self._open) - self.num_active

    def submit(self, request: Request) -> None:
        """Queue a request (see `Engine.submit`)."""
        is_known = request.request_id in self._open
        check_request(request, self._settings, is_known=is_known, vocab_size=self.vocab_size)
        # what the server refuses later would end the engine
        check_vllm_request(request, {*self.default_eos_ids, self._tokenizer.eos_token_id})
        self._open[request.request_id] = _Open(request, time.time())

    def abort(self, request_id: str) -> None:
        """Forget a request (see `Engine.abort`)."""
        entry = self._open.pop(request_id, None)
        if entry is not None and entry.call is not None:
            self._aborted[entry.sent_id] = entry.call

    def step(self) -> list[Completion]:
        """Send waiting requests, wait a moment, and return the completions (see `Engine.step`)."""
        if self._failure is not None:
            raise EngineDiedError(self._failure)
        self._abort_forgotten()
        for entry in list(self._open.values())[: self.num_slots]:
            if entry.call is not None or entry.finish_reason or time.monotonic() < entry.send_at_s:
                continue
            self._num_calls += 1
            sent_id, request, before = f"{self._name}-{self._num_calls}", entry.request, tuple(entry.tokens)
            seed = request.sampling.seed
            if seed is not None:  # the server begins its stream anew with each call, and must not draw the same numbers
                seed = (seed + 1_000_003 * len(before)) % (MAX_SEED + 1)
            entry.sent_id = sent_id
            call = partial(self._server.complete, sent_id, request, before, seed=seed, label=self._label)
            entry.call = begin_in_thread(call)
        under_way = [entry.call for entry in self._open.values() if entry.call is not None]
        if under_way:
            concurrent.futures.wait(under_way, timeout=POLL_S, return_when=concurrent.futures.FIRST_COMPLETED)
            self._take_answers()
            if time.monotonic() - self._checked_at_s > CHECK_EVERY_S:
                self._check_label()
        elif self._open:
            time.sleep(POLL_S)  # they wait to be sent again
        ended = [entry for entry in self._open.values() if entry.finish_reason]
        for entry in ended:
            del self._open[entry.request.request_id]
        return [
            make_completion(
                entry.request,
                np.array(entry.tokens, np.int32),
                np.array(entry.logprobs, np.float32),
                entry.finish_reason,
                marks=entry.versions,
                started_at_s=entry.started_at_s,
            )
            for entry in ended
        ]

    def stage_weights(self, tensors_paths: Sequence[Path]) -> None:
        """Link or copy the files into a folder that the server can read (see `StagingEngine`)."""
        self._folders.get(tensors_paths)

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Abort the calls in flight and have the server load the files (see `Engine.load_weights`)."""
        new = self._folders.get(tensors_paths, to_load=True)
        # every call comes back with the tokens that it has, so that none is under way while weights change
        calls = {entry.sent_id: entry.call for entry in self._open.values() if entry.call is not None} | self._aborted
        while under_way := {sent_id: call for sent_id, call in calls.items() if not call.done()}:
            self._abort_calls(list(under_way))
            concurrent.futures.wait(under_way.values(), timeout=ABORT_EVERY_S)
        self._take_answers(called_back=True)
        # a server that has started again may have other settings than `check` has seen
        before = self._check_label()
        # stays so when the load fails half-way: a mixture of weights must never pass `verify`
        self._params_sha256 = "unknown: a load broke off"
        self._num_loads += 1
        label = f"{self._name}-{self._num_loads}-{version}"
        try:
            self._server.load_weights(new.at_server, label, timeout_s=ENGINE_TIMEOUT_S)
        except ServiceError as error:
            problem = f"{self._server.base_url} could not load version {version} from {new.at_server}: {error}"
            with contextlib.suppress(ServiceError):
                if self._patient.label() == before:
                    raise EngineError(f"{problem}; does it see that folder (searcher.openai.weights_folder)?") from None
            raise EngineDiedError(problem) from None
        self.version, self._params_sha256, self._label = version, new.params_sha256, label

    def verify(self, manifest: Manifest) -> None:
        """Check the digest of the files that the server loaded, and the canary (see `Engine.verify`)."""
        check_loaded(self, manifest)
        self._check_label()

    def params_sha256(self) -> str:
        """Return the digest of the tensors of the last load."""
        return self._params_sha256

    def canary_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs [R] at temperature 1 of a given response."""
        return self._patient.prompt_logprobs(prompt_tokens, response_tokens)

    def close(self) -> None:
        """Forget all requests, and delete the folders (see `Engine.close`). The server runs on."""
        for request_id in list(self._open):
            self.abort(request_id)
        with contextlib.suppress(ServiceError):
            self._abort_forgotten()
        self._aborted.clear()
        self._folders.close()

    def _take_answers(self, *, called_back: bool = False) -> None:
        """Append the tokens of finished calls to their responses.

        A call that was cut off, or that a busy server refused, is sent once more. Any other failure ends the engine
        with the next step. So does an answer without tokens, unless the call was aborted (`called_back`).

        Raises:
            EngineDiedError: the server no longer has the weights of the last load.
        """
        pieces, failed = list[tuple[_Open, Piece]](), list[tuple[_Open, ServiceError]]()
        for entry in self._open.values():
            if entry.call is None or not entry.call.done():
                continue
            call, entry.call = entry.call, None
            try:
                pieces.append((entry, call.result()))
            except ServiceError as error:
                failed.append((entry, error))
        if not pieces and not failed:
            return
        # after the answers: a server that has started again since they were sent no longer has the label
        self._check_label()
        for entry, piece in pieces:
            if piece.tokens:
                self._add(entry, piece)
            elif not called_back:
                self._failure = f"{self._server.base_url} answered request {entry.request.request_id} without a token"
        for entry, error in failed:
            if entry.is_resent or not isinstance(error, UnavailableError | BusyError):
                self._failure = f"request {entry.request.request_id}: {error}"
                continue
            log.warning("call failed", server=self._server.base_url, detail=str(error))
            entry.is_resent, entry.send_at_s = True, time.monotonic() + RESEND_AFTER_S
        if failed:
            self._abort_calls([entry.sent_id for entry, _ in failed])  # they may go on there

    def _add(self, entry: _Open, piece: Piece) -> None:
        """Append a piece to a response, and set the finish reason if the response has ended."""
        request, start = entry.request, len(entry.tokens)
        if problem := self._problem_with(piece, request.max_response_tokens - start):
            self._failure = f"{self._server.base_url} answered request {request.request_id} with {problem}"
            return
        entry.is_resent = False
        self.num_prefilled_tokens += max(0, len(request.prompt_tokens) + start - piece.num_cached_tokens)
        entry.tokens += piece.tokens
        entry.logprobs += piece.logprobs
        completes_stop, stops = piece.completes_stop, request.sampling.stop
        if stops and start > 0:
            # the server may have seen the text of this piece alone, and a stop string may have begun in the one before
            lengths = range(max(start, request.min_response_tokens) + 1, len(entry.tokens) + 1)
            end = next((n for n in lengths if self._stops.completes(entry.tokens[:n], stops)), None)
            completes_stop = end is not None
            del entry.tokens[end or len(entry.tokens) :], entry.logprobs[end or len(entry.logprobs) :]
        entry.versions.append((self.version, start))
        # the tokens decide and not the server, which may stop for a reason that the request does not know
        if entry.tokens[-1] in request.eos_ids:
            entry.finish_reason = "stop"
        elif completes_stop:
            entry.finish_reason = "stop_string"
        elif len(entry.tokens) >= request.max_response_tokens:
            entry.finish_reason = "length"

    def _problem_with(self, piece: Piece, num_asked: int) -> str | None:
        """Return what is wrong with a piece (too many tokens, an unknown token id, an impossible log-prob), or None."""
        tokens, highest = piece.tokens, max(piece.logprobs)
        if len(tokens) > num_asked:
            return f"{len(tokens)} tokens, and at most {num_asked} were asked for"
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            odd = min(tokens) if min(tokens) < 0 else max(tokens)
            return f"token id {odd}, and the model has {self.vocab_size} ids; give it the model of the run"
        if not min(piece.logprobs) > LOWEST_LOGPROB:
            return f"logits that are not finite under version {self.version}; its weights are broken"
        if highest > MAX_LOGPROB:
            return f"a log-prob of {highest:.4g}, and none is above 0"
        return None

    def _abort_forgotten(self) -> None:
        self._aborted = {sent_id: call for sent_id, call in self._aborted.items() if not call.done()}
        if self._aborted:
            self._abort_calls(list(self._aborted))

    def _abort_calls(self, sent_ids: Sequence[str]) -> None:
        # a server that is away has no calls either, and theirs fail; `_check_label` then says what is wrong
        with contextlib.suppress(UnavailableError, BusyError):
            self._server.abort(sent_ids)

    def _check_label(self) -> str:
        """Return the server's label; raise EngineDiedError if it is not the label of the last load."""
        try:
            found = self._patient.label()
        except ServiceError as error:
            raise EngineDiedError(str(error)) from None
        self._checked_at_s = time.monotonic()
        if self._label not in ("", found):
            raise EngineDiedError(
                f"{self._patient.base_url} no longer has version {self.version} (its label is {found!r}, not "
                f"{self._label!r}): it has started again, or something else gives it weights; each searcher needs a "
                "server of its own"
            )
        return found

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._folder, trust_remote_code=self._settings.trust_remote_code)

    @cached_property
    def _stops(self) -> StopStringMatcher:
        return StopStringMatcher(response_decoder(self._tokenizer), self.vocab_size)

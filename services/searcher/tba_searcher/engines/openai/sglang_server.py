"""SGLang (0.5.23) as a server that generates: its native routes, since /v1/completions knows no log-probs of top-k.

/generate                   token ids in; token ids and log-probs out
/abort_request              one request comes back at once, with the tokens that it has
/update_weights_from_disk   all weights from a folder; keys and values of those before are dropped; a label
/model_info                 the label
/server_info                how it was started
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tba.errors import BadReplyError, ConfigError, NotFoundError, UnavailableError
from tba.fields import StrictModel
from tba.wire import Sampling
from tba_searcher.engines.engine import Request
from tba_searcher.engines.openai.server import GenerationServer, Piece

_PROBE_TEMPERATURE = 0.1
_PROBE_RANKS = 5
_PROBE_MIN_NATS = 1e-4
"""Between the first and the last of these tokens at temperature 1; rounding makes less."""
_TOP_K_ALL = -1
_RESERVED_TOKENS = 6
"""It takes so many off the context for its longest prompt."""
TokenLogprob = tuple[float | None, int, str | None]
"""Log-prob (None: no number), token id, and its text if asked for."""


class _Finish(StrictModel):
    type: str
    matched: int | str | None = None
    """The token id or the stop string that ended the response."""


class _Meta(StrictModel):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[TokenLogprob] = Field(default_factory=list)
    """At the temperature, before top-k and top-p."""
    output_token_sampling_logprobs: list[float | None] | None = None
    """Of the distribution that is drawn from."""
    output_top_logprobs: list[list[TokenLogprob]] = Field(default_factory=list)
    input_token_logprobs: list[TokenLogprob] = Field(default_factory=list)
    weight_version: str | None = None
    """The label of the weights when the answer was made."""


class _Generated(StrictModel):
    output_ids: list[int] = Field(default_factory=list)
    meta_info: _Meta


class _ModelInfo(StrictModel):
    weight_version: str


class _ServerInfo(StrictModel):
    """Its arguments, and what its scheduler has made of them."""

    max_req_input_len: int
    """A prompt is shorter."""
    dp_size: int = 1
    tokenizer_worker_num: int = 1
    speculative_algorithm: str | None = None
    disaggregation_mode: str = "null"
    preferred_sampling_params: str | dict[str, Any] | None = None
    hicache_storage_backend: str | None = None
    enable_deterministic_inference: bool = False
    sampling_mask_max_tokens: int = 0
    """Most tokens that top-k and top-p may leave; 0: a release without log-probs of these."""


class _Updated(StrictModel):
    success: bool
    message: str = ""


class SglangServer(GenerationServer):
    """A server of SGLang."""

    name = "SGLang"
    start_hint = (
        "start it as docs/searcher.md says: SGLANG_RETURN_ORIGINAL_LOGPROB=0 python -m sglang.launch_server "
        "--model-path MODEL"
    )
    _info: _ServerInfo | None = None

    def problem_with(self, request: Request) -> str | None:
        """Return why SGLang cannot sample as a request asks (see `GenerationServer.problem_with`)."""
        info, sampling = self._info, request.sampling
        assert info is not None, "`check` comes first"
        if sampling.seed is not None and sampling.temperature != 0 and not info.enable_deterministic_inference:
            return (
                f"seed {sampling.seed}; this server draws from one stream for all requests, start it with "
                "--enable-deterministic-inference"
            )
        if not _is_filtered(sampling):
            return None
        if sampling.top_k and sampling.top_p < 1:
            return (
                f"top_k {sampling.top_k} and top_p {sampling.top_p:g}; SGLang measures top_p before top_k, "
                "and so keeps more tokens than other engines do; give one of them"
            )
        kept = sampling.top_k or self._vocab_size
        if kept > info.sampling_mask_max_tokens:
            what = f"top_k {sampling.top_k}" if sampling.top_k else f"top_p {sampling.top_p:g}"
            return (
                f"{what} keeps up to {kept} tokens, and this server gives log-probs of what top-k and top-p leave for "
                f"{info.sampling_mask_max_tokens} at most; start SGLang 0.5.23 with --sampling-mask-max-tokens {kept}"
            )
        return None

    def complete(self, sent_id: str, request: Request, before: Sequence[int], *, seed: int | None, label: str) -> Piece:
        """Continue the response to a request (see `GenerationServer.complete`)."""
        sampling, is_filtered = request.sampling, _is_filtered(request.sampling)
        made = self._generate(
            [*request.prompt_tokens, *before],
            rid=_rid(sent_id),
            extra_key=label,
            return_sampling_mask=is_filtered,
            sampling_params={
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                # it measures what top-p leaves for a top-k alone; this one leaves all
                "top_k": sampling.top_k or (self._vocab_size if is_filtered else _TOP_K_ALL),
                "sampling_seed": seed,
                "stop": list(sampling.stop),
                "stop_token_ids": list(request.eos_ids),
                "ignore_eos": not request.eos_ids,  # ignores stop_token_ids as well
                "max_new_tokens": request.max_response_tokens - len(before),
                "min_new_tokens": max(0, request.min_response_tokens - len(before)),
            },
        )
        meta, finish = made.meta_info, made.meta_info.finish_reason
        if meta.weight_version not in (None, label):
            # behind a router another server may answer than the one whose label is read
            raise BadReplyError(
                f"{self.base_url} answered with weights of the label {meta.weight_version!r}, not {label!r}: it has "
                "started again, something else gives it weights, or several servers share its address; each searcher "
                "needs a server of its own"
            )
        if finish is not None and isinstance(finish.matched, str) and finish.matched not in sampling.stop:
            # in the place of a token beyond the vocabulary it puts one that ends the response
            raise BadReplyError(f"{self.base_url} ended a response for {finish.matched!r}, which was not asked for")
        if is_filtered:
            logprobs = meta.output_token_sampling_logprobs or []
        else:
            logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs]
        if len(logprobs) != len(made.output_ids):
            raise BadReplyError(f"{self.base_url} gives {len(logprobs)} log-probs of {len(made.output_ids)} tokens")
        # of the text it looks at the last few tokens, and pays no heed to min_new_tokens
        return Piece(made.output_ids, [-np.inf if one is None else one for one in logprobs], completes_stop=None)

    def abort(self, sent_ids: Sequence[str]) -> None:
        """Let calls come back (see `GenerationServer.abort`)."""
        for sent_id in sent_ids:
            self._post("/abort_request", {"rid": _rid(sent_id)})

    def abort_all(self, sent_ids: Sequence[str]) -> None:
        """Let all calls come back (see `GenerationServer.abort_all`)."""
        # it takes one abort for an id, and that is lost when the request is not yet under way
        self._post("/abort_request", {"rid": "", "abort_all": True})

    def prompt_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs [R] at temperature 1 of a given response."""
        tokens = [*prompt_tokens, *response_tokens]
        # one token must be sampled, and is not looked at
        greedy = {"temperature": 0.0, "max_new_tokens": 1}
        rows = self._generate(tokens, logprob_start_len=0, sampling_params=greedy).meta_info.input_token_logprobs
        if [token for _, token, _ in rows] != tokens:
            raise BadReplyError(f"{self.base_url} gives no log-probs of prompts (input_token_logprobs)")
        found = [np.nan if logprob is None else logprob for logprob, _, _ in rows[len(prompt_tokens) :]]
        return np.array(found, np.float32)

    def label(self) -> str:
        """Return the label of the weights (see `GenerationServer.label`)."""
        return self._read(_ModelInfo, "GET", "/model_info").weight_version

    def load_weights(self, folder: Path, label: str, *, timeout_s: float) -> None:
        """Replace all weights, and label them (see `GenerationServer.load_weights`)."""
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",  # not that of the start, which may be `dummy`
            "weight_version": label,
            "flush_cache": True,
            "abort_all_requests": True,  # it waits for every other one
        }
        reply = self._read(_Updated, "POST", "/update_weights_from_disk", body, timeout_s=timeout_s)
        if not reply.success:
            raise UnavailableError(reply.message)

    def _check_context(self, num_tokens: int) -> None:
        self._info = self._read(_ServerInfo, "GET", "/server_info")
        # an update before the last token makes the longest prompt, which must be shorter than this
        self._check_length(
            self._info.max_req_input_len, num_tokens, f"--context-length {num_tokens + _RESERVED_TOKENS}"
        )

    def _check_updates(self) -> None:
        info = self._info
        assert info is not None
        try:
            self.label()
            self.abort(["nobody"])
        except NotFoundError as error:
            raise self._without_updates(error) from None
        if info.dp_size > 1:
            raise self._copies(info.dp_size)
        # each worker has a label of its own
        refused = {
            "--tokenizer-worker-num": info.tokenizer_worker_num if info.tokenizer_worker_num > 1 else None,
            # keys and values of other weights stay in that store
            "--hicache-storage-backend": info.hicache_storage_backend,
            # may hold more than a request overrides, such as a grammar
            "--preferred-sampling-params": info.preferred_sampling_params,
            # log-probs of these were not looked into
            "--speculative-algorithm": info.speculative_algorithm,
            "--disaggregation-mode": None if info.disaggregation_mode == "null" else info.disaggregation_mode,
        }
        for option, value in refused.items():
            if value is not None:
                raise ConfigError(
                    f"{self.base_url} was started with {option} {value}, with which versions or log-probs of tokens "
                    "are not certain; start it without"
                )

    def _check_logprobs(self) -> None:
        spreads = []
        for temperature in (1.0, _PROBE_TEMPERATURE):
            sampling = {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True}
            try:
                made = self._generate([1, 2, 3], top_logprobs_num=_PROBE_RANKS, sampling_params=sampling)
            except BadReplyError as error:
                raise ConfigError(str(error)) from None
            (ranks,) = made.meta_info.output_top_logprobs or [[]]
            values = [logprob for logprob, _, _ in ranks if logprob is not None]
            if len(values) != _PROBE_RANKS:
                raise ConfigError(f"{self.base_url} gives no log-probs of the most likely tokens (top_logprobs_num)")
            spreads.append(max(values) - min(values))
        if spreads[0] < _PROBE_MIN_NATS:
            raise ConfigError(
                f"{self.base_url} finds all tokens equally likely, so that its log-probs cannot be checked; start it "
                "with weights of a model"
            )
        # a temperature divides what is between two tokens; halfway, by factors
        if spreads[1] / spreads[0] < _PROBE_TEMPERATURE**-0.5:
            raise self._other_logprobs()

    def _generate(self, tokens: list[int], *, sampling_params: dict[str, Any], **body: Any) -> _Generated:
        # whatever the server's own defaults are, nothing but the body may shape the distribution
        fixed = {
            "n": 1,
            "top_p": 1.0,
            "top_k": _TOP_K_ALL,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "skip_special_tokens": False,
        }
        whole = {"input_ids": tokens, "return_logprob": True, **body, "sampling_params": {**fixed, **sampling_params}}
        made = self._read(_Generated, "POST", "/generate", whole)
        given = [token for _, token, _ in made.meta_info.output_token_logprobs]
        if given != made.output_ids:
            raise BadReplyError(
                f"{self.base_url} gives log-probs of {len(given)} tokens that are not its {len(made.output_ids)} "
                "tokens (output_token_logprobs)"
            )
        return made


def _is_filtered(sampling: Sampling) -> bool:
    """Whether tokens are drawn from fewer than all."""
    return sampling.temperature != 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def _rid(sent_id: str) -> str:
    # an abort is for all ids that begin with its own
    return f"{sent_id}."

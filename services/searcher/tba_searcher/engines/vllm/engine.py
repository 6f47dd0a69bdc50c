"""vLLM behind the engine protocol: its synchronous `LLMEngine` in this process, one step of its scheduler per step.

The model is in this process too, or with `searcher.tensor_parallel_size` in a process for each rank (workers.py).

    submit -> add_request -> (vLLM: waiting -> running, prompts and responses in one batch) -> step -> completion

* Log-probs are vLLM's `processed_logprobs`: of the distribution that was drawn from, after min tokens, temperature,
  top-k and top-p, as the protocol asks.
* New weights: active requests keep their tokens. The next step recomputes keys and values of each prompt and response
  so far. The number of tokens that each request has at the load gives its version spans.
* `verify` compares the digest of the tensors that were loaded with the manifest's, and asks vLLM itself for the
  log-probs of the canary.

All uses of vLLM's private interfaces are in internals.py.
"""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.config.searcher import SearcherVllmSection, check_tensor_parallel
from tba.errors import ConfigError
from tba.logs import get_logger
from tba.versions import PolicyVersion
from tba.wire import Manifest
from tba.wire.weight_manifest import table_sha256
from tba_searcher.engines.engine import (
    ENGINE_TIMEOUT_S,
    Completion,
    EngineDiedError,
    EngineError,
    EngineSettings,
    Request,
    VersionMarks,
    check_request,
    check_vllm_request,
    make_completion,
)
from tba_searcher.engines.vllm.environment import keep_transformers_unchanged, prepare_vllm
from tba_searcher.engines.vllm.internals import (
    Sampled,
    SampledTokens,
    add_request,
    all_held_back,
    generation_eos_ids,
    start_engine,
    vocab_size,
)
from tba_searcher.engines.vllm.worker_extension import WORKER_EXTENSION
from tba_searcher.engines.vllm.workers import Workers
from tba_searcher.engines.weight_check import check_loaded, check_tensors, read_headers

BLOCK_SIZE = 32
"""Tokens in one block of keys and values. Full blocks of a prompt are computed once and shared by its rollouts."""
_CANARY_ID = "canary"
_MIN_LEN = 64
"""Smallest context length: the canary must fit even if prompts and responses are short."""
_STAGING_POLL_S = 0.02
log = get_logger("vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(EngineSettings):
    """Settings of the engine; vLLM takes the lowest 32 bits of the seed."""

    section: SearcherVllmSection = field(default_factory=SearcherVllmSection)
    tensor_parallel_size: int = 1
    """Number of ranks; each holds a slice of every tensor."""


@dataclass(slots=True)
class _Asked:
    """A request that has not finished."""

    request: Request
    vllm_id: str
    """vLLM's own id of the request."""
    sampled: Sampled
    started_at_s: float
    versions: VersionMarks


class VllmEngine:
    """Implements `tba_searcher.engines.engine.Engine` with vLLM.

    Args:
        folder: model folder in Hugging Face format, with tokenizer.
        tensors_paths: its safetensors files; later versions must have the same names, shapes and dtypes.

    Raises:
        ConfigError: vLLM is not installed, does not know the model, or the settings do not fit it.
        EngineError: the weights cannot be loaded.
    """

    def __init__(
        self, folder: Path, tensors_paths: Sequence[Path], version: PolicyVersion, settings: VllmSettings
    ) -> None:
        self._settings, self.num_slots, self.version = settings, settings.num_slots, version
        self._expected = {name: entry for name, (_, entry) in read_headers(tensors_paths).items()}
        model_config = json.loads((folder / "config.json").read_bytes())
        check_tensor_parallel(model_config, settings.tensor_parallel_size)
        on_cpu = prepare_vllm(settings.device, num_ranks=settings.tensor_parallel_size)
        self._llm: Any = _build(folder, settings, on_cpu=on_cpu)
        self._workers = Workers(self._llm)
        self._sampled = SampledTokens(self._llm)
        self._requests: dict[str, _Asked] = {}
        self.vocab_size, self.default_eos_ids = vocab_size(self._llm), generation_eos_ids(self._llm)
        self._vllm_ends = {*self.default_eos_ids, self._llm.get_tokenizer().eos_token_id}
        self._params_sha256 = ""
        try:
            reason = max(self._workers.call("tba_open_staging", on_cpu, doing="starting"))
            if reason:
                log.warning("weights_are_not_staged", reason=reason, effect="updates hold up generation for longer")
            self.load_weights(tensors_paths, version)
        except BaseException:
            self.close()  # ranks would keep their GPUs
            raise

    @property
    def num_active(self) -> int:
        """Number of submitted requests, at most `num_slots`; vLLM decodes fewer while its key-value cache is full."""
        return min(len(self._requests), self.num_slots)

    @property
    def num_waiting(self) -> int:
        """Number of submitted requests that have no slot yet."""
        return len(self._requests) - self.num_active

    @property
    def num_prefilled_tokens(self) -> int:
        """Number of prompt tokens that vLLM did not find in its prefix cache (see `Engine.num_prefilled_tokens`)."""
        return self._sampled.num_prefilled_tokens

    def submit(self, request: Request) -> None:
        """Queue a request (see `Engine.submit`)."""
        is_known = request.request_id in self._requests or request.request_id == _CANARY_ID
        check_request(request, self._settings, is_known=is_known, vocab_size=self.vocab_size)
        check_vllm_request(request, self._vllm_ends)
        import vllm
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        params = vllm.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop=list(sampling.stop),
            stop_token_ids=list(request.eos_ids),
            ignore_eos=True,  # ignores only the model's own ids; those of the request are above
            max_tokens=request.max_response_tokens,
            min_tokens=request.min_response_tokens,
            logprobs=0,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        try:
            vllm_id = add_request(self._llm, request.request_id, request.prompt_tokens, params)
        except (ValueError, TypeError) as error:
            raise EngineError(f"request {request.request_id} is refused by vLLM: {error}") from None
        sampled = self._sampled.follow(vllm_id, needs_text=bool(request.sampling.stop))
        self._requests[request.request_id] = _Asked(request, vllm_id, sampled, time.time(), [(self.version, 0)])

    def abort(self, request_id: str) -> None:
        """Forget a request (see `Engine.abort`)."""
        asked = self._requests.pop(request_id, None)
        if asked is not None:
            self._sampled.forget(asked.vllm_id)
            self._llm.abort_request([request_id])

    def step(self) -> list[Completion]:
        """Run one step of vLLM's scheduler (see `Engine.step`)."""
        if not self._requests:
            return []
        completions = list[Completion]()
        for output in (each for each in self._workers.step() if each.finished):
            asked, response = self._requests.pop(output.request_id), output.outputs[0]
            self._sampled.forget(asked.vllm_id)
            reason = "stop_string" if isinstance(response.stop_reason, str) else "stop"
            if response.finish_reason == "length":
                reason = "length"
            elif response.finish_reason != "stop":
                raise EngineDiedError(f"vLLM ended request {output.request_id} with {response.finish_reason!r}")
            logprobs = np.array(asked.sampled.logprobs, np.float32)
            if not np.isfinite(logprobs).all():
                raise EngineDiedError(f"the logits are not finite under version {self.version}; its weights are broken")
            tokens, marks, started_at_s = np.array(asked.sampled.tokens, np.int32), asked.versions, asked.started_at_s
            completions.append(
                make_completion(asked.request, tokens, logprobs, reason, marks=marks, started_at_s=started_at_s)
            )
        return completions

    def stage_weights(self, tensors_paths: Sequence[Path]) -> None:
        """Have all ranks prepare weights while the engine generates, and wait until they have (see `StagingEngine`).

        Raises:
            EngineError: also when a rank is not ready within `ENGINE_TIMEOUT_S`. The ranks continue to prepare, and use
                the result if it is ready before the load.
        """
        doing, limit_s = "staging weights", ENGINE_TIMEOUT_S
        self._workers.call("tba_stage_weights", self._places(tensors_paths), doing=doing)
        until_s = time.monotonic() + limit_s
        while not all(staged := self._workers.call("tba_is_staged", doing=doing)):
            if time.monotonic() > until_s:
                late = ", ".join(str(rank) for rank, is_staged in enumerate(staged) if not is_staged)
                raise EngineError(
                    f"wait weight-staging: rank {late} of {len(staged)} did not prepare the weights within {limit_s:g} "
                    "s; the update reads them in its pause"
                )
            time.sleep(_STAGING_POLL_S)

    def load_weights(self, tensors_paths: Sequence[Path], version: PolicyVersion) -> None:
        """Replace all parameters in flight (see `Engine.load_weights`). Versions hold merged weights, not adapters."""
        places = self._places(tensors_paths)
        # stays so when the load fails half-way: a mixture of weights must never pass `verify`
        self._params_sha256 = "unknown: a load broke off"
        try:
            hashed = self._workers.call("tba_load_weights", places, doing=f"loading version {version}")
        finally:
            self._drop_keys_and_values()
        self._params_sha256 = table_sha256(itertools.chain.from_iterable(hashed))
        self.version = version
        for asked in self._requests.values():
            asked.versions.append((version, len(asked.sampled.tokens)))

    def _places(self, tensors_paths: Sequence[Path]) -> dict[str, str]:
        return {name: str(path) for name, path in check_tensors(tensors_paths, self._expected).items()}

    def verify(self, manifest: Manifest) -> None:
        """Check the digest of the loaded tensors, and the canary's log-probs from vLLM (see `Engine.verify`)."""
        check_loaded(self, manifest)

    def params_sha256(self) -> str:
        """Return the digest of the tensors of the last load."""
        return self._params_sha256

    def canary_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs [R] at temperature 1 of a given response."""
        import vllm

        tokens = (*prompt_tokens, *response_tokens)
        params = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        self._drop_keys_and_values()
        with all_held_back(self._llm):
            try:
                add_request(self._llm, _CANARY_ID, tokens, params)
                # a step computes at least one token, or vLLM would leave the canary in its queue for ever
                steps = ([output for output in self._workers.step() if output.finished] for _ in tokens)
                outputs = next((outputs for outputs in steps if outputs), None)
                if outputs is None:
                    raise EngineDiedError(f"vLLM does not compute the canary of {len(tokens)} tokens")
            except BaseException:
                # the next canary has the same id, so this one must go; the engine may be dead, too
                with suppress(Exception):
                    self._llm.abort_request([_CANARY_ID])
                raise
        found = zip(outputs[0].prompt_logprobs[len(prompt_tokens) :], response_tokens, strict=True)
        return np.array([position[token].logprob for position, token in found], np.float32)

    def close(self) -> None:
        """Shut vLLM down and free its memory (see `Engine.close`)."""
        if self._llm is not None:
            self._requests.clear()
            self._workers.close()
            self._llm = None
            gc.collect()

    def _drop_keys_and_values(self) -> None:
        """Drop all keys and values; running requests go back to vLLM's queue with their tokens."""
        self._llm.reset_prefix_cache(reset_running_requests=True)


def _build(folder: Path, settings: VllmSettings, *, on_cpu: bool) -> Any:
    """Build a running LLMEngine of the model in `folder`."""
    section, num_ranks = settings.section, settings.tensor_parallel_size
    max_len = settings.max_prompt_tokens + settings.max_response_tokens
    arguments = dict[str, Any](
        model=str(folder),
        dtype=settings.dtype,
        seed=settings.seed % 2**32,
        trust_remote_code=settings.trust_remote_code,
        max_model_len=max(max_len, _MIN_LEN),
        max_num_seqs=settings.num_slots,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        gpu_memory_utilization=section.gpu_memory_share,
        quantization=section.quantization,
        enforce_eager=on_cpu,  # the CPU neither compiles nor has CUDA graphs
        async_scheduling=False,  # weights change between two steps, so nothing may be in flight there
        tensor_parallel_size=num_ranks,
        distributed_executor_backend="uni" if num_ranks == 1 else "mp",
        worker_extension_cls=WORKER_EXTENSION,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",  # the model's own sampling defaults are not ours
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    try:
        with keep_transformers_unchanged(compiles=not on_cpu):
            return start_engine(arguments, on_cpu=on_cpu)
    except (ValueError, OSError) as error:
        raise ConfigError(f"vLLM cannot run the model in {folder} with these settings: {error}") from None
    except Exception as error:
        if num_ranks == 1:
            raise
        # vLLM does not pass on what a rank said
        raise ConfigError(
            f"vLLM did not start {num_ranks} ranks (searcher.tensor_parallel_size) for the model in {folder}; the "
            f"first error above says why: {type(error).__name__}: {error}"
        ) from None

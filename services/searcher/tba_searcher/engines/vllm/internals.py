"""All uses of vLLM's private and unstable interfaces. Other files use only the names that the package `vllm` exports,
and `vllm.sampling_params` (tests/unit/searcher/test_searcher_vllm_internals.py).

The code fits the supported releases (`tba.config.searcher.VLLM_RELEASES`). `make test-vllm-versions` runs the engine
contract against a newer one.
"""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tba.errors import ConfigError
from tba_searcher.engines.engine import as_ids

# ---- The start ----------------------------------------------------------------------------------------------------


def device_in_use() -> tuple[bool, str]:
    """Return whether this vLLM runs on the CPU, and the name of its device."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu(), "the CPU" if current_platform.is_cpu() else current_platform.device_name


def transformers_adapter() -> Any:
    """Return vLLM's module that runs transformers models; its `support_torch_compile` changes their classes."""
    from vllm.model_executor.models.transformers import base

    return base


def start_engine(arguments: dict[str, Any], *, on_cpu: bool) -> Any:
    """Start an `LLMEngine` with its scheduler in this process. On the CPU its key-value cache holds all slots at full
    length.

    Raises:
        ConfigError: vLLM's CPU kernels do not support the size of the model's attention heads.
        Exception: vLLM raises anything on files or settings that it cannot use.
    """
    import vllm
    from vllm.usage.usage_lib import UsageContext

    config: Any = vllm.EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    model, cache, num_slots = config.model_config, config.cache_config, config.scheduler_config.max_num_seqs
    if on_cpu:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        # vLLM itself would refuse the size only at the first token
        head_size, sizes = model.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
        if head_size not in sizes:
            raise ConfigError(
                f"attention heads of size {head_size}: vLLM on the CPU supports {', '.join(map(str, sizes))} only; "
                "set searcher.engine to embedded"
            )
        # whole blocks, and one that vLLM keeps
        num_blocks = num_slots * -(-model.max_model_len // cache.block_size) + 1
        per_token = 2 * model.get_num_kv_heads(config.parallel_config) * head_size * model.dtype.itemsize
        per_block = cache.block_size * per_token * model.get_num_layers(config.parallel_config)
        cache.kv_cache_memory_bytes = num_blocks * per_block
    return vllm.LLMEngine.from_vllm_config(config, usage_context=UsageContext.LLM_CLASS, disable_log_stats=True)


# ---- The engine ---------------------------------------------------------------------------------------------------


def vocab_size(llm: Any) -> int:
    """Return the number of token ids of the model."""
    return llm.vllm_config.model_config.get_vocab_size()


def generation_eos_ids(llm: Any) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the model's generation config; may be empty."""
    return as_ids(llm.vllm_config.model_config.try_get_generation_config().get("eos_token_id"))


def add_request(llm: Any, request_id: str, tokens: Sequence[int], params: Any) -> str:
    """Queue a request of token ids; return vLLM's own id for it."""
    from vllm.inputs.engine import tokens_input

    return llm.add_request(request_id, tokens_input(list(tokens)), params)


def rank_processes(llm: Any) -> list[Any]:
    """Return the processes of the ranks; an empty list if the only worker is in this process."""
    return [worker.proc for worker in getattr(llm.engine_core.engine_core.model_executor, "workers", ())]


def shut_down(llm: Any) -> None:
    """Shut down vLLM's engine core and the workers that it has started."""
    llm.engine_core.shutdown()


@dataclass(slots=True)
class Sampled:
    """The response of one request so far."""

    needs_text: bool
    """Whether vLLM looks for stop strings in it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each of `tokens`."""


class SampledTokens:
    """Collects tokens and log-probs directly from the outputs of vLLM's scheduler.

    vLLM's own output processor is slower (docs/searcher.md), and returns them only when a request ends. It therefore
    gets every output without log-probs. If no text is needed, it gets only the last output of a request.
    """

    def __init__(self, llm: Any) -> None:
        self._by_id: dict[str, Sampled] = {}
        self.num_prefilled_tokens = 0
        """Prompt tokens that were not in the prefix cache. vLLM does not report what it computes again."""
        self._process: Any = llm.output_processor.process_outputs
        llm.output_processor.process_outputs = self._take

    def follow(self, vllm_id: str, *, needs_text: bool) -> Sampled:
        """Start to collect the response of a request; return the object that later steps append to."""
        sampled = self._by_id[vllm_id] = Sampled(needs_text)
        return sampled

    def forget(self, vllm_id: str) -> None:
        """Stop collecting the response of a request."""
        self._by_id.pop(vllm_id, None)

    def _take(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        left = list[Any]()
        for output in outputs:
            sampled = self._by_id.get(output.request_id)
            if sampled is not None:
                sampled.tokens += output.new_token_ids
                if output.prefill_stats is not None:  # with the first token
                    self.num_prefilled_tokens += output.prefill_stats.num_computed_tokens
                if output.new_logprobs is not None:
                    sampled.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # the sampled token is the first
                    output.new_logprobs = None
                if output.finish_reason is None and not sampled.needs_text:
                    continue
            left.append(output)
        return self._process(left, *args, **kwargs)


@contextmanager
def all_held_back(llm: Any) -> Iterator[None]:
    """Hold back all queued requests while the context is open: steps run only new ones. No request may be running."""
    queue = llm.engine_core.engine_core.scheduler.waiting
    waiting = [queue.pop_request() for _ in range(len(queue))]
    try:
        yield
    finally:
        for request in waiting:
            queue.add_request(request)


# ---- The models of a worker ---------------------------------------------------------------------------------------


class WorkerModel:
    """The model of one vLLM worker, and the state that the worker derives from its weights."""

    def __init__(self, worker: Any) -> None:
        self._runner: Any = worker.model_runner
        self.config: Any = self._runner.vllm_config
        """vLLM's own config."""
        self.rank: int = self.config.parallel_config.rank
        self.num_ranks: int = self.config.parallel_config.world_size
        if self.num_ranks > 1:
            _scale_slices_alone()

    @property
    def model(self) -> Any:
        """The model in use."""
        return self._runner.get_model()

    def exchange(self, other: Any) -> Any:
        """Make `other` the model in use; return the previous one."""
        before, self._runner.model = self._runner.model, other
        return before

    def forget_derived(self) -> None:
        """Clear LoRA state and encoder caches, which vLLM derives from the weights; its own reload does the same."""
        self._runner.reset_lora_state()
        self._runner.reset_encoder_cache()
        self._runner.reset_mm_cache()

    def make_second(self) -> Any:
        """Return a second model with its own weights.

        Raises:
            RuntimeError: an exchange would miss some weights, because vLLM shares their layers or finds them by name.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers import rotary_embedding
        from vllm.model_executor.model_loader import get_model

        config = copy.copy(self.config)
        config.compilation_config = copy.copy(config.compilation_config)
        # the first model's layers are in here by name, and stay there
        config.compilation_config.static_forward_context = {}
        # models share these layers, and a reload takes them apart for a moment
        shared = rotary_embedding._ROPE_DICT
        known = dict(shared)
        shared.clear()
        try:
            with set_current_vllm_config(config):
                model: Any = get_model(vllm_config=config)
        finally:
            shared.clear()
            shared.update(known)
        if {*map(id, model.modules())} & {*map(id, self._runner.model.modules())}:
            raise RuntimeError("it shares layers with every other model")
        by_name = config.compilation_config.static_forward_context.values()
        if any(True for layer in by_name for _ in layer.parameters()):
            raise RuntimeError("vLLM finds layers with weights by their names")
        return model

    def load(self, model: Any, tensors: Iterable[tuple[str, Any]]) -> None:
        """Replace all parameters of one of this worker's models with named checkpoint tensors, by vLLM's own reload.

        Raises:
            Exception: vLLM failed. The weights are then a mixture; the next load replaces them all.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        on_cpu = device_in_use()[0]
        # vLLM packs weights for a kernel of experts only when it makes one, and copies them unpacked into one that is
        # there. On a GPU nothing is packed, and CUDA graphs need the kernels that they have captured.
        methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()] if on_cpu else []
        for method in methods:
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None
        initialize_layerwise_reload(model)
        try:
            model.load_weights(iter(tensors))
        finally:
            # vLLM keeps the tensors of a load that failed, and the next load would mix them in
            finalize_layerwise_reload(model, self.config.model_config)
        if not on_cpu:
            return
        # vLLM renews the packed copy of an output head when the head's own weights are loaded. A head that is tied to
        # the input embedding has none, and would silently use the old weights.
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _scale_slices_alone() -> None:
    """Make each rank that rounds weights to 8 bits compute the scales from its own slice alone.

    vLLM computes the scale of a shared channel over all ranks. A load would wait for ever for a rank that has failed,
    and messages between ranks would mix with those of decoding while weights are staged. Each rank multiplies by
    its own scale before results are summed, so scales may differ, and are then finer.
    """
    from vllm.model_executor.layers.quantization.online import fp8

    def own(largest: Any, _ranks: Any) -> Any:
        return largest

    module: Any = fp8
    module.amax_for_tp_weight_quant = module.amax_for_moe_weight_quant = own

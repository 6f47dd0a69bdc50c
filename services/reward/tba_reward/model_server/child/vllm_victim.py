"""The victim in vLLM, for victims of billions of parameters: continuous batching, and one computation of a prompt for
all replies to it.

vLLM runs in this process, as it does in a searcher (docs/adr/0011-vllm-in-the-process.md). The service watches, kills
and restarts this process already, so that a server or an engine process would add work and protect from nothing.
"""

# pyright: reportMissingImports=false
# (vLLM is an extra: types are checked without it too)
from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from tba.config.searcher import check_vllm_release
from tba.errors import ConfigError
from tba_reward.model_server.child.model_loader import LoadError, find_folder
from tba_reward.model_server.child.server import BrokenModelsError
from tba_reward.model_server.child.victim import Victim
from tba_reward.model_server.model_messages import VictimSettings, VllmSettings

_ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",  # its process group has one member
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
BLOCK_SIZE = 32
"""Tokens in one block of keys and values."""
_CACHE_VALUE_BYTES = 4
"""Of a key or value on the CPU, at most."""


class VllmVictim(Victim):
    """A victim whose replies vLLM generates.

    Raises:
        LoadError: this vLLM does not run on the device of the settings, or see `Victim`.
        Exception: vLLM raises anything on files or settings that it cannot use.
    """

    def __init__(self, settings: VictimSettings) -> None:
        files = settings.files
        folder = find_folder(files)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=files.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=files.trust_remote_code)
        positions = getattr(config.get_text_config(), "max_position_embeddings", sys.maxsize)
        super().__init__(settings, folder, config, tokenizer, min(tokenizer.model_max_length, positions))
        assert settings.vllm is not None
        self._device_type = _prepare(files.device)
        self._llm = self._start(folder, config.get_text_config(), settings.vllm)
        # what vLLM refuses only at the first token is refused now
        self._llm.generate([{"prompt_token_ids": [0]}], self._params(0, max_tokens=1), use_tqdm=False)

    @property
    def device_type(self) -> str:
        """See `Victim`."""
        return self._device_type

    def generate(self, prompts: Sequence[list[int]], seeds: Sequence[int]) -> list[list[int] | None]:
        """Return the tokens of one reply to each prompt (see `Victim.generate`).

        Raises:
            BrokenModelsError: vLLM failed; what it still holds would get into the next batch.
        """
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        # one request for each reply, and not `n`: vLLM would number the seeds of the replies itself
        params = [self._params(seed, max_tokens=self.max_reply_tokens) for seed in seeds]
        try:
            outputs = self._llm.generate(inputs, params, use_tqdm=False)
        except Exception as error:
            raise BrokenModelsError(f"vLLM failed: {type(error).__name__}: {error}") from error
        replies = [output.outputs[0] for output in outputs]
        reasons = {reply.finish_reason for reply in replies} - {"stop", "length"}
        if reasons or len(replies) != len(prompts):
            raise BrokenModelsError(f"vLLM gave {len(replies)} of {len(prompts)} replies, ended with {reasons}")
        return [list(reply.token_ids) if math.isfinite(reply.cumulative_logprob) else None for reply in replies]

    def _params(self, seed: int, *, max_tokens: int) -> Any:
        import vllm

        return vllm.SamplingParams(
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=self._eos,
            ignore_eos=True,  # ignores only what vLLM takes for the end; ours are above
            detokenize=False,
            logprobs=0,  # those of the drawn tokens: vLLM draws from logits that are not finite too
        )

    def _start(self, folder: Path, config: PreTrainedConfig, section: VllmSettings) -> Any:
        """Return a running engine."""
        import vllm

        on_cpu = self._device_type == "cpu"
        is_eager = on_cpu or section.enforce_eager
        if is_eager:
            _keep_transformers_unchanged()
        shortest = self._num_template_tokens + self.max_reply_tokens
        # as many as the largest batch has rows (`cut_batches`)
        num_rows = max(self.num_replies, section.batch_tokens // shortest)
        cache_bytes = section.kv_cache_bytes
        if on_cpu and cache_bytes is None:
            num_tokens = max(section.batch_tokens, self.num_replies * self._context_tokens)
            cache_bytes = (num_tokens + (num_rows + 1) * BLOCK_SIZE) * _cache_bytes_per_token(config)
        return vllm.LLM(
            str(folder),
            skip_tokenizer_init=True,
            trust_remote_code=self._settings.files.trust_remote_code,
            dtype=cast(Any, self._settings.files.dtype),
            max_model_len=self._context_tokens,
            max_num_seqs=num_rows,
            max_num_batched_tokens=section.max_batched_tokens,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            gpu_memory_utilization=section.gpu_memory_share,
            kv_cache_memory_bytes=cache_bytes,
            enforce_eager=is_eager,
            distributed_executor_backend="uni",
            generation_config="vllm",  # the model's own sampling defaults are not ours
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )


def _prepare(device: str) -> str:
    """Set vLLM's environment, import it, and return the type of the device that it runs on.

    Raises:
        LoadError: it is not that of the settings, or this vLLM is of an untried release.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # a process of its own would outlive a kill of this one for a while, with the memory of the GPU
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from vllm.platforms import current_platform

    try:
        check_vllm_release(vllm.__version__)
    except ConfigError as error:
        raise LoadError(str(error)) from None
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = device.partition(":")[0]
    if current_platform.device_type != wanted:
        raise LoadError(f"device {device!r}: the vLLM that is installed here runs on {current_platform.device_type}")
    return wanted


def _keep_transformers_unchanged() -> None:
    """Keep vLLM from changing classes of transformers for models that it runs through them (GPT-NeoX, for example)."""
    from vllm.model_executor.models.transformers import base

    # vLLM would prepare the class for compilation; a judge of the same class could then not be loaded
    base.support_torch_compile = lambda **_: lambda cls: cls  # pyright: ignore[reportPrivateImportUsage]


def _cache_bytes_per_token(config: PreTrainedConfig) -> int:
    """Return the bytes of the keys and values of one token on the CPU."""
    num_heads = config.num_attention_heads
    num_cached = getattr(config, "num_key_value_heads", None) or num_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return 2 * num_cached * head_size * config.num_hidden_layers * _CACHE_VALUE_BYTES

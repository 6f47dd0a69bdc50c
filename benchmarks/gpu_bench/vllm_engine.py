"""vLLM behind the engine protocol: what the suite checks on the CPU, with CUDA graphs and the kernels of a card."""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tba_searcher.engines.engine import Completion, Request
from tba_searcher.engines.vllm.engine import VllmEngine, VllmSettings
from tba_searcher.engines.weight_check import params_sha256
from tba_trainer.checkpoints.canary import MIN_TOLERANCE
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.parameters import published_tensors
from tba_trainer.model.policy import TORCH_DTYPES
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from benchmarks.gpu_bench.check import Bench, Findings, Skipped, seconds_of, synchronize
from benchmarks.gpu_bench.families import LIMITS, family_config
from benchmarks.gpu_bench.models import qwen2_config, random_model
from tba.config.searcher import SearcherVllmSection
from tba.versions import PolicyVersion
from tba.wire import Sampling

DTYPES = MappingProxyType(
    {
        "qwen2": ("bfloat16", "float32"),
        "llama": ("bfloat16", "float16"),
        "gpt_neox": ("bfloat16",),
        "gpt2": ("bfloat16", "float16"),
        "qwen3_moe": ("bfloat16",),
    }
)
"""GPT-NeoX runs through vLLM's adapter for models of transformers; the others are vLLM's own."""
_EXPERTS = MappingProxyType(
    {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True, "head_dim": 64}
)
CANARY_TOLERANCE = MIN_TOLERANCE["float32"]
OTHER_MODEL_MIN_GAP_NATS = 0.5
"""Of log-probs under another version with random weights: these are far apart."""
SIDE_BY_SIDE_S = 110
"""Most seconds of processes that run at the same time: less than the deadline in checks.py, so that findings stay."""
_CPU_HEADS = MappingProxyType({"num_attention_heads": 2, "num_key_value_heads": 1})
"""vLLM on the CPU takes heads of 32 and more; the tiny models have a width of 64."""
_OLD, _NEW = PolicyVersion(0, 0), PolicyVersion(1, 1)


def check_vllm(bench: Bench, found: Findings) -> None:
    """For each family and dtype: generate, update the weights in flight, and compare every log-prob with the trainer's.

    On a card all start at the same time, so their seconds are those of a busy machine.
    """
    need_vllm(bench)

    def part(family: str, dtype: str) -> Callable[[Findings], None]:
        return lambda own: _check_update(family, dtype, bench, own)

    if bench.quick:
        part("qwen2", "bfloat16")(found)
        return
    parts = {f"{family}_{dtype}": part(family, dtype) for family, dtypes in DTYPES.items() for dtype in dtypes}
    _side_by_side(parts, bench, found)


def check_vllm_bench(bench: Bench, found: Findings) -> None:
    """Tokens/s of a Qwen2.5-0.5B, the pause of an update against a bare copy, and the time from file to first token."""
    need_vllm(bench)
    config = qwen2_config("tiny", **_CPU_HEADS) if bench.quick else qwen2_config("0.5b")
    published = _publish(config, "bfloat16", bench)
    for num_slots in (4,) if bench.quick else (64, 256):
        with found.part(f"slots_{num_slots}"):
            _measure(published, num_slots, bench, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """Two versions of a model with random weights, as files, and in memory on the device."""

    folder: Path
    dtype: str
    paths: dict[PolicyVersion, Path]
    models: dict[PolicyVersion, Any]
    vocab_size: int


def need_vllm(bench: Bench) -> None:
    """Skip a check, with the reason, where vLLM is not installed, or where the test suite checks the same."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    if bench.quick and not bench.measures:
        raise Skipped("on the CPU the suite checks the vLLM engine (tests/integration/searcher); `bench` runs this")


def _side_by_side(parts: dict[str, Callable[[Findings], None]], bench: Bench, found: Findings) -> None:
    """Run parts in processes of their own at the same time; put what they find together, with their names in front."""
    context = multiprocessing.get_context("fork")  # nothing has touched the device here, and vLLM is not imported

    def child(run: Callable[[Findings], None], path: Path) -> None:
        own = Findings(path=path)
        try:
            run(own)
        except Exception:
            own.fail(traceback.format_exc()[-2000:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # threads of an engine must not keep it

    paths = {name: bench.folder / f"{name}.json" for name in parts}
    processes = {name: context.Process(target=child, args=(run, paths[name])) for name, run in parts.items()}
    for process in processes.values():
        process.start()
    end = perf_counter() + SIDE_BY_SIDE_S
    for name, process in processes.items():
        process.join(max(0.0, end - perf_counter()))
        if process.is_alive():
            process.kill()
            found.fail(f"{name}: not done after {SIDE_BY_SIDE_S} s")
        elif process.exitcode:
            found.fail(f"{name}: its process ended with code {process.exitcode}")
        if paths[name].is_file():
            _merge(Findings(**json.loads(paths[name].read_text())), name, found)


def _merge(own: Findings, name: str, found: Findings) -> None:
    for key, value in own.values.items():
        found.note(f"{name}_{key}", value)
    for failure in own.failures:
        found.fail(f"{name}: {failure}")


def _publish(config: Any, dtype: str, bench: Bench) -> _Published:
    """Write a model folder with the old version, and the new version's file beside it."""
    folder = bench.folder / f"{config.model_type}-{dtype}"
    folder.mkdir()
    made = {
        version: random_model(config, bench.device, dtype=TORCH_DTYPES[dtype], seed=version.step)
        for version in (_OLD, _NEW)
    }
    paths = {_OLD: folder / "model.safetensors", _NEW: bench.folder / f"{folder.name}-new.safetensors"}
    for version, path in paths.items():
        save_file(dict(published_tensors(made[version])), path, metadata={"format": "pt"})
    config.architectures = [type(made[_OLD]).__name__]
    config.dtype = TORCH_DTYPES[dtype]
    config.save_pretrained(folder)
    words = {"<pad>": 0, "<end>": 1, "<unknown>": 2}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unknown>")), pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(folder)
    return _Published(folder=folder, dtype=dtype, paths=paths, models=made, vocab_size=config.vocab_size)


def _start(
    published: _Published,
    num_slots: int,
    bench: Bench,
    found: Findings,
    *,
    share: float,
) -> VllmEngine:
    """Start an engine with the old version, as a searcher does; note the seconds, and what vLLM chose."""
    start = perf_counter()
    engine = VllmEngine(
        published.folder,
        (published.paths[_OLD],),
        _OLD,
        VllmSettings(
            num_slots=num_slots,
            max_prompt_tokens=256,
            max_response_tokens=512,
            seed=0,
            dtype=published.dtype,
            device=bench.device,
            section=SearcherVllmSection(gpu_memory_share=share),
        ),
    )
    found.note("start_s", perf_counter() - start)
    config: Any = engine._llm.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    found.note("attention", ", ".join(sorted(backends)))
    found.note("cudagraph_mode", str(config.compilation_config.cudagraph_mode))
    found.note("cache_tokens", (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size)
    return engine


def _check_update(family: str, dtype: str, bench: Bench, found: Findings) -> None:
    """Generate, and update in flight: every token's log-prob must be the trainer's under the version that it names."""
    config = family_config("qwen3" if family == "qwen3_moe" else family, quick=bench.quick)
    if bench.quick:
        config.update({name: value for name, value in _CPU_HEADS.items() if hasattr(config, name)})
    if family == "qwen3_moe":
        known = config.to_dict()
        config = AutoConfig.for_model(family, **{k: v for k, v in known.items() if k != "model_type"} | _EXPERTS)
    published = _publish(config, dtype, bench)
    # a rounding may send a token to other experts (docs/adr/0032-router-replay.md), so their gaps are only noted
    limit = math.inf if family == "qwen3_moe" else max(CANARY_TOLERANCE, LIMITS[dtype])
    engine = _start(published, 8 if bench.quick else 32, bench, found, share=0.1)
    try:
        _check_canary(engine, published, _OLD, found, limit)
        num_responses, length = (8, 24) if bench.quick else (48, 200)  # some wait for a slot
        _submit(engine, published, num_responses, length)
        completions = _steps(engine, length // 4)
        with ThreadPoolExecutor(1) as beside:
            staging = beside.submit(engine.stage_weights, (published.paths[_NEW],))
            start = perf_counter()
            while not staging.done() and perf_counter() - start < 0.2:
                completions += engine.step()
            staging.result()
        synchronize(bench.device)
        start = perf_counter()
        engine.load_weights((published.paths[_NEW],), _NEW)
        synchronize(bench.device)
        found.note("pause_s", perf_counter() - start)
        _check_canary(engine, published, _NEW, found, limit)
        completions += _steps(engine, None)
        if len(completions) != num_responses:
            found.fail(f"{len(completions)} of {num_responses} responses came back")
        _check_spans(completions, published, bench, found, limit)
    finally:
        engine.close()


def _check_canary(
    engine: VllmEngine, published: _Published, version: PolicyVersion, found: Findings, limit: float
) -> None:
    """Compare digest and log-probs of a version with those of the model in the trainer's hands."""
    model, name = published.models[version], "old" if version == _OLD else "new"
    if engine.params_sha256() != params_sha256(model):
        found.fail(f"the digest of the {name} version is not that of its tensors")
    rng = np.random.default_rng(1)
    prompt, response = (rng.integers(2, published.vocab_size, 8).astype(np.int32) for _ in range(2))
    expected = _logprobs(model, [prompt], [response])
    gaps = np.abs(engine.canary_logprobs(prompt.tolist(), response.tolist()) - expected)
    found.at_most(f"{name}_canary_gap_nats", float(gaps.max()), limit)


def _check_spans(
    completions: Sequence[Completion], published: _Published, bench: Bench, found: Findings, limit: float
) -> None:
    """Compare all sampled log-probs with those of the version that their span names, and with the other version's."""
    prompts = [_prompt(completion.request_id, published.vocab_size) for completion in completions]
    expected = {
        version: np.split(
            _logprobs(model, prompts, [c.response_tokens for c in completions]),
            np.cumsum([len(c.response_tokens) for c in completions])[:-1],
        )
        for version, model in published.models.items()
    }
    for version, other in ((_OLD, _NEW), (_NEW, _OLD)):
        own_gaps, other_gaps = list[NDArray[np.float32]](), list[NDArray[np.float32]]()
        for index, completion in enumerate(completions):
            for span in completion.version_spans:
                if span.version == version:
                    part = slice(span.start, span.end)
                    logprobs = completion.sampler_logprobs[part]
                    own_gaps.append(np.abs(logprobs - expected[version][index][part]))
                    other_gaps.append(np.abs(logprobs - expected[other][index][part]))
        name = "old" if version == _OLD else "new"
        if not own_gaps:
            found.fail(f"no token has the {name} version")
            continue
        gaps = np.concatenate(own_gaps)
        found.note(f"{name}_tokens", len(gaps))
        found.at_most(f"{name}_mean_gap_nats", float(gaps.mean()), limit / 2)
        found.note(f"{name}_max_gap_nats", float(gaps.max()))
        found.at_least(
            f"{name}_gap_to_other_version_nats", float(np.concatenate(other_gaps).mean()), OTHER_MODEL_MIN_GAP_NATS
        )
    num_in_flight = sum(len(completion.version_spans) == 2 for completion in completions)
    found.at_least("responses_with_two_versions", num_in_flight, 1)


def _measure(published: _Published, num_slots: int, bench: Bench, found: Findings) -> None:
    own = Findings()
    engine = _start(published, num_slots, bench, own, share=0.5)
    try:
        length = 16 if bench.quick else 256
        _generate(engine, published, num_slots, 8, name="warm-up")
        start = perf_counter()
        completions = _generate(engine, published, 2 * num_slots, length)
        seconds = perf_counter() - start
        own.note("tokens_per_s", sum(len(c.response_tokens) for c in completions) / seconds)
        _submit(engine, published, num_slots, length, name="update")
        _steps(engine, length // 2)
        start = perf_counter()
        _steps(engine, 4)
        own.note("step_s", (perf_counter() - start) / 4)
        paths = (published.paths[_NEW],)
        start = perf_counter()
        engine.stage_weights(paths)
        staged = perf_counter()
        engine.load_weights(paths, _NEW)
        synchronize(bench.device)
        loaded = perf_counter()
        engine.step()  # recomputes all keys and values
        own.note("stage_s", staged - start)
        own.note("pause_s", loaded - staged)
        own.note("first_step_after_s", perf_counter() - loaded)
        own.note("file_to_first_token_s", perf_counter() - start)
        own.note("bare_copy_s", _bare_copy_s(published, bench))
        _steps(engine, None)
    finally:
        engine.close()
        _merge(own, f"slots_{num_slots}", found)


def _bare_copy_s(published: _Published, bench: Bench) -> float:
    """Return the seconds to copy all parameters from pinned memory of the host onto the device, one after another."""
    targets = list(published.models[_OLD].parameters())
    sources = [parameter.detach().cpu() for parameter in published.models[_NEW].parameters()]
    if bench.device == "cuda":
        sources = [source.pin_memory() for source in sources]

    def copy() -> None:
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    return seconds_of(copy, bench.device)


def _prompt(request_id: str, vocab_size: int) -> NDArray[np.int32]:
    """Return the prompt of a request, a function of its id; eight requests share one."""
    rng = np.random.default_rng(int(request_id.rpartition("-")[2]) // 8)
    return rng.integers(2, vocab_size, int(rng.integers(4, 64))).astype(np.int32)


def _submit(engine: VllmEngine, published: _Published, num_requests: int, length: int, *, name: str = "r") -> None:
    for index in range(num_requests):
        request_id = f"{name}-{index}"
        engine.submit(
            Request(
                request_id=request_id,
                prompt_tokens=tuple(_prompt(request_id, published.vocab_size).tolist()),
                sampling=Sampling.of(1.0),
                max_response_tokens=length,
                eos_ids=(),
            )
        )


def _steps(engine: VllmEngine, num_steps: int | None) -> list[Completion]:
    """Run so many steps, or all that there are; return the completions."""
    completions: list[Completion] = []
    done = 0
    while (engine.num_active or engine.num_waiting) and done != num_steps:
        completions += engine.step()
        done += 1
    return completions


def _generate(
    engine: VllmEngine, published: _Published, num_requests: int, length: int, *, name: str = "r"
) -> list[Completion]:
    _submit(engine, published, num_requests, length, name=name)
    return _steps(engine, None)


@torch.no_grad()
def _logprobs(
    model: Any, prompts: Sequence[NDArray[np.int32]], responses: Sequence[NDArray[np.int32]]
) -> NDArray[np.float32]:
    """Return the trainer's log-probs [T] of all response tokens, in the published dtype."""
    policy = LogprobModel(model, temperature=1.0)
    return policy.token_logprobs(pack_sequences(prompts, responses, policy.device)).float().cpu().numpy()

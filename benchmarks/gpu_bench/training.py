"""A whole optimizer step of the trainer's learner, and torch.compile of its layers."""

from __future__ import annotations

import copy
import os
import warnings
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from tba_trainer.learner.forward_backward import pack_rollouts
from tba_trainer.learner.learner import Learner
from tba_trainer.model import packing
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.policy import compile_layers, prepare
from torch import Tensor

from benchmarks.gpu_bench.check import Bench, Findings, seconds_of, synchronize
from benchmarks.gpu_bench.models import (
    direction_error,
    gradient_of,
    make_batch,
    make_learner,
    num_tokens_of,
    qwen2_config,
    random_model,
    recipe_of,
    relative_error,
)
from tba.wire import Batch

PRESETS = ("tba_prime", "grpo", "tb")
MAX_GRADIENT_ERROR = 0.1
"""Of the direction of the gradient in bfloat16, relative to that in float32."""
MAX_NORM_ERROR = 0.05
MAX_SYNCS = 2
"""Host syncs per micro-batch: one for what is read of it, and the few of the whole step."""
NUM_KERNELS, NAME_CHARS = 8, 90


def check_step(bench: Bench, found: Findings) -> None:
    """Make a step of each preset in bfloat16 and float32 on the same batch, the former twice."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or torch's switch refuses cuBLAS
    config = qwen2_config("tiny" if bench.quick else "0.5b-4-layers")
    start = random_model(config, bench.device)
    longest = 64 if bench.quick else 512
    policy = LogprobModel(copy.deepcopy(start), temperature=1.0)
    batch = make_batch(2 if bench.quick else 6, 4, longest, config.vocab_size, policy=policy)
    del policy
    found.note("num_tokens", num_tokens_of(batch))
    for preset in PRESETS:
        with found.part(preset):
            _check_preset(bench, found, preset, start, batch)
    for way in ("usual", "buckets", "deterministic"):
        with found.part(f"repeated_{way}"):
            _repeat(bench, found, way, _learner(bench, "grpo", "bfloat16", start), batch)
    with found.part("host_syncs"):
        _count_syncs(bench, found, _learner(bench, PRESETS[0], "bfloat16", start), batch)
    if bench.device == "cuda":
        with found.part("kernels"):
            _note_kernels(found, _learner(bench, PRESETS[0], "bfloat16", start), batch)


def _learner(bench: Bench, preset: str, dtype: str, start: Any, **trainer: Any) -> Learner:
    sections = {"compute_dtype": dtype, "micro_batch_tokens": 256 if bench.quick else 1024, **trainer}
    return make_learner(copy.deepcopy(start), recipe_of(bench, objective={"preset": preset}, trainer=sections))


def _gradients(learner: Learner, batch: Batch) -> dict[str, float | None]:
    return learner.gradients(batch, step=1, policy_ages=[1] * len(batch.rollouts))


def _check_preset(bench: Bench, found: Findings, preset: str, start: Any, batch: Batch) -> None:
    losses: dict[str, float] = {}
    norms: dict[str, float] = {}
    gradients: dict[str, Tensor] = {}  # clipped to norm 1
    for dtype in ("float32", "bfloat16"):
        learner = _learner(bench, preset, dtype, start)
        metrics = _gradients(learner, batch)
        losses[dtype], norms[dtype] = float(metrics["loss"] or 0.0), float(metrics["grad_norm"] or 0.0)
        gradients[dtype] = gradient_of(learner.model)
        if dtype == "bfloat16":
            learner.apply(step=1, lineage=1)
            moved = max(float(p.detach().abs().max()) for p in learner.model.parameters())
            if not torch.isfinite(torch.tensor(moved)):
                found.fail(f"{preset}: a weight is not finite after the step")
    found.note(f"{preset}_loss_fp32", losses["float32"])
    found.note(f"{preset}_loss_bf16", losses["bfloat16"])
    error = direction_error(gradients["bfloat16"], gradients["float32"])
    found.at_most(f"{preset}_gradient_error", error, MAX_GRADIENT_ERROR)
    found.at_most(f"{preset}_norm_error", abs(norms["bfloat16"] / norms["float32"] - 1), MAX_NORM_ERROR)


def _repeat(bench: Bench, found: Findings, way: str, learner: Learner, batch: Batch) -> None:
    """Compute the same gradient three times, in the usual way, without flash attention, or with torch's switch."""
    head_dim = 0 if way == "buckets" else packing.FLASH_MAX_HEAD_DIM
    gradients, seconds = [], []
    torch.use_deterministic_algorithms(way == "deterministic")
    try:
        with patch.object(packing, "FLASH_MAX_HEAD_DIM", head_dim):
            for _ in range(3):
                synchronize(bench.device)
                begin = perf_counter()
                _gradients(learner, batch)
                synchronize(bench.device)
                seconds.append(perf_counter() - begin)
                gradients.append(gradient_of(learner.model))
    except RuntimeError as error:  # an op has no such algorithm
        found.note(f"repeated_{way}_refused", str(error)[:300])
        return
    finally:
        torch.use_deterministic_algorithms(False)
    found.note(f"repeated_{way}_ms", 1e3 * min(seconds))
    error = max(relative_error(each, gradients[0]) for each in gradients[1:])
    found.at_most(f"repeated_{way}_error", error, 1e-2)


def _count_syncs(bench: Bench, found: Findings, learner: Learner, batch: Batch) -> None:
    """Count where the host waits for the device: torch warns at each place."""
    if bench.device == "cpu":
        found.note("host_syncs", "counted on cuda alone")
        return
    _gradients(learner, batch)  # ref log-probs are in the cache from here on
    sites: Counter[str] = Counter()
    num_micro_batches = _count_micro_batches(learner, batch)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _gradients(learner, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchroniz" in str(warning.message):
            sites[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
    found.note("num_micro_batches", num_micro_batches)
    found.note("host_sync_sites", ", ".join(f"{site} x{count}" for site, count in sites.most_common(12)))
    found.at_most("host_syncs_per_micro_batch", sum(sites.values()) / num_micro_batches, MAX_SYNCS)


def _count_micro_batches(learner: Learner, batch: Batch) -> int:
    """Return the number of passes with gradient of a step."""
    passes = []
    hook = learner.model.base_model.register_forward_hook(
        lambda *_: passes.append(1) if torch.is_grad_enabled() else None
    )
    try:
        _gradients(learner, batch)
    finally:
        hook.remove()
    return max(1, len(passes))


def _note_kernels(found: Findings, learner: Learner, batch: Batch) -> None:
    """Note which kernels take the time of a step, and that attention is flash attention."""
    from torch.profiler import ProfilerActivity, profile

    _gradients(learner, batch)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        begin = perf_counter()
        _gradients(learner, batch)
        torch.cuda.synchronize()
        wall_s = perf_counter() - begin
    times: Counter[str] = Counter()
    for event in profiler.key_averages():
        times[event.key] += event.self_device_time_total
    total = sum(times.values()) or 1
    found.note("device_busy_share", total / 1e6 / wall_s)
    names = [f"{_short(name)} {100 * us / total:.0f}%" for name, us in times.most_common(NUM_KERNELS)]
    found.note("kernels", "; ".join(names))
    if not any("flash" in name.lower() for name in times):
        found.fail(f"no flash attention among {len(times)} kernels of a step in bfloat16")


def _short(kernel: str) -> str:
    for part in ("void ", "at::native::", "(anonymous namespace)::", "elementwise_kernel", "gpu_kernel_impl"):
        kernel = kernel.replace(part, "")
    return kernel[:NAME_CHARS]


def check_compile(bench: Bench, found: Findings) -> None:
    """Compare compiled layers with eager ones, and count programs over several sizes."""
    from torch._dynamo.utils import counters

    config = qwen2_config("tiny" if bench.quick else "0.5b-4-layers")
    start = random_model(config, bench.device)
    longest = 64 if bench.quick else 512
    batches = [make_batch(2, 4 * n, longest, config.vocab_size, seed=n) for n in (1, 2, 3)]
    plain = prepare(copy.deepcopy(start), None, False)
    compiled = prepare(copy.deepcopy(start), None, False)
    policies = [LogprobModel(m, temperature=1.0, autocast_dtype=torch.bfloat16) for m in (plain, compiled)]
    compile_layers(compiled, backend="eager" if bench.quick else "inductor")
    for number, batch in enumerate(batches):
        results, seconds = [], []
        for policy in policies:
            sequences = pack_rollouts(batch.rollouts, policy.device)
            policy.model.zero_grad(set_to_none=True)
            begin = perf_counter()
            values = policy.token_logprobs(sequences)
            values.sum().backward()
            synchronize(bench.device)
            seconds.append(perf_counter() - begin)
            results.append((values.detach(), gradient_of(policy.model)))
        (one, one_gradient), (two, two_gradient) = results
        found.note(f"compiled_pass_{number + 1}_s", seconds[1])
        found.at_most(f"gap_{number + 1}_nats", float((one - two).abs().max()), 0.1)
        found.at_most(f"gradient_error_{number + 1}", direction_error(two_gradient, one_gradient), MAX_GRADIENT_ERROR)
        found.note(f"programs_{number + 1}", counters["stats"]["unique_graphs"])
    if found.values["programs_3"] != found.values["programs_1"]:
        found.fail(
            f"{found.values['programs_1']} programs after the first size, {found.values['programs_3']} at the end"
        )
    if bench.measures:
        _time_compiled(bench, found, policies, batches[-1])


def _time_compiled(bench: Bench, found: Findings, policies: list[LogprobModel], batch: Batch) -> None:
    times = []
    for policy in policies:
        sequences = pack_rollouts(batch.rollouts, policy.device)
        times.append(seconds_of(lambda p=policy, s=sequences: p.token_logprobs(s).sum().backward(), bench.device))
    found.note("eager_ms", 1e3 * times[0])
    found.note("compiled_ms", 1e3 * times[1])
    found.note("gain", times[0] / times[1])

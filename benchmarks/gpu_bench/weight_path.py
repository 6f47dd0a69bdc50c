"""From theta on the device to an engine on the device: snapshot, delta, staging, pause; and what the engine samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tba_searcher.engines.engine import Completion, EngineSettings, Request
from tba_searcher.engines.torch.engine import EmbeddedEngine
from tba_trainer.checkpoints.weight_files import WeightSnapshot, WeightSnapshotWriter, write_tensor_files
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.parameters import published_tensors
from tba_trainer.model.policy import TORCH_DTYPES, frozen_copy

from benchmarks.gpu_bench.check import Bench, Findings, seconds_of, synchronize
from benchmarks.gpu_bench.families import LIMITS, family_config
from benchmarks.gpu_bench.models import make_batch, make_learner, qwen2_config, random_model, recipe_of
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion, WeightVersions
from tba.wire import Manifest, Sampling

NEXT = PolicyVersion(1, 1)
SAMPLED = {
    "llama": ("float32", "bfloat16"),
    "qwen2": ("bfloat16", "float16"),
    "gpt_neox": ("float32", "bfloat16"),
    "gpt2": ("bfloat16",),
}
MAX_PAUSE_RATIO = 3.0
"""The load of staged weights by a bare copy of the same bytes from pinned memory of the host."""


def check_weight_path(bench: Bench, found: Findings) -> None:
    """Publish a version before and after a real step, bring the second to an engine by a delta, and load it."""
    size = "tiny" if bench.quick else "0.5b"
    recipe = recipe_of(
        bench,
        model={"dtype": "bfloat16"},
        # a rate of RL: few bfloat16 elements change in a step
        trainer={"compute_dtype": "bfloat16", "learning_rate": {"value": 1e-6}, "micro_batch_tokens": 4096},
        objective={"preset": "grpo"},
    )
    learner = make_learner(random_model(qwen2_config(size), bench.device), recipe)
    writer = WeightSnapshotWriter(learner.model, recipe, folder=bench.folder)
    num_bytes = 2 * sum(p.numel() for p in learner.model.parameters())
    found.note("version_gb", num_bytes / 1e9)
    seconds = seconds_of(lambda: list(published_tensors(learner.model, torch.bfloat16)), bench.device, rounds=2)
    found.note("device_to_host_gb_per_s", num_bytes / 1e9 / seconds)
    first = _timed(found, "snapshot_s", lambda: writer.take(START, None))
    _timed(found, "snapshot_files_s", first.write)
    batch = make_batch(2, 4, 64 if bench.quick else 512, learner.model.config.vocab_size)
    learner.gradients(batch, step=1, policy_ages=[1] * len(batch.rollouts))
    learner.apply(step=1, lineage=1)
    second = _timed(found, "snapshot_again_s", lambda: writer.take(NEXT, START))
    second.write()
    versions = WeightVersions(FileStore(bench.folder / "store"), "gpu")
    learner.model.config.save_pretrained(bench.folder / "model")
    whole = _timed(found, "publish_whole_s", lambda: publish(versions, bench.folder, first, None))
    held = LocalVersion(START, first.paths, whole)
    delta = _timed(found, "publish_delta_s", lambda: publish(versions, bench.folder, second, held))
    found.note("delta_share", delta.delta_bytes / num_bytes if delta.delta is not None else 1.0)
    local = _timed(found, "fetch_delta_s", lambda: versions.download_tensors(NEXT, bench.folder / "local", held=[held]))
    if local.route != "delta":
        found.fail(f"the version came by route {local.route!r}, not by its delta")
    _load(bench, found, first, whole, local)


def publish(versions: WeightVersions, folder: Path, snapshot: WeightSnapshot, base: LocalVersion | None) -> Manifest:
    """Publish a snapshot as the trainer does, every process of it its share."""
    return versions.publish(
        version=snapshot.version,
        parent=snapshot.parent,
        dtype=snapshot.dtype,
        tensors_paths=snapshot.paths,
        files={"config.json": folder / "model" / "config.json"},
        canary=snapshot.canary,
        torch_version=torch.__version__,
        transformers_version="gpu",
        base=base,
        others=snapshot.others if snapshot.is_share else None,
    )


def _load(bench: Bench, found: Findings, first: WeightSnapshot, manifest: Manifest, local: LocalVersion) -> None:
    """Measure the pause of an engine that takes the version, cold and staged."""
    folder = first.paths[0].parent
    (folder / "config.json").write_bytes((bench.folder / "model" / "config.json").read_bytes())
    engine = EmbeddedEngine(folder, START, _settings(bench, "bfloat16"))
    engine.verify(manifest)
    pins = bench.device == "cuda"
    host = [torch.empty_like(p, device="cpu", pin_memory=pins) for p in engine._model.parameters()]
    targets = [torch.empty_like(p) for p in engine._model.parameters()]
    bare_s = seconds_of(lambda: [t.copy_(h) for t, h in zip(targets, host, strict=True)], bench.device)
    sources = list(engine._model.parameters())
    device_s = seconds_of(lambda: [t.copy_(s) for t, s in zip(targets, sources, strict=True)], bench.device)
    found.note("bare_copy_from_host_s", bare_s)
    found.note("bare_copy_on_device_s", device_s)
    _timed(found, "cold_load_s", lambda: engine.load_weights(local.paths, NEXT), bench.device)
    engine.load_weights(first.paths, START)
    _timed(found, "stage_s", lambda: engine.stage_weights(local.paths))
    staged_s = _seconds(lambda: engine.load_weights(local.paths, NEXT), bench.device)
    found.note("staged_load_s", staged_s)
    _timed(found, "verify_s", lambda: engine.verify(local.manifest), bench.device)  # raises where the digest differs
    ratio = staged_s / bare_s
    if bench.quick:  # of microseconds: no measure
        found.note("staged_load_by_bare_copy", ratio)
    else:
        found.at_most("staged_load_by_bare_copy", ratio, MAX_PAUSE_RATIO)
    engine.close()


def _settings(bench: Bench, dtype: str, *, num_slots: int = 16, most: int = 64) -> EngineSettings:
    return EngineSettings(
        num_slots=num_slots,
        max_prompt_tokens=most,
        max_response_tokens=most,
        seed=0,
        dtype=dtype,
        device=bench.device,
    )


def _seconds(call: Any, device: str) -> float:
    synchronize(device)
    begin = perf_counter()
    call()
    synchronize(device)
    return perf_counter() - begin


def _timed(found: Findings, name: str, call: Any, device: str = "cpu") -> Any:
    result: list[Any] = []
    found.note(name, _seconds(lambda: result.append(call()), device))
    return result[0]


def check_torch_engine(bench: Bench, found: Findings) -> None:
    """Sample with an update in flight; compare each sampled log-prob with the trainer's, under the version it names."""
    for family, dtypes in {"qwen2": ("float32",)}.items() if bench.quick else SAMPLED.items():
        config = family_config(family, quick=bench.quick)
        models = [random_model(config, bench.device, seed=seed) for seed in (0, 1)]
        folders = [bench.folder / f"{family}-{seed}" for seed in (0, 1)]
        for dtype in dtypes:
            with found.part(f"{family}_{dtype}"):
                published = [frozen_copy(model, TORCH_DTYPES[dtype]) for model in models]
                for model, folder in zip(published, folders, strict=True):
                    _save(model, folder)
                _check_sampling(bench, found, f"{family}_{dtype}", dtype, published, folders)
    if bench.measures:
        with found.part("speed"):
            _time_engine(bench, found)


def _save(model: Any, folder: Path) -> None:
    """Write a model as the trainer publishes it: parameters by their own names."""
    model.config.save_pretrained(folder)
    [path] = write_tensor_files(published_tensors(model), folder, stem="model", max_bytes=2**40)
    path.rename(folder / "model.safetensors")


def _check_sampling(
    bench: Bench, found: Findings, name: str, dtype: str, models: Sequence[Any], folders: Sequence[Path]
) -> None:
    engine = EmbeddedEngine(folders[0], START, _settings(bench, dtype))
    path = folders[1] / "model.safetensors"
    requests = _requests(24, models[0].config.vocab_size, longest=12 if bench.quick else 60)
    for request in requests:
        engine.submit(request)
    completions = [completion for _ in range(4 if bench.quick else 20) for completion in engine.step()]
    engine.stage_weights([path])
    pause_s = _seconds(lambda: engine.load_weights([path], NEXT), bench.device)
    pause_s += _seconds(lambda: completions.extend(engine.step()), bench.device)  # recomputes keys and values
    found.note(f"{name}_pause_s", pause_s)
    while engine.num_active or engine.num_waiting:
        completions += engine.step()
    engine.close()
    policies = {v: LogprobModel(model, temperature=1.0) for v, model in zip((START, NEXT), models, strict=True)}
    prompts = {request.request_id: request.prompt_tokens for request in requests}
    gaps = np.concatenate([_gaps(bench, each, prompts[each.request_id], policies) for each in completions])
    most_spans = max(len(completion.version_spans) for completion in completions)
    found.note(f"{name}_num_tokens", len(gaps))
    if len(completions) != len(requests) or most_spans < 2:
        found.fail(f"{name}: {len(completions)} of {len(requests)} completions, at most {most_spans} versions in one")
    limit = LIMITS[dtype]
    found.at_most(f"{name}_mean_gap_nats", float(gaps.mean()), limit / 2)
    found.note(f"{name}_max_gap_nats", float(gaps.max()))


def _requests(num: int, vocab_size: int, *, longest: int) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(
            request_id=f"r-{i}",
            prompt_tokens=tuple(rng.integers(2, vocab_size, int(rng.integers(2, longest))).tolist()),
            sampling=Sampling.of(1.0),
            max_response_tokens=longest,
            eos_ids=(),
        )
        for i in range(num)
    ]


@torch.no_grad()
def _gaps(
    bench: Bench, completion: Completion, prompt: Sequence[int], policies: dict[PolicyVersion, LogprobModel]
) -> NDArray[np.float64]:
    """Return |engine - trainer log-prob| of every token, each under the version that sampled it. [R]"""
    sequences = pack_sequences([np.array(prompt, dtype=np.int32)], [completion.response_tokens], bench.device)
    expected = np.zeros(len(completion.response_tokens))
    for span in completion.version_spans:
        logprobs = policies[span.version].token_logprobs(sequences).float().cpu().numpy()
        expected[span.start : span.end] = logprobs[span.start : span.end]
    return np.abs(completion.sampler_logprobs - expected)


def _time_engine(bench: Bench, found: Findings) -> None:
    """Measure tokens/s of a 0.5B model with many slots."""
    model = random_model(qwen2_config("tiny" if bench.quick else "0.5b"), bench.device, dtype=torch.bfloat16)
    folder, vocab_size = bench.folder / "speed", model.config.vocab_size
    _save(model, folder)
    del model
    for num_slots in (8,) if bench.quick else (64, 256):
        longest = 16 if bench.quick else 128
        engine = EmbeddedEngine(folder, START, _settings(bench, "bfloat16", num_slots=num_slots, most=longest))
        for request in _requests(num_slots, vocab_size, longest=longest):
            engine.submit(request)
        completions = engine.step()  # prefill, and what is compiled at first use
        begin = perf_counter()
        while engine.num_active or engine.num_waiting:
            completions += engine.step()
        seconds = perf_counter() - begin
        num_tokens = sum(len(c.response_tokens) for c in completions) - num_slots
        found.note(f"slots_{num_slots}_tokens_per_s", num_tokens / seconds)
        engine.close()

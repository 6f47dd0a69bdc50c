"""Cases for the vLLM engine with weights in 8 bits; vllm_cases.py and vllm_ranks_cases.py run them with one rank and
with two. Each uses one engine."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tba_searcher.engines.vllm.engine import VllmEngine
from tba_trainer.checkpoints.canary import EIGHT_BIT_TOLERANCE

from tba.config.searcher import SearcherVllmSection
from tba.store import FileStore
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion, WeightVersions
from tba.weights.adapter import AdapterFile
from tba.wire import Sampling
from tests.support.engine_contract import V1, Bench, Model, finish, make_request

DELTA, ADAPTER = PolicyVersion(1, 5), PolicyVersion(1, 6)
LAYER = "model.layers.0.self_attn.o_proj"
"""The layer that the adapter changes."""
RANK, ALPHA = 2, 1
PROMPT, RESPONSE = tuple(range(3, 11)), tuple(range(11, 23))
LEAST_GAP = 0.003
"""Smallest mean difference in nats between log-probs in float32 and in 8 bits; below it nothing was rounded."""
MATRIX_FACTOR = 0.5
"""Factor on all matrices of the contract's models, whose logits are so large that 8 bits change them by nats."""


EIGHT_BITS = SearcherVllmSection(quantization="fp8_per_channel")


def versions_of_each_kind(bench: Bench) -> tuple[dict[PolicyVersion, LocalVersion], dict[PolicyVersion, Model]]:
    """Publish the old model as 0-0, the new one whole, a delta to it, and an adapter of the old one; download them.

    Returns:
        The downloaded files of each version, and its model in float32.
    """
    versions = WeightVersions(FileStore(bench.folder / "store"), "contract")
    old, new = (calmer(bench, model) for model in (bench.old, bench.new))
    changed, merged = load_file(new.tensors), load_file(old.tensors)
    for tensor in changed.values():
        tensor.view(-1)[::50] *= 2.0
    (num_outputs, num_inputs), generator = merged[f"{LAYER}.weight"].shape, torch.Generator()
    a, b = torch.randn(RANK, num_inputs, generator=generator), torch.randn(num_outputs, RANK, generator=generator)
    merged[f"{LAYER}.weight"] += ALPHA / RANK * b @ a
    path = bench.folder / "adapter.safetensors"
    save_file({f"base_model.model.{LAYER}.lora_{name}.weight": each for name, each in (("A", a), ("B", b))}, path)
    models = {START: old, V1: new, DELTA: _other(bench, "changed", changed), ADAPTER: _other(bench, "merged", merged)}
    held = dict[PolicyVersion, LocalVersion]()

    def publish(version: PolicyVersion, what: Sequence[Path] | AdapterFile, base: LocalVersion | None = None) -> None:
        canary = bench.manifest(models[version], version).canary
        manifest = versions.publish(
            version=version, parent=None, dtype="float32", tensors_paths=what,
            files={"config.json": bench.old.folder / "config.json"},
            canary=canary.model_copy(update={"tolerance": EIGHT_BIT_TOLERANCE}),
            torch_version="", transformers_version="", base=base,
        )  # fmt: skip
        assert (manifest.delta is not None, manifest.adapter is not None) == (version == DELTA, version == ADAPTER)
        bases = [] if base is None else [base]
        held[version] = versions.download_tensors(version, bench.folder / f"downloaded-{version}", held=bases)

    publish(START, [old.tensors])
    publish(V1, [new.tensors])
    publish(DELTA, [models[DELTA].tensors], held[V1])
    publish(ADAPTER, AdapterFile(path=path, rank=RANK, alpha=ALPHA, fan_in_fan_out=False), held[START])
    return held, models


def calmer(bench: Bench, model: Model) -> Model:
    """Return a copy of a contract model with smaller logits (see MATRIX_FACTOR)."""
    tensors = {n: each * (MATRIX_FACTOR if each.dim() == 2 else 1.0) for n, each in load_file(model.tensors).items()}
    return _other(bench, f"calm-{model.folder.name}", tensors)


def _other(bench: Bench, name: str, tensors: dict[str, torch.Tensor]) -> Model:
    """Return a copy of the old model with other tensors."""
    path = bench.folder / f"{name}.safetensors"
    save_file(tensors, path)
    own = copy.deepcopy(bench.old.in_transformers)
    own.load_state_dict(tensors, strict=False)
    return dataclasses.replace(bench.old, tensors=path, in_transformers=own, in_trainer=copy.deepcopy(own))


def mean_gaps(engine: VllmEngine, models: Iterable[Model]) -> list[float]:
    """Return for each float32 model the mean gap in nats between its log-probs and the engine's, on one response."""
    found, request = engine.canary_logprobs(PROMPT, RESPONSE), make_request("", PROMPT, Sampling.of(1.0))
    expected = (model.trainer_logprobs(request, np.array(RESPONSE)) for model in models)
    return [float(np.abs(found - each).mean()) for each in expected]


def case_8_bits_follow_versions_of_each_kind_in_flight(bench: Bench) -> None:
    """Every version is rounded anew: going back to the first one gives exactly its log-probs again."""
    held, models = versions_of_each_kind(bench)
    engine = bench.fresh(models[START], dtype="bfloat16", section=EIGHT_BITS)
    assert isinstance(engine, VllmEngine)
    start = engine.canary_logprobs(PROMPT, RESPONSE)
    requests = [
        make_request(str(i), PROMPT[4 * i :], Sampling.of(1.0, seed=i), eos_ids=(), max_response_tokens=8)
        for i in range(2)
    ]
    for request in requests:
        engine.submit(request)
    for version in (V1, DELTA, ADAPTER):
        assert [engine.step() for _ in range(2)] == [[], []]
        engine.stage_weights(held[version].paths)
        engine.load_weights(held[version].paths, version)
        engine.verify(held[version].manifest)
    for completion in finish(engine):
        assert [span.version for span in completion.version_spans] == [START, V1, DELTA, ADAPTER]
        request, found = requests[int(completion.request_id)], completion.sampler_logprobs
        of_model = {name: each.trainer_logprobs(request, completion.response_tokens) for name, each in models.items()}
        own = np.concatenate([of_model[span.version][span.start : span.end] for span in completion.version_spans])
        of_own, of_start = (float(np.abs(found - each).mean()) for each in (own, of_model[START]))
        assert LEAST_GAP < of_own < of_start / 2
    engine.load_weights(held[START].paths, START)
    np.testing.assert_array_equal(engine.canary_logprobs(PROMPT, RESPONSE), start)

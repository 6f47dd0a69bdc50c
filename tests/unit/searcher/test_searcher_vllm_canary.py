"""The canary of vLLM in steps: it ends, with log-probs or an error, and leaves no request behind. No vLLM here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tba_searcher.engines.engine import EngineDiedError
from tba_searcher.engines.vllm.engine import VllmEngine

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


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.inputs", "vllm.inputs.engine")}
    modules["vllm"].SamplingParams = dict  # type: ignore[attr-defined]
    modules["vllm.inputs.engine"].tokens_input = lambda tokens: tokens  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("answers_at", [1, len(PROMPT) + len(RESPONSE)])
def test_a_canary_may_take_a_step_for_each_of_its_tokens(answers_at: int) -> None:
    vllm = Vllm(answers_at)
    np.testing.assert_array_equal(engine_of(vllm).canary_logprobs(PROMPT, RESPONSE), np.array([-3, -4], np.float32))
    assert vllm.num_steps == answers_at


def test_a_canary_that_is_not_computed_by_then_ends_with_an_error_and_the_next_one_can_be_asked() -> None:
    vllm = Vllm(None)
    engine = engine_of(vllm)
    with pytest.raises(EngineDiedError, match="vLLM does not compute the canary of 5 tokens"):
        engine.canary_logprobs(PROMPT, RESPONSE)
    assert vllm.num_steps == 5
    assert not vllm.requests
    vllm.answers_at = 7
    assert engine.canary_logprobs(PROMPT, RESPONSE).tolist() == [-3, -4]

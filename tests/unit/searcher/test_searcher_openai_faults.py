"""The engine behind an endpoint when the server is the wrong one, fails, or goes away (a made-up server).

What a real one does: tests/integration/searcher/test_searcher_openai.py.
"""

from __future__ import annotations

import concurrent.futures
import math
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from pydantic import ValidationError
from tba_searcher.engines.engine import EngineDiedError
from tba_searcher.engines.openai import engine as openai_engine
from tba_searcher.engines.openai import vllm_server
from tba_searcher.engines.openai.engine import OpenAiEngine, OpenAiSettings

from tba.config.searcher import OpenAiSection, SearcherSection
from tba.errors import ConfigError, UnauthorizedError
from tba.versions import START, PolicyVersion
from tba.wire import Sampling
from tests.support.engine_contract import finish, make_request
from tests.support.fake_completions import Answer, FakeServer, completion
from tests.support.tiny_model import make_tiny_model

REQUEST = make_request("r", (5, 6, 7), Sampling.of(1.0, seed=3), max_response_tokens=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    fake = FakeServer()
    monkeypatch.setenv("TBA_TEST_SERVER_TOKEN", fake.token)
    yield fake
    fake.close()


Build = Callable[..., OpenAiEngine]


@pytest.fixture
def build(model: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    made: list[OpenAiEngine] = []
    monkeypatch.setattr(openai_engine, "RETRY_S", 0.3)
    monkeypatch.setattr(openai_engine, "RESEND_AFTER_S", 0.05)

    def one(**section: Any) -> OpenAiEngine:
        found = OpenAiSection(url=server.url, token_env="TBA_TEST_SERVER_TOKEN", **section)
        settings = OpenAiSettings(num_slots=4, max_prompt_tokens=48, max_response_tokens=40, seed=1, section=found)
        made.append(OpenAiEngine(model, [model / "model.safetensors"], START, settings))
        return made[-1]

    yield one
    for engine in made:
        engine.close()


def raw(path: str, body: dict[str, Any], answer: Answer) -> Answer:
    is_sampled = path == "/v1/completions" and "prompt_logprobs" not in body
    return (200, completion(body["max_tokens"], logprob=-1.5)) if is_sampled else answer


def no_ids(path: str, body: dict[str, Any], answer: Answer) -> Answer:
    for choice in answer[1].get("choices", []):
        choice.pop("token_ids", None)
    return answer


def only(at: str, status: int, document: Any) -> Any:
    return lambda path, body, answer: (status, document) if path == at else answer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (only("/abort_requests", 404, {"detail": "Not Found"}), "offers no weight updates"),
        (only("/get_world_size", 404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
        (only("/v1/models", 200, {"data": [{"owned_by": "vllm", "max_model_len": 80}]}), "--max-model-len 88"),
        (raw, "--logprobs-mode processed_logprobs"),
        (no_ids, "token_ids"),
    ],
)
def test_a_server_that_can_be_no_engine_is_refused(build: Build, server: FakeServer, change: Any, words: str) -> None:
    server.change = change
    with pytest.raises(ConfigError, match=words):
        build()


def test_log_probs_are_checked_with_a_model_that_is_certain(build: Build, server: FakeServer) -> None:
    server.prompt_logprob = 0.0  # so with top-k 1 nothing is to be seen
    build()
    server.change = lambda path, body, answer: (
        (200, completion(body["max_tokens"], logprob=0.0))
        if "top_k" in body and "prompt_logprobs" not in body
        else answer
    )
    with pytest.raises(ConfigError, match="before temperature"):
        build()


def test_equally_likely_tokens_do_not_look_like_other_log_probs(build: Build, server: FakeServer) -> None:
    """Top-k 1 keeps both tokens of a tie, which are frequent among logits of 16 bits."""
    is_processed = True

    def change(path: str, body: dict[str, Any], answer: Answer) -> Answer:
        if body.get("top_k") == 1 and "prompt_logprobs" not in body:
            values = answer[1]["choices"][0]["logprobs"]["token_logprobs"]
            values[3:5] = [-math.log(2) if is_processed else -1.5] * 2
        return answer

    server.change = change
    build()
    is_processed = False
    with pytest.raises(ConfigError, match="before temperature"):
        build()


def test_copies_of_the_model_in_one_server_are_refused(build: Build, server: FakeServer) -> None:
    sizes = iter([4, 2])
    server.change = lambda path, _, answer: (200, {"world_size": next(sizes)}) if path == "/get_world_size" else answer
    with pytest.raises(ConfigError, match="2 copies"):
        build()


def test_settings_that_lack_something_are_refused(build: Build, server: FakeServer, monkeypatch: Any) -> None:
    server.token = "another"
    with pytest.raises(UnauthorizedError, match="401: Unauthorized"):
        build()
    server.token = "token-of-the-fake-server"
    with pytest.raises(ConfigError, match="weights_folder /absent"):
        build(weights_folder="/absent")
    monkeypatch.delenv("TBA_TEST_SERVER_TOKEN")
    with pytest.raises(ConfigError, match="TBA_TEST_SERVER_TOKEN is not set"):
        build()
    with pytest.raises(ValidationError, match=r"give openai\.url"):
        SearcherSection(engine="openai")


def test_a_response_that_the_server_breaks_off_goes_on(build: Build, server: FakeServer) -> None:
    engine, pieces = build(), iter([completion(4, finish_reason="stop")])
    server.change = lambda path, body, answer: (200, next(pieces, answer[1])) if path == "/v1/completions" else answer
    server.bodies.clear()
    engine.submit(REQUEST)
    (done,) = finish(engine)
    assert done.finish_reason == "length"
    assert done.response_tokens.tolist() == [5] * 10
    assert [(span.version, span.start, span.end) for span in done.version_spans] == [(START, 0, 10)]
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(3, 10), (7, 6)]
    assert server.bodies[0]["seed"] != server.bodies[1]["seed"], "the same random numbers would be drawn twice"


@pytest.mark.parametrize(("details", "num"), [(None, 3), ({"cached_tokens": None}, 3), ({"cached_tokens": 2}, 1)])
def test_prompt_tokens_from_the_cache_of_a_server_that_says_so_are_not_counted(
    build: Build, server: FakeServer, details: Any, num: int
) -> None:
    usage = {"prompt_tokens": 3, "prompt_tokens_details": details}
    server.change = lambda path, body, answer: (answer[0], answer[1] | {"usage": usage})
    engine = build()
    engine.submit(REQUEST)
    assert len(list(finish(engine))) == 1
    assert engine.num_prefilled_tokens == num


@pytest.mark.parametrize("failure", [None, (503, {}), (429, {})])
def test_a_call_that_is_cut_off_is_made_once_more(build: Build, server: FakeServer, failure: Answer | None) -> None:
    engine, failures = build(), iter([failure])
    server.change = lambda path, body, answer: next(failures, answer) if path == "/v1/completions" else answer
    server.bodies.clear()
    engine.submit(REQUEST)
    (done,) = finish(engine)
    assert done.response_tokens.tolist() == [5] * 10
    assert len({body["request_id"] for body in server.bodies}) == len(server.bodies) == 2


def test_what_is_finished_is_handed_out_before_a_failed_call_ends_the_engine(build: Build, server: FakeServer) -> None:
    engine, release = build(), threading.Event()

    def change(path: str, body: dict[str, Any], answer: Answer) -> Answer:
        if path != "/v1/completions":
            return answer
        release.wait(10)
        return (400, {"error": {"message": "too long by half"}}) if body["prompt"] == [5, 6, 7] else answer

    server.change = change
    engine.submit(REQUEST)
    engine.submit(make_request("other", (5, 6), REQUEST.sampling, max_response_tokens=10))
    assert engine.step() == []
    release.set()
    calls = [entry.call for entry in engine._open.values() if entry.call is not None]
    assert len(concurrent.futures.wait(calls, timeout=30).done) == 2  # so that one step sees both answers
    assert [done.request_id for done in engine.step()] == ["other"]
    with pytest.raises(EngineDiedError, match="request r: "):
        engine.step()


def test_keys_and_values_of_other_weights_are_not_used(build: Build, server: FakeServer) -> None:
    """Those that the server keeps in the host's memory or elsewhere neither; moving them may take a moment."""
    is_moving = iter([True])
    server.change = lambda path, body, answer: (
        (500, {"error": {"message": "moving"}}) if path == "/reset_prefix_cache" and next(is_moving, False) else answer
    )
    engine = build()
    assert [parse_qs(query)["reset_external"] for query in server.resets] == [["true"]] * 2
    engine.submit(REQUEST)
    list(finish(engine))
    assert server.bodies[-1]["cache_salt"] == server.label


def test_a_server_that_has_started_again_gets_no_other_weights(build: Build, model: Path, server: FakeServer) -> None:
    """It may have other settings now: a new engine looks at them."""
    files = [model / "model.safetensors"]
    engine = build()
    server.label = "default"
    with pytest.raises(EngineDiedError, match="started again"):
        engine.load_weights(files, PolicyVersion(1, 1))
    engine = build()

    def change(path: str, body: dict[str, Any], answer: Answer) -> Answer:
        if path != "/collective_rpc":
            return answer
        server.label = "default"
        return 500, {"error": {"message": "EngineCore died"}}

    server.change = change
    with pytest.raises(EngineDiedError, match="could not load version 1-1"):
        engine.load_weights(files, PolicyVersion(1, 1))


def test_a_server_that_hangs_is_noticed_before_calls_time_out(build: Build, server: FakeServer, monkeypatch) -> None:
    monkeypatch.setattr(openai_engine, "CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(vllm_server, "CONTROL_TIMEOUT_S", 0.5)
    engine = build()
    is_over = threading.Event()
    server.change = lambda path, body, answer: (is_over.wait(), None)[1]
    engine.submit(REQUEST)
    try:
        with pytest.raises(EngineDiedError, match="does not answer"):
            list(finish(engine))
    finally:
        is_over.set()


def odd(token_ids: list[int] | None = None, logprobs: list[float] | None = None) -> Any:
    """A response of two tokens, the last of which is this one."""
    found = completion(2)["choices"][0]
    found["token_ids"][1:] = token_ids or [5]
    found["logprobs"]["token_logprobs"][1:] = logprobs or [-0.5]
    return only("/v1/completions", 200, {"choices": [found]})


def minus_infinity(path: str, body: dict[str, Any], answer: Answer) -> Answer:
    return (200, completion(10, logprob=-9999.0)) if path == "/v1/completions" else answer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (only("/v1/completions", 400, {"error": {"message": "too long by half"}}), "too long by half"),
        (only("/v1/completions", 200, completion(0)), "answered request r without a token"),
        (lambda path, body, answer: None if path == "/v1/completions" else answer, "request r: .* does not answer"),
        (minus_infinity, "not finite"),
        (odd(logprobs=[math.nan]), "should be a finite number"),
        (odd(logprobs=[0.2]), "a log-prob of 0.2"),
        (odd(token_ids=[10**6]), "token id 1000000"),
        (odd(token_ids=[-1]), "token id -1"),
        (only("/v1/completions", 200, completion(2_000)), "2000 tokens, and at most 10 were asked for"),
        (only("/weight_info", 500, {"error": {"message": "EngineCore died"}}), "EngineCore died"),
    ],
)
def test_a_server_that_fails_for_good_ends_the_engine_by_name(build, server: FakeServer, change, words: str) -> None:
    engine = build()
    server.change = change
    engine.submit(REQUEST)
    with pytest.raises(EngineDiedError, match=words):
        list(finish(engine))


def test_only_a_folder_that_was_named_is_open_to_other_users(build: Build, tmp_path: Path, monkeypatch) -> None:
    for name in ("own", "named"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    build()
    build(weights_folder=str(tmp_path / "named"))
    modes = {name: [each.stat().st_mode & 0o777 for each in (tmp_path / name).iterdir()] for name in ("own", "named")}
    assert modes == {"own": [0o700], "named": [0o755]}

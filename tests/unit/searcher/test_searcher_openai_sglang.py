"""SGLang behind the engine for servers: what is refused, and the traps of its interface (a stand-in with a real model).

The contract of every engine on it: tests/integration/searcher/test_searcher_openai.py.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tba_searcher.engines.engine import EngineDiedError, EngineError
from tba_searcher.engines.openai.engine import OpenAiEngine, OpenAiSettings

from tba.config.searcher import OpenAiSection
from tba.errors import ConfigError
from tba.versions import START, PolicyVersion
from tba.wire import Sampling
from tests.support.engine_contract import finish, make_request, run_all
from tests.support.sglang_stand_in import Answer, SglangStandIn, sglang_stand_in
from tests.support.tiny_model import make_tiny_model

REQUEST = make_request("r", (5, 6, 7), Sampling(temperature=1.0), max_response_tokens=10, eos_ids=())
Build = Callable[..., OpenAiEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture
def server(model: Path) -> Iterator[SglangStandIn]:
    with sglang_stand_in(model) as found:
        yield found


@pytest.fixture
def build(model: Path, server: SglangStandIn) -> Iterator[Build]:
    made: list[OpenAiEngine] = []

    def one() -> OpenAiEngine:
        section = OpenAiSection(url=server.url)
        settings = OpenAiSettings(
            num_slots=16, max_prompt_tokens=48, max_response_tokens=40, seed=1, section=section, retry_s=0.3
        )
        made.append(OpenAiEngine(model, [model / "model.safetensors"], START, settings))
        return made[-1]

    yield one
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_req_input_len": 87}, "--context-length 94"),
        ({"dp_size": 2}, "holds 2 copies"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 2"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend file"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE"),
        ({"preferred_sampling_params": '{"min_p": 0.1}'}, "--preferred-sampling-params"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
    ],
)
def test_a_server_that_was_started_in_another_way_is_refused(
    build: Build, server: SglangStandIn, change: dict[str, Any], words: str
) -> None:
    server.info |= change
    with pytest.raises(ConfigError, match=words):
        build()


def test_log_probs_before_temperature_are_refused(build: Build, server: SglangStandIn) -> None:
    server.returns_original_logprob = True
    with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=0"):
        build()


def test_weights_that_tell_nothing_are_refused(build: Build, server: SglangStandIn) -> None:
    for parameter in server._model.parameters():
        parameter.data.zero_()
    with pytest.raises(ConfigError, match="all tokens equally likely"):
        build()


@pytest.mark.parametrize("owner", ["vllm-router", ""])
def test_a_server_of_another_kind_is_refused_by_its_name(build: Build, server: SglangStandIn, owner: str) -> None:
    server.change = lambda path, body, answer: (
        (200, {"data": [{"id": "m", "owned_by": owner}]}) if path == "/v1/models" else answer
    )
    with pytest.raises(ConfigError, match=f"says that {owner or 'nobody'} owns its models.*vLLM and SGLang"):
        build()


def test_a_server_without_the_label_is_refused(build: Build, server: SglangStandIn) -> None:
    server.change = lambda path, body, answer: (404, {"detail": "Not Found"}) if path == "/model_info" else answer
    with pytest.raises(ConfigError, match="offers no weight updates"):
        build()


@pytest.mark.parametrize(
    ("sampling", "change", "words"),
    [
        (Sampling(temperature=1.0, seed=3), {"enable_deterministic_inference": False}, "deterministic-inference"),
        (Sampling(temperature=1.0, top_k=5, top_p=0.9), {}, "give one of them"),
        (Sampling(temperature=1.0, top_p=0.9), {"sampling_mask_max_tokens": 32}, "--sampling-mask-max-tokens 33"),
        (Sampling(temperature=1.0, top_k=9), {"sampling_mask_max_tokens": 8}, "top_k 9 keeps up to 9 tokens"),
        (Sampling(temperature=1.0, top_k=1), {"sampling_mask_max_tokens": 0}, "SGLang 0.5.23"),
    ],
)
def test_requests_that_it_would_sample_in_another_way_are_refused(
    build: Build, server: SglangStandIn, sampling: Sampling, change: dict[str, Any], words: str
) -> None:
    server.info |= change
    engine = build()
    with pytest.raises(EngineError, match=words):
        engine.submit(dataclasses.replace(REQUEST, sampling=sampling))
    # at temperature 0 there is nothing to draw
    greedy = dataclasses.replace(sampling, temperature=0.0)
    run_all(engine, [dataclasses.replace(REQUEST, sampling=greedy)])


def test_an_abort_is_for_one_request_though_its_name_begins_others(build: Build, server: SglangStandIn) -> None:
    """SGLang aborts every id that begins with the given one: call 1 and calls 10 to 12."""
    engine = build()
    requests = [dataclasses.replace(REQUEST, request_id=str(n), max_response_tokens=40) for n in range(12)]
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.abort("0")
    done = list(finish(engine))
    lengths = {completion.request_id: len(completion.response_tokens) for completion in done}
    assert lengths == {str(n): 40 for n in range(1, 12)}
    calls = [body["rid"] for body in server.bodies if body.get("rid")]
    assert len(calls) == 12, "calls were broken off, and sent again"


def test_a_token_that_it_has_exchanged_ends_the_engine(build: Build, server: SglangStandIn) -> None:
    """SGLang replaces a token beyond the vocabulary by one that ends the response, and keeps the log-prob."""
    engine = build()

    def change(path: str, body: dict[str, Any], answer: Answer) -> Answer:
        if path == "/generate":
            answer[1]["meta_info"]["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
        return answer

    server.change = change
    engine.submit(REQUEST)
    with pytest.raises(EngineDiedError, match="ended a response for 'NaN happened'"):
        list(finish(engine))


def test_an_answer_of_other_weights_ends_the_engine_though_the_label_is_right(
    build: Build, server: SglangStandIn
) -> None:
    """What a router before two servers does: another one answers than the one whose label is read."""
    engine = build()

    def change(path: str, body: dict[str, Any], answer: Answer) -> Answer:
        if path == "/generate":
            answer[1]["meta_info"]["weight_version"] = "default"
        return answer

    server.change = change
    engine.submit(REQUEST)
    with pytest.raises(EngineDiedError, match=r"label 'default'.*several servers share its address"):
        list(finish(engine))


def test_an_error_in_a_good_answer_is_passed_on(build: Build, server: SglangStandIn) -> None:
    engine = build()
    server.change = lambda path, body, answer: (
        (200, {"error": {"message": "no worker is left"}}) if path == "/generate" else answer
    )
    engine.submit(REQUEST)
    with pytest.raises(EngineDiedError, match="meta_info: Field required: no worker is left"):
        list(finish(engine))


def test_no_number_as_log_prob_ends_the_engine(build: Build, server: SglangStandIn) -> None:
    engine = build()

    def change(path: str, body: dict[str, Any], answer: Answer) -> Answer:
        if path == "/generate":
            answer[1]["meta_info"]["output_token_logprobs"][0][0] = None
        return answer

    server.change = change
    engine.submit(REQUEST)
    with pytest.raises(EngineDiedError, match="not finite"):
        list(finish(engine))


def test_what_it_says_of_a_failed_load_is_passed_on(build: Build, model: Path, server: SglangStandIn) -> None:
    engine = build()
    engine._folders._at_server = Path("/absent")
    new = shutil.copy(model / "model.safetensors", model / "new.safetensors")  # else its folder is there already
    with pytest.raises(EngineError, match=r"Cannot find any model weights.*weights_folder") as raised:
        engine.load_weights([Path(new)], PolicyVersion(1, 1))
    assert not isinstance(raised.value, EngineDiedError), "it has its weights, and its label"


def test_log_probs_are_those_after_top_k(build: Build, server: SglangStandIn) -> None:
    engine = build()
    only = dataclasses.replace(REQUEST, sampling=Sampling(temperature=1.0, top_k=1))
    (completion,) = run_all(engine, [only]).values()
    np.testing.assert_array_equal(completion.sampler_logprobs, 0.0)


def test_keys_and_values_of_other_weights_are_not_used(build: Build, server: SglangStandIn) -> None:
    updates: list[dict[str, Any]] = []

    def change(path: str, body: dict[str, Any], answer: Answer) -> Answer:
        updates.extend([body] if path == "/update_weights_from_disk" else [])
        return answer

    server.change = change
    run_all(build(), [REQUEST])
    assert [body["flush_cache"] for body in updates] == [True]
    assert server.bodies[-1]["extra_key"] == server.weight_version == updates[0]["weight_version"]

"""The engine behind an endpoint against its servers (tests/support/generation_servers.py): the contract of every
engine, and what is its own. Requests take the server's time here, so other tests replace the cases that count steps."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tba_searcher.engines.engine import Completion, EngineDiedError, Request
from tba_searcher.engines.factory import build_engine
from tba_searcher.engines.openai import engine as openai_engine
from tba_searcher.engines.openai.engine import OpenAiEngine
from tba_searcher.engines.weight_check import swap_weights

from tba.errors import DigestError
from tba.versions import START, PolicyVersion
from tba.wire import Sampling
from tests.support.buffer import make_recipe
from tests.support.engine_contract import (
    CASES,
    LOGPROB_ATOL,
    NUM_SLOTS,
    ON_EVERY_MODEL,
    ON_ONE_MODEL,
    V1,
    Bench,
    Model,
    case_slots_are_counted_and_aborted_requests_forgotten,
    case_staged_weights_are_used_like_any_others,
    case_weights_in_flight_begin_a_span,
    finish,
    make_request,
    make_requests,
    raised,
    run_all,
    tokens_of,
)
from tests.support.generation_servers import CONTEXT_TOKENS, Served, vllm
from tests.support.tiny_model import CHARS, SPECIAL_TOKENS
from tests.support.vllm_cases import SIZES, Benches
from tests.support.vllm_greedy import TIMEOUT_S, why_not

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(TIMEOUT_S + 120)]
TOKEN = "token-of-the-server"
LONG_TOKENS = CONTEXT_TOKENS - 64
TIMED = (
    case_weights_in_flight_begin_a_span,
    case_slots_are_counted_and_aborted_requests_forgotten,
    case_staged_weights_are_used_like_any_others,
)
CONTRACT = [case for case in (*ON_EVERY_MODEL, *ON_ONE_MODEL) if case not in TIMED]


@dataclass(kw_only=True)
class ServerBench(Bench):
    server: Served


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[ServerBench]:
    if reason := why_not():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("vllm")
    shared = root / "shared"
    shared.mkdir()

    def make(folder: Path, tensors: Path, version: PolicyVersion, dtype: str, **sizes: int) -> OpenAiEngine:
        section = {"url": server.url, "token_env": "TBA_TEST_SERVER_TOKEN", "weights_folder": str(shared)}
        recipe = make_recipe(
            model={"path": str(folder), "dtype": dtype},
            searcher={"engine": "openai", "openai": section, **SIZES, **sizes},
        )
        engine = build_engine(recipe, tensors.parent, version, None, seed=1)
        assert isinstance(engine, OpenAiEngine)
        return engine

    models = Benches(make, root).of("llama")
    config = models.old.folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT_TOKENS}))
    cache = getattr(pytestconfig, "cache", None)  # not there with -p no:cacheprovider
    cache_folder = Path(cache.mkdir("vllm")) if cache else root
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TBA_TEST_SERVER_TOKEN", TOKEN)
        patch.setattr(openai_engine, "POLL_S", 0.001)  # so that requests are under way when a case looks
        with vllm(models.old.folder, root / "server.log", token=TOKEN, cache=cache_folder) as server:
            yield ServerBench(make, models.old, models.new, models.folder, server=server)
    assert list(shared.iterdir()) == [], "a closed engine has left its weights"


@pytest.fixture(autouse=True)
def one_engine_at_a_time(bench: ServerBench) -> Iterator[None]:
    """Every test makes its own: the server belongs to the engine that gave it weights last."""
    bench.spare = None
    yield
    while bench._kept:
        bench._kept.pop().close()


@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__.removeprefix("case_"))
def test_contract(bench: Bench, case: Any) -> None:
    assert case in [function for _, function in CASES.values()]
    case(bench)


def long_engine(bench: Bench) -> OpenAiEngine:
    """An engine whose responses take the server many seconds."""
    engine: Any = bench.make_engine
    made = engine(bench.old.folder, bench.old.tensors, START, "float32", max_response_tokens=LONG_TOKENS)
    bench._kept.append(made)
    return made


def test_an_update_begins_a_span_in_every_response_that_is_under_way(bench: ServerBench) -> None:
    """Twice, to weights that were staged and back; sampled tokens have the log-probs of the span's weights."""
    models = {START: bench.old, V1: bench.new, PolicyVersion(1, 5): bench.old}
    # one more than slots: it begins when another one has ended
    requests = make_requests(NUM_SLOTS + 1, temperatures=(1.0, 0.7), eos_ids=(), max_response_tokens=LONG_TOKENS)
    shapes = set[tuple[PolicyVersion, ...]]()
    for completion in generate_through_updates(long_engine(bench), bench, requests, models):
        request, tokens = requests[int(completion.request_id)], completion.response_tokens
        for span in completion.version_spans:
            part = slice(span.start, span.end)
            np.testing.assert_allclose(
                completion.sampler_logprobs[part],
                models[span.version].trainer_logprobs(request, tokens)[part],
                atol=LOGPROB_ATOL,
                rtol=0,
            )
        assert completion.version_spans[-1].end == len(tokens)
        shapes.add(tuple(span.version for span in completion.version_spans))
    assert {(START, V1, PolicyVersion(1, 5)), (PolicyVersion(1, 5),)} <= shapes


def generate_through_updates(
    engine: OpenAiEngine, bench: ServerBench, requests: list[Request], models: dict[PolicyVersion, Model]
) -> list[Completion]:
    """Generate, let every update begin when about ten more tokens of each response exist, and then cut them short.

    Responses are longer than a server gets to on the busiest machine, so none is complete before.
    """
    engine.stage_weights([models[V1].tensors])
    for request in requests:
        engine.submit(request)
    for version in list(models)[1:]:
        assert engine.step() == []
        enough = bench.server.num_generated() + 10 * NUM_SLOTS
        under_way = [entry.call for entry in engine._open.values() if entry.call is not None]
        while bench.server.num_generated() < enough:
            assert not any(call.done() for call in under_way), "a response is complete before the update"
            time.sleep(0.02)
        engine.load_weights([models[version].tensors], version)
        engine.verify(bench.manifest(models[version], version))
    for entry in engine._open.values():
        entry.request = dataclasses.replace(entry.request, max_response_tokens=len(entry.tokens) + 20)
    lengths = {name: entry.request.max_response_tokens for name, entry in engine._open.items()}
    done = list(finish(engine))
    assert {completion.request_id: len(completion.response_tokens) for completion in done} == lengths
    return done


def test_slots_are_counted_and_aborted_requests_forgotten(bench: Bench) -> None:
    requests = make_requests(NUM_SLOTS + 3, temperatures=(0.0,), eos_ids=(), max_response_tokens=400)
    short = make_request("short", (5, 6, 7), Sampling.of(0.0))
    engine = long_engine(bench)
    for request in requests:
        engine.submit(request)
    done = {completion.request_id for completion in engine.step()}  # on a slow machine a step may see some end
    left = [request.request_id for request in requests if request.request_id not in done]
    assert engine.num_active + engine.num_waiting == len(left)
    for name in ("nobody", *left):
        engine.abort(name)
    assert (engine.num_active, engine.num_waiting) == (0, 0)
    started_s = time.monotonic()
    assert tokens_of(run_all(engine, [short]))["short"] == bench.old.greedy(short)
    while engine._aborted:
        engine.step()
        assert time.monotonic() < started_s + 60, "aborted requests go on at the server"


def test_a_stop_string_that_an_update_cuts_in_two_ends_the_response(bench: Bench) -> None:
    engine = long_engine(bench)
    prompt = make_requests(1, seed=11)[0].prompt_tokens
    request = make_request("", prompt, Sampling.of(0.0), eos_ids=(), max_response_tokens=150)
    whole = tokens_of(run_all(engine, [request]))[""]
    text = [(SPECIAL_TOKENS + tuple(CHARS))[token] for token in whole]
    # the first place from the 40th token on that did not come before
    at = next(n for n in range(40, 130) if "".join(text[n : n + 12]) not in "".join(text[: n + 11]))
    stop = "".join(text[at : at + 12])
    cut = make_request("cut", prompt, Sampling.of(0.0, stop=(stop,)), eos_ids=(), max_response_tokens=150)
    (completion,) = run_all(engine, [cut]).values()  # without an update the server finds it
    assert completion.finish_reason == "stop_string"
    assert completion.response_tokens.tolist() == whole[: at + 12]
    engine.submit(cut)
    # as an update leaves it, within the stop string
    entry = engine._open["cut"]
    entry.tokens, entry.logprobs = whole[: at + 5], [-1.0] * (at + 5)
    entry.versions = [(V1, 0)]
    (completion,) = finish(engine)
    assert completion.finish_reason == "stop_string"
    assert completion.response_tokens.tolist() == whole[: at + 12]
    assert [(span.version, span.end) for span in completion.version_spans] == [(V1, at + 5), (START, at + 12)]


def test_a_server_with_other_weights_than_it_should_have_is_found_and_named(bench: ServerBench) -> None:
    """What a restart, a second searcher or a broken reload does."""
    engine = bench.fresh()
    assert isinstance(engine, OpenAiEngine)
    old = bench.local(bench.old, START)
    bench.server.load_beside(bench.new.folder)
    assert "canary" in raised(DigestError, engine.verify, old.manifest)
    # a folder that the server does not see
    broken = bench.local(bench.new, V1)
    at_server, engine._folders._at_server = engine._folders._at_server, Path("/absent")
    assert "weights_folder" in str(swap_weights(engine, broken, old))
    engine._folders._at_server = at_server
    engine.verify(old.manifest)
    request = make_requests(1, temperatures=(0.0,))[0]
    assert tokens_of(run_all(engine, [request]))["0"] == bench.old.greedy(request)
    engine.submit(request)
    bench.server.relabel("default")  # as after a start
    problem = raised(EngineDiedError, lambda: list(finish(engine)))
    assert "it has started again" in problem
    assert bench.server.url in problem

"""The simulated engine: its clock, its lengths, its failures, and its codec. No process, no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tba_searcher.engines import simulated
from tba_searcher.engines.engine import Completion, EngineError, EngineSettings, Request
from tba_searcher.engines.simulated import SimulatedCodec, SimulatedEngine, read_vocabulary

from tba.errors import DigestError, ModelError
from tba.versions import START, PolicyVersion
from tba.weights import params_sha256_of_files
from tba.wire import Sampling, VersionSpan
from tests.support.buffer import ROOT, SERVICE_PATHS

V1 = PolicyVersion(1, 4)
EOS = 7
IMPORTS = """
import sys
import tba_searcher.service, tba_searcher.engines.factory, tba_searcher.engines.simulated
bad = sorted({"torch", "transformers", "vllm"} & set(sys.modules))
sys.exit(f"heavy modules imported: {bad}" if bad else 0)
"""


class Clock:
    now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "eos_token_id": EOS}))
    save_file({"weight": np.arange(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All responses have the median length, and a step decodes one token of each row."""
    monkeypatch.setattr(simulated, "LENGTH_SIGMA", 0.0)
    monkeypatch.setattr(simulated, "TOKENS_PER_STEP", 1)


@pytest.fixture
def make_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[SimulatedEngine, Clock]]:
    def make(*, num_slots: int = 4, seed: int = 0, median: float = 128.0):
        clock = Clock()
        monkeypatch.setattr(simulated, "MEDIAN_RESPONSE_TOKENS", median)
        settings = EngineSettings(num_slots=num_slots, max_prompt_tokens=16, max_response_tokens=1000, seed=seed)
        return SimulatedEngine(folder, [folder / "model.safetensors"], START, settings, sleep=clock.sleep), clock

    return make


def request(name: str, *, max_response_tokens: int = 1000, **values: Any) -> Request:
    settings: dict[str, Any] = {"prompt_tokens": (1, 2), "sampling": Sampling.of(1.0), "eos_ids": (EOS,), **values}
    return Request(request_id=name, max_response_tokens=max_response_tokens, **settings)


def finish(engine: SimulatedEngine) -> list[Completion]:
    completions = []
    while engine.num_active + engine.num_waiting:
        completions += engine.step()
    return completions


@pytest.mark.usefixtures("fixed")
def test_every_slot_decodes_at_its_rate(make_engine) -> None:
    engine, clock = make_engine(median=100)
    for number in range(4):
        engine.submit(request(str(number)))
    assert engine.num_prefilled_tokens == 0
    assert [len(completion.response_tokens) for completion in finish(engine)] == [100] * 4
    assert engine.num_prefilled_tokens == 4 * 2
    assert clock.now_s == pytest.approx(100 / simulated.TOKENS_PER_S)


def test_a_response_is_a_function_of_seed_and_request_whatever_else_is_going_on(make_engine) -> None:
    many = [request(str(number)) for number in range(6)]
    responses = []
    for order, num_slots, seed in ((many, 2, 5), (many[::-1], 6, 5), (many, 2, 6)):
        engine, _ = make_engine(num_slots=num_slots, seed=seed, median=20)
        for item in order:
            engine.submit(item)
        responses.append({c.request_id: c.response_tokens.tolist() for c in finish(engine)})
    assert responses[0] == responses[1]
    assert responses[0] != responses[2]
    engine, _ = make_engine(median=20)
    for name in "ab":
        engine.submit(request(name, sampling=Sampling.of(1.0, seed=9)))
    first, second = finish(engine)
    np.testing.assert_array_equal(first.response_tokens, second.response_tokens)


@pytest.mark.usefixtures("fixed")
def test_limits_end_a_response_and_end_of_sequence_is_its_last_token_alone(make_engine) -> None:
    engine, _ = make_engine(median=30)
    engine.submit(request("cut", max_response_tokens=29))
    engine.submit(request("whole", max_response_tokens=30))
    engine.submit(request("longer", min_response_tokens=40))
    by_id = {completion.request_id: completion for completion in finish(engine)}
    ends = {name: (c.finish_reason, len(c.response_tokens)) for name, c in by_id.items()}
    assert ends == {"cut": ("length", 29), "whole": ("stop", 30), "longer": ("stop", 40)}
    for completion in by_id.values():
        at = np.flatnonzero(completion.response_tokens == EOS).tolist()
        assert at == ([] if completion.finish_reason == "length" else [len(completion.response_tokens) - 1])
        assert (completion.response_tokens < 50).all()
        assert (completion.sampler_logprobs <= 0).all()
        assert completion.sampler_logprobs.shape == completion.response_tokens.shape


def test_lengths_have_the_median_that_was_asked_for(make_engine) -> None:
    engine, _ = make_engine(num_slots=2000, median=200.0)
    for number in range(2000):
        engine.submit(request(str(number), max_response_tokens=1000))
    assert np.median([len(each.response_tokens) for each in finish(engine)]) == pytest.approx(200, rel=0.1)


@pytest.mark.usefixtures("fixed")
def test_new_weights_begin_a_span_in_every_row(make_engine, folder) -> None:
    engine, clock = make_engine(median=10)
    engine.submit(request("a"))
    for _ in range(4):
        engine.step()
    engine.load_weights([folder / "model.safetensors"], V1)
    engine.load_weights([folder / "model.safetensors"], V1)  # no token between: no span of its own
    [completion] = finish(engine)
    assert clock.now_s == pytest.approx(10 / simulated.TOKENS_PER_S)
    assert completion.version_spans == (VersionSpan.of(START, 0, 4), VersionSpan.of(V1, 4, 10))


def test_files_that_are_not_what_was_published_are_refused(make_engine, folder) -> None:
    engine, _ = make_engine()
    manifest: Any = type("Manifest", (), {})()
    manifest.version, manifest.params_sha256 = "0-0", params_sha256_of_files([folder / "model.safetensors"])
    engine.verify(manifest)
    save_file({"weight": np.ones(4, dtype=np.float32)}, folder / "other.safetensors")
    engine.load_weights([folder / "other.safetensors"], V1)
    with pytest.raises(DigestError, match="the files hold parameters"):
        engine.verify(manifest)


def test_what_does_not_fit_is_refused_and_what_is_aborted_never_comes_out(make_engine) -> None:
    engine, _ = make_engine(num_slots=1)
    for bad, message in (
        (request("long", prompt_tokens=(1,) * 17), "17 prompt tokens"),
        (request("longer", max_response_tokens=1001), "1001 response tokens"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.submit(bad)
    for name in "abc":
        engine.submit(request(name))
    with pytest.raises(EngineError, match="already being worked on"):
        engine.submit(request("a"))
    engine.step()
    assert (engine.num_active, engine.num_waiting) == (1, 2)
    engine.abort("a")
    engine.abort("c")
    engine.abort("unknown")
    assert [completion.request_id for completion in finish(engine)] == ["b"]
    engine.submit(request("a"))
    engine.close()
    assert engine.num_active + engine.num_waiting == 0
    assert engine.step() == []


@pytest.mark.usefixtures("fixed")
def test_prompts_and_responses_have_about_four_characters_a_token(make_engine, folder) -> None:
    codec = SimulatedCodec(folder)
    text = "Natalia sold 48 clips to her friends"
    tokens = codec.encode_prompt(text)
    assert tokens == codec.encode_prompt(text) != codec.encode_prompt(text[::-1])
    assert len(tokens) == len(text) / 4
    assert codec.eos_ids == (EOS,)
    engine, _ = make_engine(median=3)
    engine.submit(request("a"))
    [completion] = finish(engine)
    [response] = codec.decode_responses([completion])
    assert [int(word) for word in response.split()] == completion.response_tokens[:-1].tolist()


def test_a_searcher_without_a_model_imports_no_torch() -> None:
    words, environ = [sys.executable, "-c", IMPORTS], {"PYTHONPATH": ":".join(map(str, SERVICE_PATHS))}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr


def test_what_a_config_json_names_badly_is_no_id_and_no_vocabulary_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": 50, "eos_token_id": [-1, EOS, 50], "text_config": None}))
    assert read_vocabulary(tmp_path) == (50, (EOS,))
    path.write_text("{}")
    with pytest.raises(ModelError, match=r"config\.json names no vocab_size"):
        read_vocabulary(tmp_path)

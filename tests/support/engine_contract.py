"""The contract of every engine, as functions that run against any of them.

tests/integration/searcher/test_searcher_engines.py runs them.

Each case gets a `Bench` and fails by an exception. The bench makes engines, and holds two models of the same shape,
`old` and `new`, as folders and as transformers models.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tba_searcher.engines.engine import Completion, Engine, EngineError, Request, StagingEngine
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from transformers import AutoConfig, AutoModelForCausalLM

from tba.errors import DigestError
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion, params_sha256_of_files
from tba.weights.digest import describe_tensors
from tba.wire import Canary, Manifest, Sampling
from tba.wire.weight_manifest import TensorFile
from tests.support.tiny_model import CHARS, EOS_ID, SPECIAL_TOKENS, make_tiny_model, make_tiny_tokenizer

V1 = PolicyVersion(1, 4)
LOGPROB_ATOL = 1e-4
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, NUM_SLOTS = 48, 40, 4
MODELS = ("llama", "llama tied", "gpt_neox", "gpt2 tied")
"""The families of the recipes; GPT-NeoX goes through vLLM's Transformers backend."""
Make = Callable[..., Engine]
"""Makes an engine from model folder, tensors file, version and dtype, with the sizes above; keywords add settings."""


def make_contract_model(folder: Path, name: str, seed: int) -> Path:
    """Write a random model with attention heads of size 32, which vLLM's CPU kernels support; return the folder."""
    family, _, tied = name.partition(" ")
    if family == "gpt2":
        config = AutoConfig.for_model(
            "gpt2", vocab_size=33, n_embd=128, n_layer=2, n_head=4, n_positions=512, initializer_range=0.2,
            pad_token_id=0, eos_token_id=EOS_ID, bos_token_id=None,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        make_tiny_tokenizer().save_pretrained(folder)
        return folder
    architecture: Any = family
    return make_tiny_model(folder, seed, architecture=architecture, tied=bool(tied), hidden_size=128)


@dataclass(frozen=True)
class Model:
    """One model: its files for an engine, and two copies in transformers."""

    folder: Path
    tensors: Path
    """The tensors as the trainer publishes them: named parameters, a tied head once."""
    in_transformers: Any
    in_trainer: Any
    """A second copy for the trainer's log-probs, because the trainer replaces its model's attention."""

    @classmethod
    def make(cls, folder: Path, name: str, seed: int) -> Model:
        make_contract_model(folder, name, seed)
        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        save_file(
            {n: p.detach().contiguous() for n, p in model.named_parameters()}, folder / "model.safetensors",
            {"format": "pt"},
        )  # fmt: skip
        copy = AutoModelForCausalLM.from_pretrained(folder).eval()
        return cls(folder, folder / "model.safetensors", model, copy)

    def greedy(self, request: Request, *, after: Sequence[int] = ()) -> list[int]:
        """Return the greedy response of transformers, continued from `after`."""
        tokens, response = [*request.prompt_tokens, *after], list(after)
        with torch.inference_mode():
            while len(response) < request.max_response_tokens and (not response or response[-1] not in request.eos_ids):
                response.append(int(self.in_transformers(torch.tensor([tokens])).logits[0, -1].argmax()))
                tokens.append(response[-1])
        return response

    def trainer_logprobs(self, request: Request, tokens: np.ndarray) -> np.ndarray:
        """Return the trainer's log-probs [R] at the request's temperature (1 if it is greedy)."""
        model = LogprobModel(self.in_trainer, temperature=request.sampling.temperature or 1.0)
        with torch.inference_mode():
            prompt, response = np.array(request.prompt_tokens, np.int32), tokens.astype(np.int32)
            return model.token_logprobs(pack_sequences([prompt], [response], "cpu")).numpy()

    def logits(self, request: Request, tokens: np.ndarray) -> np.ndarray:
        """Return the logits [R, V] from which each response token is sampled."""
        ids = torch.tensor([[*request.prompt_tokens, *tokens.tolist()]])
        with torch.inference_mode():
            return self.in_transformers(ids).logits[0, len(request.prompt_tokens) - 1 : -1].double().numpy()


@dataclass
class Bench:
    """The engine maker, models and folder that a case works with."""

    make_engine: Make
    old: Model
    new: Model
    folder: Path
    spare: Engine | None = None
    """An idle engine with the old weights that a case has left, for reuse: starting a vLLM engine takes seconds."""
    _kept: list[Engine] = field(default_factory=list)

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """Yield an engine with the old weights, which earlier cases may have used; the case must leave it idle."""
        engine, self.spare = self.spare or self.fresh(), None
        yield engine
        assert engine.num_active + engine.num_waiting == 0
        if engine.version != START:
            engine.load_weights([self.old.tensors], START)
        self.spare = engine

    def fresh(
        self, model: Model | None = None, version: PolicyVersion = START, dtype: str = "float32", **settings: Any
    ) -> Engine:
        """Return a new engine. It is never closed, because that would end state that all vLLM engines here share."""
        model = model or self.old
        self._kept.append(self.make_engine(model.folder, model.tensors, version, dtype, **settings))
        return self._kept[-1]

    def manifest(self, model: Model, version: PolicyVersion, **changes: Any) -> Manifest:
        """Return the manifest of a version; `changes` replace fields, to spoil it."""
        request = Request(
            request_id="", prompt_tokens=(4, 5, 6), sampling=Sampling.of(1.0), max_response_tokens=9, eos_ids=()
        )
        response = [7, 8, 9, 10]
        canary = Canary(
            prompt_tokens=list(request.prompt_tokens),
            response_tokens=response,
            logprobs=model.trainer_logprobs(request, np.array(response)).tolist(),
            tolerance=1e-3,
        )
        name = model.tensors.name
        stored = TensorFile(name=name, key=f"runs/contract/{name}", size_bytes=model.tensors.stat().st_size)
        whole = Manifest(
            run="contract", version=str(version), parent=None, dtype="float32",
            tensors=describe_tensors([model.tensors]), full=[stored], files=[],
            model_config_sha256="0" * 64, tokenizer_sha256="0" * 64,
            params_sha256=params_sha256_of_files([model.tensors]), canary=canary, torch_version="", created_at_s=0.0,
            transformers_version="",
        )  # fmt: skip
        return whole.model_copy(update=changes)

    def local(self, model: Model, version: PolicyVersion) -> LocalVersion:
        """Return a version with its files on this machine."""
        return LocalVersion(version, (model.tensors,), self.manifest(model, version))


def make_requests(num: int, *, temperatures: Sequence[float] = (0.0, 1.0, 0.7), seed: int = 0, **fields: Any) -> list:
    """Return requests with prompts of 1 to 40 tokens, each used about three times, and limits of 1 to 24 tokens."""
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(3, 33, rng.integers(1, 41)).tolist()) for _ in range(max(1, num // 3))]
    return [
        make_request(
            str(i),
            prompts[int(rng.integers(len(prompts)))],
            Sampling.of(temperatures[i % len(temperatures)]),
            **{"max_response_tokens": int(rng.integers(1, 25)), **fields},
        )
        for i in range(num)
    ]


def make_request(request_id: str, prompt: Sequence[int], sampling: Sampling, **fields: Any) -> Request:
    """Return a request of at most 24 tokens that ends at <eos>; `fields` override its fields."""
    return Request(
        request_id=request_id, prompt_tokens=tuple(prompt), sampling=sampling,
        **{"max_response_tokens": 24, "eos_ids": (EOS_ID,), **fields},
    )  # fmt: skip


def finish(engine: Engine) -> Iterator[Completion]:
    """Step until no request is left; yield the completions."""
    until_s, num_steps = time.monotonic() + 60, 0
    # steps of an engine that computes are counted, and one that waits for a server has time
    while num_steps < 5000 or time.monotonic() < until_s:
        if not engine.num_active + engine.num_waiting:
            return
        yield from engine.step()
        num_steps += 1
    raise AssertionError(f"{engine.num_active + engine.num_waiting} requests never finished")


def run_all(engine: Engine, requests: Sequence[Request]) -> dict[str, Completion]:
    """Submit the requests and step until all have ended; return the completions by request id."""
    for request in requests:
        engine.submit(request)
    done = list(finish(engine))
    assert len({completion.request_id for completion in done}) == len(done) == len(requests)
    return {completion.request_id: completion for completion in done}


def next_turn(request: Request, completion: Completion, tokens: Sequence[int], **fields: Any) -> Request:
    """Return the request for the turn after a completed one; `tokens`: what the environment says in between."""
    name, _, turn = request.request_id.partition("/")
    prompt = (*request.prompt_tokens, *completion.response_tokens.tolist(), *tokens)
    usual = {"request_id": f"{name}/{int(turn or 1) + 1}", "prompt_tokens": prompt, "continues": request.request_id}
    return dataclasses.replace(request, **{**usual, **fields})


def converse(
    engine: Engine, requests: Sequence[Request], *, num_turns: int, keeps: bool = True, max_new_tokens: int = 5
) -> list[tuple[Request, Completion]]:
    """Take each request through some turns, and begin each turn as soon as the one before has ended; return all turns.

    Args:
        keeps: whether the engine learns which requests belong together.
    """
    requests = [dataclasses.replace(request, may_continue=keeps) for request in requests]
    under_way, turns = dict[str, Request](), list[tuple[Request, Completion]]()

    def submit(request: Request) -> None:
        under_way[request.request_id] = request
        engine.submit(request)

    for request in requests:
        submit(request)
    for completion in finish(engine):
        request = under_way.pop(completion.request_id)
        turns.append((request, completion))
        if int(request.request_id.partition("/")[2] or 1) < num_turns:
            rng = np.random.default_rng(len(request.prompt_tokens))
            new = rng.integers(3, 33, rng.integers(max_new_tokens + 1)).tolist()
            submit(next_turn(request, completion, new, **({} if keeps else {"continues": None})))
    assert not under_way
    assert len(turns) == num_turns * len(requests)
    return turns


def num_new_tokens(turns: Sequence[tuple[Request, Completion]]) -> int:
    """Return the number of prompt tokens whose keys and values no earlier turn of a conversation has computed."""
    ended = {
        request.request_id: len(request.prompt_tokens) + len(completion.response_tokens)
        for request, completion in turns
    }
    # those of the last token of a response are not there either
    return sum(len(request.prompt_tokens) - ended.get(request.continues or "", 1) + 1 for request, _ in turns)


def tokens_of(done: dict[str, Completion]) -> dict[str, list[int]]:
    """The response tokens by request id."""
    return {name: completion.response_tokens.tolist() for name, completion in sorted(done.items())}


def case_tokens_and_logprobs_are_the_trainers(bench: Bench) -> None:
    requests = make_requests(15)
    with bench.engine() as engine:
        assert engine.default_eos_ids == (EOS_ID,)
        done = run_all(engine, requests)
    reasons = set()
    for request in requests:
        completion = done[request.request_id]
        tokens = completion.response_tokens
        reasons.add(completion.finish_reason)
        assert (tokens.dtype, completion.sampler_logprobs.dtype) == (np.int32, np.float32)
        np.testing.assert_allclose(
            completion.sampler_logprobs, bench.old.trainer_logprobs(request, tokens), atol=LOGPROB_ATOL, rtol=0
        )
        assert EOS_ID not in tokens[:-1]
        assert (tokens[-1] == EOS_ID) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(tokens) == request.max_response_tokens
        assert [(s.version, s.start, s.end) for s in completion.version_spans] == [(START, 0, len(tokens))]
        assert completion.sampling == request.sampling
        assert completion.started_at_s <= completion.finished_at_s
        if request.sampling.temperature == 0:
            assert tokens.tolist() == bench.old.greedy(request)
    assert reasons <= {"stop", "length"}


def case_after_every_update_it_is_a_fresh_engine(bench: Bench) -> None:
    """Load a newer version, go back to an older one, and load the same weights twice, each time while idle."""
    requests = make_requests(8, temperatures=(0.0,), seed=3)
    of_new = tokens_of(run_all(bench.fresh(bench.new, V1), requests))
    with bench.engine() as engine:
        of_old = tokens_of(run_all(engine, requests))
        assert of_old != of_new
        for model, version, expected in (
            (bench.new, V1, of_new),
            (bench.old, START, of_old),
            (bench.new, V1, of_new),
            (bench.new, PolicyVersion(1, 5), of_new),
        ):
            engine.load_weights([model.tensors], version)
            assert engine.version == version
            engine.verify(bench.manifest(model, version))
            assert tokens_of(run_all(engine, requests)) == expected


def case_weights_in_flight_begin_a_span(bench: Bench) -> None:
    requests = make_requests(9, temperatures=(0.0, 1.0), eos_ids=(), max_response_tokens=20)
    models, by_id = {START: bench.old, V1: bench.new}, {request.request_id: request for request in requests}
    with bench.engine() as engine:
        for request in requests:
            engine.submit(request)
        done = [completion for _ in range(6) for completion in engine.step()]
        engine.load_weights([bench.new.tensors], V1)
        engine.verify(bench.manifest(bench.new, V1))
        done += finish(engine)
    assert {completion.request_id for completion in done} == set(by_id)
    shapes = set()
    for completion in done:
        request, tokens, spans = by_id[completion.request_id], completion.response_tokens, completion.version_spans
        shapes.add(tuple(span.version for span in spans))
        assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
        assert spans[-1].end == len(tokens) == 20
        for span in spans:
            assert span.start < span.end
            expected = models[span.version].trainer_logprobs(request, tokens)[span.start : span.end]
            np.testing.assert_allclose(
                completion.sampler_logprobs[span.start : span.end], expected, atol=LOGPROB_ATOL, rtol=0
            )
        if request.sampling.temperature == 0:
            last = spans[-1]
            assert tokens.tolist() == models[last.version].greedy(request, after=tokens[: last.start].tolist())
    assert shapes == {(START, V1), (V1,)}


def case_turns_of_a_conversation_are_exact(bench: Bench) -> None:
    """More conversations than slots, some of them with the same first prompt; then new weights, and false histories."""
    first = make_requests(NUM_SLOTS + 2, temperatures=(0.0, 1.0), seed=8, max_response_tokens=6)
    first = [dataclasses.replace(request, prompt_tokens=request.prompt_tokens[:9]) for request in first]

    def check(model: Model, turns: Sequence[tuple[Request, Completion]]) -> None:
        for request, completion in turns:
            expected, found = model.trainer_logprobs(request, completion.response_tokens), completion.sampler_logprobs
            np.testing.assert_allclose(found, expected, atol=LOGPROB_ATOL, rtol=0)
            if request.sampling.temperature == 0:
                assert completion.response_tokens.tolist() == model.greedy(request)

    with bench.engine() as engine:
        before = engine.num_prefilled_tokens
        turns = converse(engine, first, num_turns=3)
        check(bench.old, turns)
        num_computed = engine.num_prefilled_tokens - before
        repeated = sum(len(request.prompt_tokens) - 1 for request, _ in turns if request.continues is None)
        least, most = num_new_tokens(turns) - repeated, sum(len(request.prompt_tokens) for request, _ in turns)
        assert least <= num_computed <= most
        last = [(request, completion) for request, completion in turns if request.request_id.endswith("/3")]
        engine.load_weights([bench.new.tensors], V1)
        after = [next_turn(request, completion, (5, 6)) for request, completion in last]
        done = run_all(engine, after)
        check(bench.new, [(request, done[request.request_id]) for request in after])
        # the ids say that these continue a conversation, and their tokens do not
        false = [next_turn(request, done[request.request_id], ()) for request in after]
        false = [
            dataclasses.replace(each, prompt_tokens=(7 - min(each.prompt_tokens[0], 4), *each.prompt_tokens[1:]))
            for each in false
        ]
        done = run_all(engine, false)
        check(bench.new, [(request, done[request.request_id]) for request in false])


def case_staged_weights_are_used_like_any_others(bench: Bench) -> None:
    """Load a newer version, the previous one and a newer one again, each staged while requests are decoded."""
    requests = make_requests(6, temperatures=(0.0,), eos_ids=(), max_response_tokens=24, seed=4)
    with bench.engine() as engine:
        assert isinstance(engine, StagingEngine)
        for model, version in ((bench.new, V1), (bench.old, START), (bench.new, PolicyVersion(1, 5))):
            for request in requests:
                engine.submit(request)
            done, before = [*engine.step()], engine.version
            staging = threading.Thread(target=engine.stage_weights, args=([model.tensors],))
            staging.start()
            for _ in range(4):
                done += engine.step()
            staging.join()
            assert engine.version == before
            engine.load_weights([model.tensors], version)
            engine.verify(bench.manifest(model, version))
            other = bench.old if model is bench.new else bench.new
            raised(DigestError, engine.verify, bench.manifest(other, version))
            done += finish(engine)
            models = {before: other, version: model}
            for completion in done:
                tokens, spans = completion.response_tokens.tolist(), completion.version_spans
                expected = []
                for span in spans:
                    request = requests[int(completion.request_id)]
                    whole = models[span.version].greedy(request, after=expected)
                    expected = whole[: span.end]
                assert tokens == expected
            assert {spans[-1].version for spans in (completion.version_spans for completion in done)} == {version}
        # what is staged and not wanted, or does not fit, changes nothing
        engine.stage_weights([bench.old.tensors])
        engine.load_weights([bench.new.tensors], V1)
        engine.verify(bench.manifest(bench.new, V1))
        raised(EngineError, engine.stage_weights, [bench.folder / "absent.safetensors"])
        engine.load_weights([bench.old.tensors], START)
        assert tokens_of(run_all(engine, requests[:2])) == {r.request_id: bench.old.greedy(r) for r in requests[:2]}


def case_a_bad_version_is_refused_and_the_old_one_back(bench: Bench) -> None:
    """Files that do not fit leave the old weights in use; failed checks are found while requests are active."""
    tensors = load_file(bench.new.tensors)
    name = sorted(tensors)[0]
    spoilt = {
        "shape": {**tensors, name: tensors[name][:-1].clone()},
        "dtype": {**tensors, name: tensors[name].to(torch.bfloat16)},
        "missing": {key: value for key, value in tensors.items() if key != name},
        "extra": {**tensors, "extra": tensors[name].clone()},
    }
    requests = make_requests(6, temperatures=(0.0,), eos_ids=(), max_response_tokens=20)
    with bench.engine() as engine:
        for request in requests:
            engine.submit(request)
        done = [completion for _ in range(4) for completion in engine.step()]
        for what, damaged in spoilt.items():
            save_file(damaged, bench.folder / f"{what}.safetensors")
            assert name in raised(EngineError, engine.load_weights, [bench.folder / f"{what}.safetensors"], V1) or (
                what == "extra"
            )
            assert engine.version == START
        raised(EngineError, engine.load_weights, [bench.folder / "absent.safetensors"], V1)
        good = bench.manifest(bench.new, V1)
        engine.load_weights([bench.new.tensors], V1)
        digest = raised(DigestError, engine.verify, good.model_copy(update={"params_sha256": "0" * 64}))
        assert "this version is not used" in digest
        canary = good.canary.model_copy(update={"logprobs": [value + 0.01 for value in good.canary.logprobs]})
        assert "canary" in raised(DigestError, engine.verify, good.model_copy(update={"canary": canary}))
        engine.load_weights([bench.old.tensors], START)
        engine.verify(bench.manifest(bench.old, START))
        done += finish(engine)
    for completion in done:
        request = requests[int(completion.request_id)]
        assert completion.response_tokens.tolist() == bench.old.greedy(request)
        assert {span.version for span in completion.version_spans} == {START}


def case_sampling_options_are_in_the_logprobs(bench: Bench) -> None:
    options = {
        "top_k": Sampling.of(1.3, top_k=5),
        "top_p": Sampling.of(1.0, top_p=0.6),
        "both": Sampling.of(0.8, top_k=7, top_p=0.7),
        "off": Sampling.of(1.0),
    }
    prompts = [request.prompt_tokens for request in make_requests(4, seed=7)]
    requests = [
        make_request(f"{name} {i}", prompt, sampling, min_response_tokens=9 * (i % 2))
        for name, sampling in options.items()
        for i, prompt in enumerate(prompts)
    ]
    with bench.engine() as engine:
        done = run_all(engine, requests)
    num_below_one = 0
    for request in requests:
        completion = done[request.request_id]
        assert len(completion.response_tokens) >= request.min_response_tokens
        expected = restricted_logprobs(bench.old, request, completion.response_tokens)
        np.testing.assert_allclose(completion.sampler_logprobs, expected, atol=LOGPROB_ATOL, rtol=0)
        num_below_one += (completion.sampler_logprobs < -1e-3).any()
    assert num_below_one > len(requests) // 2


def restricted_logprobs(model: Model, request: Request, tokens: np.ndarray) -> np.ndarray:
    """Return expected log-probs [R]: apply min tokens, temperature, top-k and top-p, and renormalise each time."""
    logits, sampling = model.logits(request, tokens), request.sampling
    found = []
    for place, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        if place < request.min_response_tokens:
            row[list(request.eos_ids)] = -np.inf
        probs = np.exp((row - row.max()) / sampling.temperature)
        order = np.argsort(-probs)
        if sampling.top_k:
            probs[order[sampling.top_k :]] = 0
        probs /= probs.sum()
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= sampling.top_p]] = 0
        found.append(np.log(probs[token] / probs.sum()))
    return np.array(found)


def case_each_of_several_stop_tokens_ends_a_response(bench: Bench) -> None:
    """As generation_config.json and the end of a chat template's turn name them."""
    requests = []
    for request in make_requests(6, temperatures=(0.0,), eos_ids=()):
        whole = bench.old.greedy(request)
        ends = (EOS_ID, whole[len(whole) // 2], whole[len(whole) // 3])
        requests.append(dataclasses.replace(request, eos_ids=ends))
    with bench.engine() as engine:
        done = run_all(engine, requests)
    for request in requests:
        completion = done[request.request_id]
        assert completion.response_tokens.tolist() == bench.old.greedy(request)
        assert completion.response_tokens[-1] in request.eos_ids
        assert completion.finish_reason == "stop"


def case_stop_strings_end_a_response(bench: Bench) -> None:
    prompts = [make_requests(1, seed=seed)[0].prompt_tokens for seed in range(11, 30)]
    candidates = [make_request("", prompt, Sampling.of(0.0)) for prompt in prompts]
    # one whose greedy response does not end early
    request, whole = next((r, whole) for r in candidates if len(whole := bench.old.greedy(r)) == 24)
    text = [(SPECIAL_TOKENS + tuple(CHARS))[token] for token in whole]
    stop = "".join(text[4:6])
    first = "".join(text).index(stop)
    again = "".join(text).find(stop, first + 1)
    with bench.engine() as engine:
        done = run_all(
            engine,
            [
                dataclasses.replace(request, request_id="stop", sampling=Sampling.of(0.0, stop=(stop,))),
                dataclasses.replace(request, request_id="never", sampling=Sampling.of(0.0, stop=("=?=?=",))),
                dataclasses.replace(
                    request, request_id="late", sampling=Sampling.of(0.0, stop=(stop,)), min_response_tokens=first + 3
                ),
            ],
        )
    assert done["stop"].finish_reason == "stop_string"
    assert done["stop"].response_tokens.tolist() == whole[: first + 2]
    assert len(done["stop"].sampler_logprobs) == first + 2
    assert (done["never"].finish_reason, done["never"].response_tokens.tolist()) == ("length", whole)
    assert len(done["late"].response_tokens) == (24 if again < 0 else again + 2)


def case_what_cannot_be_honoured_is_refused_and_the_rest_continues(bench: Bench) -> None:
    good = make_request("good", (5, 6, 7), Sampling.of(0.0))
    with bench.engine() as engine:
        engine.submit(good)
        for change, word in (
            ({"prompt_tokens": ()}, "prompt tokens"),
            ({"prompt_tokens": (5,) * (MAX_PROMPT_TOKENS + 1)}, "max_prompt_tokens"),
            ({"prompt_tokens": (5, 10**6)}, "token id 1000000; the model has"),
            ({"max_response_tokens": 0}, "response tokens"),
            ({"max_response_tokens": MAX_RESPONSE_TOKENS + 1}, "max_response_tokens"),
            ({"min_response_tokens": 25}, "min_response_tokens"),
            ({"request_id": "good"}, "already"),
        ):
            bad = dataclasses.replace(good, **{"request_id": "bad", **change})
            assert word in raised(EngineError, engine.submit, bad), change
        (completion,) = finish(engine)
    assert completion.response_tokens.tolist() == bench.old.greedy(good)


def case_slots_are_counted_and_aborted_requests_forgotten(bench: Bench) -> None:
    requests = make_requests(NUM_SLOTS + 3, temperatures=(0.0,), eos_ids=(), max_response_tokens=20)
    with bench.engine() as engine:
        assert engine.num_slots == NUM_SLOTS
        assert engine.step() == []
        for request in requests:
            engine.submit(request)
        assert engine.step() == []
        assert (engine.num_active, engine.num_waiting) == (NUM_SLOTS, 3)
        for name in ("0", "1", "6", "nobody"):
            engine.abort(name)
        assert engine.num_active + engine.num_waiting == 4
        done = {completion.request_id: completion for completion in finish(engine)}
        assert set(done) == {"2", "3", "4", "5"}
        assert all(done[n].response_tokens.tolist() == bench.old.greedy(requests[int(n)]) for n in done)
        assert tokens_of(run_all(engine, requests[:1]))["0"] == bench.old.greedy(requests[0])


def case_closing_forgets_what_is_under_way_and_can_be_repeated(bench: Bench) -> None:
    engine = bench.fresh()
    engine.submit(make_requests(1)[0])
    engine.close()
    engine.close()
    assert engine.num_active + engine.num_waiting == 0


def case_a_seed_of_a_request_decides_its_response(bench: Bench) -> None:
    prompt = (5, 9, 13)
    seeds = {"a": 1, "b": 1, "c": 2, "d": None, "e": None}
    requests = [make_request(n, prompt, Sampling.of(1.0, seed=s), eos_ids=()) for n, s in seeds.items()]
    with bench.engine() as engine:
        first = tokens_of(run_all(engine, requests))
        second = tokens_of(run_all(engine, requests[::-1]))
    assert first["a"] == first["b"] == second["a"]
    assert len({tuple(first[name]) for name in "acde"}) == 4
    assert second["d"] != first["d"]


def case_half_precision_is_verified_too(bench: Bench) -> None:
    path = bench.folder / "half.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(bench.new.tensors).items()}, path)
    half_folder = bench.folder / "half"
    half_folder.mkdir(exist_ok=True)
    for file in bench.old.folder.iterdir():
        if file.is_file():
            (half_folder / file.name).write_bytes(file.read_bytes())
    old_half = half_folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(bench.old.tensors).items()}, old_half)
    engine = bench.fresh(Model(half_folder, old_half, None, None), dtype="bfloat16")
    engine.load_weights([path], V1)
    manifest = bench.manifest(bench.new, V1, params_sha256=params_sha256_of_files([path]))
    wide = manifest.canary.model_copy(update={"tolerance": 0.5})
    engine.verify(manifest.model_copy(update={"canary": wide}))
    (completion,) = run_all(engine, [make_request("h", (4, 5), Sampling.of(1.0))]).values()
    assert completion.sampler_logprobs.dtype == np.float32


def raised(kind: type[Exception], call: Callable[..., object], *arguments: Any) -> str:
    """Assert that a call raises this kind of exception; return its text."""
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} raised no {kind.__name__}")


ON_EVERY_MODEL = (
    case_tokens_and_logprobs_are_the_trainers,
    case_after_every_update_it_is_a_fresh_engine,
    case_weights_in_flight_begin_a_span,
    case_turns_of_a_conversation_are_exact,
    case_staged_weights_are_used_like_any_others,
)
ON_EXPERTS = ON_EVERY_MODEL[:4]
"""vLLM does not stage the weights of experts on the CPU."""
ON_ONE_MODEL = (
    case_a_bad_version_is_refused_and_the_old_one_back,
    case_sampling_options_are_in_the_logprobs,
    case_each_of_several_stop_tokens_ends_a_response,
    case_stop_strings_end_a_response,
    case_what_cannot_be_honoured_is_refused_and_the_rest_continues,
    case_slots_are_counted_and_aborted_requests_forgotten,
    case_a_seed_of_a_request_decides_its_response,
    case_half_precision_is_verified_too,
    case_closing_forgets_what_is_under_way_and_can_be_repeated,
)
LAST = (case_closing_forgets_what_is_under_way_and_can_be_repeated,)
"""Cases that run last, because they end state that all vLLM engines of a process share."""
CASES: dict[str, tuple[str, Callable[[Bench], None]]] = {
    f"{case.__name__.removeprefix('case_')}[{model}]": (model, case)
    for cases, models in ((ON_EVERY_MODEL, MODELS), (ON_EXPERTS, ("qwen3_moe",)), (ON_ONE_MODEL, ("llama tied",)))
    for case in cases
    for model in models
}

"""The embedded engine against transformers: the same tokens, the same log-probs, under any events in between."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tba_searcher.engines.engine import Completion, EngineError, EngineSettings, Request
from tba_searcher.engines.torch.batch import ConversationCache
from tba_searcher.engines.torch.engine import EmbeddedEngine, most_rows
from tba_searcher.engines.torch.exactness import NUM_TOKENS, tried_length
from tba_searcher.engines.weight_check import check_loaded, swap_weights
from tba_searcher.generation.version_pulls import WeightLoader
from transformers import AutoConfig, AutoModelForCausalLM

from tba.errors import ConfigError, DigestError, MalformedError, ModelError
from tba.model_folders import check_vocabulary
from tba.store import FileStore
from tba.versions import START
from tba.weights import LocalVersion, WeightVersions
from tba.wire import Sampling
from tests.support.broken_weights import BREAKS, break_weights
from tests.support.chi_square import assert_follows
from tests.support.engine_contract import (
    MAX_PROMPT_TOKENS,
    V1,
    converse,
    finish,
    make_request,
    make_requests,
    next_turn,
    num_new_tokens,
    run_all,
    tokens_of,
)
from tests.support.searcher_world import publish_version
from tests.support.tiny_model import EOS_ID, make_tiny_model, make_tiny_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool, int], Path]:
    root = tmp_path_factory.mktemp("models")
    cases = [(tied, seed) for tied in (False, True) for seed in (0, 1)]
    return {("llama", tied, seed): make_tiny_model(root / f"{tied}-{seed}", seed, tied=tied) for tied, seed in cases}


def make_engine(folder: Path, **sizes: Any) -> EmbeddedEngine:
    usual: dict[str, Any] = {"num_slots": 8, "seed": 1, "max_response_tokens": 40}
    usual["max_prompt_tokens"] = MAX_PROMPT_TOKENS
    return EmbeddedEngine(folder, START, EngineSettings(**{**usual, **sizes}))


def hf_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def hf_logprobs(model: Any, request: Request, tokens: np.ndarray) -> np.ndarray:
    prompt = list(request.prompt_tokens)
    ids = torch.tensor([prompt + tokens.tolist()])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def test_samples_follow_the_softmax_of_the_model_at_the_sampling_temperature(folders):
    """Chi-square of the first sampled token; PAD is not masked, so it counts like any other token."""
    folder, num = folders["llama", False, 0], 6000
    requests = [make_request(str(i), (5, 9, 13), Sampling.of(1.5), max_response_tokens=1) for i in range(num)]
    with torch.inference_mode():
        logits = hf_model(folder)(torch.tensor([[5, 9, 13]])).logits[0, -1].double()
    expected = torch.softmax(logits / 1.5, -1).numpy() * num
    done = run_all(make_engine(folder, num_slots=256), requests)
    counts = np.bincount([c.response_tokens[0] for c in done.values()], minlength=len(expected))
    assert (expected >= 5).sum() > 8
    assert_follows(counts, expected / num)


def test_different_seeds_sample_different_responses(folders):
    requests = make_requests(8, temperatures=(1.0,))
    one, other = (run_all(make_engine(folders["llama", False, 0], seed=seed), requests) for seed in (1, 2))
    assert tokens_of(one) != tokens_of(other)


def named_tensors(folder: Path, path: Path) -> Path:
    save_file({name: p.detach().contiguous() for name, p in hf_model(folder).named_parameters()}, path)
    return path


def make_gpt_neo(folder: Path, seed: int) -> Path:
    """Save a model whose attention has masks of its own."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "vocab_size": 33, "intermediate_size": 64}
    sizes |= {"attention_types": [[["global", "local"], 1]], "window_size": 128, "max_position_embeddings": 128}
    config = AutoConfig.for_model("gpt_neo", **sizes, bos_token_id=None, eos_token_id=EOS_ID)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "gpt_neo"])
def test_after_an_update_each_prompt_is_computed_once_and_responses_follow(folders, tmp_path, family):
    """Ten requests with five prompts, of which the prefix cache holds four; the tokens of the passes are counted."""
    old, new = (folders["llama", False, seed] for seed in (0, 1))
    if family == "gpt_neo":
        old, new = (make_gpt_neo(tmp_path / str(seed), seed) for seed in (0, 1))
    engine, tensors = make_engine(old, num_slots=10), named_tensors(new, tmp_path / "x")
    prompts = [tuple(range(3 + i, 23 + i if i < 3 else 28 + i)) for i in range(5)]
    limits = {"eos_ids": (), "max_response_tokens": 12}
    requests = [make_request(str(i), prompts[i % 5], Sampling.of(1.0), **limits) for i in range(10)]
    for request in (each for each in requests if len(each.prompt_tokens) == 20):
        engine.submit(request)
    engine.step()  # so that short prompts have longer responses
    for request in (each for each in requests if len(each.prompt_tokens) > 20):
        engine.submit(request)
    for _ in range(6):
        engine.step()
    begun = [engine._batch.num_response_tokens(slot) for slot in range(10)]
    engine.load_weights([tensors], V1)
    sizes: list[int] = []
    engine._model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append((args[0] if args else kwargs["input_ids"]).numel()), with_kwargs=True
    )
    done = engine.step()
    if family == "llama":
        num_prompt_tokens = sum(len(prompt) - 1 for prompt in prompts)
        assert num_prompt_tokens + sum(begun) + 10 <= sum(sizes) < num_prompt_tokens + 1.34 * sum(begun) + 10
    model, done = hf_model(new), [*done, *finish(engine)]
    assert len(done) == 10
    assert len(set(begun)) == 2
    for completion in done:
        start = completion.version_spans[-1].start
        expected = hf_logprobs(model, requests[int(completion.request_id)], completion.response_tokens)
        np.testing.assert_allclose(completion.sampler_logprobs[start:], expected[start:], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("lengths", "longest", "num"),
    [
        ([1], 9, 1),
        ([3, 3, 3], 9, 3),
        ([1, 1, 8], 9, 2),
        ([1, 2, 2, 2], 9, 4),
        ([2, 2, 2], 8192, 2),
        ([1, 1], 20_000, 1),
    ],
)
def test_a_padded_pass_takes_rows_of_about_one_length(lengths, longest, num):
    assert most_rows(lengths, longest) == num


@pytest.mark.parametrize("damage", ["none", "params_sha256", "canary", "canary that allows everything"])
def test_a_version_that_fails_a_check_is_given_up_and_the_old_weights_are_back(folders, tmp_path, damage):
    versions = WeightVersions(FileStore(tmp_path / "store"), "run")
    publish_version(versions, folders["llama", True, 0], START)
    shift = {"canary": 0.01, "canary that allows everything": 3.0}.get(damage, 0.0)
    publish_version(versions, folders["llama", True, 1], V1, parent=START, canary_shift=shift)
    loader = WeightLoader(versions, tmp_path / "pulled")
    old, new = loader.download_model(START)[0], loader.download(V1)
    if damage == "params_sha256":
        new = LocalVersion(V1, new.paths, new.manifest.model_copy(update={"params_sha256": "0" * 64}))
    if damage == "canary that allows everything":
        canary = new.manifest.canary.model_copy(update={"tolerance": 1e9})
        new = LocalVersion(V1, new.paths, new.manifest.model_copy(update={"canary": canary}))
    engine = make_engine(tmp_path / "pulled" / "model-0-0")
    check_loaded(engine, old.manifest)
    error = swap_weights(engine, new, old)
    if damage == "none":
        assert error is None
        assert (engine.version, engine.params_sha256()) == (V1, new.manifest.params_sha256)
    else:
        assert isinstance(error, DigestError)
        assert "this version is not used" in str(error)
        assert (engine.version, engine.params_sha256()) == (START, old.manifest.params_sha256)


def test_a_version_of_another_model_is_refused_before_it_takes_room(folders, tmp_path):
    versions = WeightVersions(FileStore(tmp_path / "store"), "run")
    publish_version(versions, folders["llama", True, 0], START)
    publish_version(versions, folders["llama", False, 1], V1, parent=START)  # it has an lm_head
    loader = WeightLoader(versions, tmp_path / "pulled")
    loader.add(loader.download_model(START)[0])
    for _ in range(2):  # also when it is made anew
        with pytest.raises(MalformedError, match=r"1 tensors differ, first \('lm_head.weight', 'F32'"):
            loader.download(V1)
        loader.refuse(V1, MalformedError("of another model"))
    assert not (tmp_path / "pulled" / "tensors-1-4").exists()


def test_weights_that_give_no_finite_logits_are_an_error_and_never_a_rollout(folders, tmp_path):
    engine = make_engine(folders["llama", False, 0])
    path = named_tensors(folders["llama", False, 0], tmp_path / "nan.safetensors")
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, path)
    engine.load_weights([path], V1)
    for temperature in (0.0, 1.0):
        engine.submit(make_requests(1, temperatures=(temperature,))[0])
        with pytest.raises(EngineError, match="not finite under version 1-4"):
            engine.step()
        engine.close()


def test_a_context_that_is_too_short_is_refused_at_the_start(folders):
    with pytest.raises(ConfigError, match=r"context is 512 tokens"):
        make_engine(folders["llama", False, 0], max_response_tokens=500)


def test_a_folder_without_a_model_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="no usable causal language model"):
        make_engine(tmp_path)


@pytest.mark.parametrize("how", BREAKS)
def test_a_folder_without_the_weights_of_its_model_is_refused_with_their_names(how: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=BREAKS[how]):
        make_engine(break_weights(make_tiny_model(tmp_path / "model"), how))


def test_only_ids_that_plain_text_gives_must_be_in_the_model() -> None:
    tokenizer = make_tiny_tokenizer()
    num = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"], "pad_token": "<own pad>"})
    check_vocabulary(tokenizer, num, where="here")
    tokenizer.add_tokens(["<plus>"])
    with pytest.raises(ModelError, match=r"has 1 tokens beyond .* as '<plus>'"):
        check_vocabulary(tokenizer, num, where="here")


# ---- What is decoded exactly ----------------------------------------------------------------------------------------

SHARED: dict[str, Any] = {"vocab_size": 33, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHARED |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SHARED |= {"initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": EOS_ID}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
# slots of different lengths share a step, and its local layers count from the longest
GPT_NEO = {"num_layers": 2, "num_heads": 4, "num_key_value_heads": 4, "window_size": 8}
GPT_NEO |= {"attention_types": [[["global", "local"], 1]]}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
RIGHT = {
    "mistral": {"sliding_window": 8},
    "phi3": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8, "num_local_experts": 4},
    "starcoder2": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, **MIXED},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},
}
REFUSED = {
    "llama4_text": ({"attention_chunk_size": 8, "num_local_experts": 2}, "chunked_attention"),
    "phi3": (
        {"rope_parameters": {**LONG_ROPE, "factor": 4.0}, "original_max_position_embeddings": 16},
        r"longrope.* \(now 43\) within 16",
    ),
    "recurrent_gemma": ({"attention_window_size": 8, "lru_width": 32, "num_hidden_layers": 3}, "does not decode"),
    "gpt_neo": (GPT_NEO, "does not decode this GPTNeoForCausalLM exactly"),
    "deepseek_v3": (
        {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
        "with its key-value cache the model fails",
    ),
    "mamba": ({"state_size": 4}, "linear_attention|mamba"),
}


def architecture_engine(folder: Path, kind: str, changes: dict[str, Any]) -> EmbeddedEngine:
    """An engine with a random model of this kind, for 27 + 16 tokens: past its windows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SHARED, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return make_engine(folder, num_slots=4, max_prompt_tokens=27, max_response_tokens=16)


@pytest.mark.parametrize("kind", RIGHT)
def test_tokens_beyond_a_window_are_those_of_a_pass_over_the_whole_sequence(kind: str, tmp_path: Path) -> None:
    engine, model = architecture_engine(tmp_path, kind, RIGHT[kind]), hf_model(tmp_path)
    rng = np.random.default_rng(0)
    requests = [
        make_request(str(n), rng.integers(3, 33, n).tolist(), Sampling.of(1.0), max_response_tokens=16, eos_ids=())
        for n in (1, 20, 27)
    ]
    done = run_all(engine, requests)
    for request in requests:
        completion = done[request.request_id]
        expected = hf_logprobs(model, request, completion.response_tokens)
        np.testing.assert_allclose(completion.sampler_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_decoded_exactly_is_refused_before_the_first_request(kind: str, tmp_path: Path) -> None:
    changes, why = REFUSED[kind]
    # an error of torch may pass
    with pytest.raises(ConfigError if "fails" in why else ModelError, match=why):
        architecture_engine(tmp_path, kind, changes)


def test_the_check_of_decoding_is_short_and_goes_past_each_window_that_the_config_names() -> None:
    def tried(kind: str, **named: Any) -> int:
        return tried_length(AutoConfig.for_model(kind, **named), 4096)

    assert 64 <= tried("llama") <= 128
    assert tried("mistral", sliding_window=8192) == tried("llama"), "it does not bind"
    for kind, key in (
        ("mistral", "sliding_window"),
        ("llama4_text", "attention_chunk_size"),
        ("gpt_neo", "window_size"),
        ("recurrent_gemma", "attention_window_size"),
    ):
        assert 1024 + 2 * NUM_TOKENS < tried(kind, **{key: 1024}) < 1100, kind
    assert tried("mistral", sliding_window=4090) == 4096


def test_the_check_of_decoding_makes_no_longer_pass(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, real = [], EmbeddedEngine._logprobs
    noting = lambda self, ids, at: lengths.append(len(ids)) or real(self, ids, at)  # noqa: E731
    monkeypatch.setattr(EmbeddedEngine, "_logprobs", noting)
    make_engine(folders["llama", False, 0], max_response_tokens=400)
    assert 64 <= max(lengths) <= 128


def test_the_check_of_decoding_leaves_the_random_stream_and_the_slots_alone(folders) -> None:
    engine = make_engine(folders["llama", False, 0], seed=7)
    assert engine._generator.initial_seed() == 7
    assert torch.equal(engine._generator.get_state(), torch.Generator().manual_seed(7).get_state())
    assert (engine.num_active, engine.num_waiting, engine._ids) == (0, 0, set())


# ---- Conversations -------------------------------------------------------------------------------------------------

FAMILIES = ("llama", "qwen2", "qwen3_moe", "gpt_neox")
OF_ONE_TOKEN: dict[str, Any] = {"max_response_tokens": 1, "eos_ids": (), "may_continue": True}


def first_turns(num: int, *, temperature: float = 1.0, max_tokens: int = 4) -> list[Request]:
    """Return requests with prompts of 1 to 6 tokens, no two alike."""
    prompts = [tuple(range(3 + number, 4 + number + number % 6)) for number in range(num)]
    limits = {"max_response_tokens": max_tokens, "eos_ids": ()}
    return [make_request(str(n), prompt, Sampling.of(temperature), **limits) for n, prompt in enumerate(prompts)]


def assert_exact(model: Any, turns: list[tuple[Request, Completion]], *, since: Any = START) -> None:
    """Compare log-probs with passes over whole sequences, for the tokens that version `since` has sampled."""
    for request, completion in turns:
        expected = hf_logprobs(model, request, completion.response_tokens)
        for span in completion.version_spans:
            if span.version == since:
                found = completion.sampler_logprobs[span.start : span.end]
                np.testing.assert_allclose(found, expected[span.start : span.end], atol=1e-4, rtol=0)


def one(engine: EmbeddedEngine, request: Request) -> tuple[Request, Completion]:
    return request, run_all(engine, [request])[request.request_id]


@pytest.mark.parametrize("num_slots", [1, 3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_continued_turn_computes_its_new_tokens_alone_and_is_exact(tmp_path, family: Any, num_slots: int) -> None:
    folder = make_tiny_model(tmp_path, 0, architecture=family)
    engine = make_engine(folder, num_slots=num_slots)
    turns = converse(engine, first_turns(6), num_turns=4)
    assert_exact(hf_model(folder), turns)
    assert engine.num_prefilled_tokens == num_new_tokens(turns)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_conversation_beyond_a_window_is_exact(kind: str, tmp_path: Path) -> None:
    engine = architecture_engine(tmp_path, kind, RIGHT[kind])
    turns = converse(engine, first_turns(6), num_turns=4, max_new_tokens=3)
    assert max(len(request.prompt_tokens) for request, _ in turns) > 20
    assert_exact(hf_model(tmp_path), turns)
    assert engine.num_prefilled_tokens == num_new_tokens(turns)


def test_greedy_conversations_are_the_same_when_every_turn_is_computed_anew(folders) -> None:
    found = {}
    for keeps in (True, False):
        engine = make_engine(folders["llama", False, 0], num_slots=3)
        turns = converse(engine, first_turns(6, temperature=0.0), num_turns=4, keeps=keeps)
        found[keeps] = {request.request_id: completion.response_tokens.tolist() for request, completion in turns}
        whole = sum(len(request.prompt_tokens) for request, _ in turns)
        assert engine.num_prefilled_tokens == (num_new_tokens(turns) if keeps else whole)
    assert found[True] == found[False]


def test_code_with_an_attention_of_its_own_computes_every_turn_anew(tmp_path) -> None:
    engine = make_engine(make_gpt_neo(tmp_path, 0))
    turns = converse(engine, first_turns(6), num_turns=4)
    assert_exact(hf_model(tmp_path), turns)
    assert engine.num_prefilled_tokens == sum(len(request.prompt_tokens) for request, _ in turns)


def test_what_was_evicted_is_computed_anew(folders) -> None:
    """Room for the 16 tokens of one slot, and four conversations that take turns in it."""
    engine = make_engine(folders["llama", False, 0], num_slots=1, max_prompt_tokens=12, max_response_tokens=4)
    begun = [one(engine, dataclasses.replace(each, may_continue=True)) for each in first_turns(4)]  # 4 + 5 + 6 + 7
    before = engine.num_prefilled_tokens
    turns = [one(engine, next_turn(*each, (5, 6), may_continue=False)) for each in begun]
    assert_exact(hf_model(folders["llama", False, 0]), turns)
    computed = [len(request.prompt_tokens) for request, _ in turns[:2]] + [3, 3]
    assert engine.num_prefilled_tokens - before == sum(computed)


def test_the_oldest_and_what_was_continued_make_room() -> None:
    cache, prefix = ConversationCache(10), lambda name: (int(name),) * 4
    requests = {name: make_request(name, (*prefix(name), 5), Sampling.of(1.0), continues=name) for name in "123"}

    def keep(name: str, **fields: Any) -> set[str]:
        request = dataclasses.replace(requests[name], continues=None, **fields)
        cache.keep(request, prefix(name), torch.zeros(1))
        return {name for name, request in requests.items() if cache.find(request) is not None}

    assert [keep("1"), keep("2"), keep("2"), keep("3")] == [{"1"}, {"1", "2"}, {"1", "2"}, {"2", "3"}]
    cache.keep(dataclasses.replace(requests["1"], continues="3"), prefix("1"), torch.zeros(1))
    assert {name for name in "123" if cache.find(requests[name]) is not None} == {"1", "2"}
    cache.clear()
    assert [keep("1"), keep("2"), keep("3")] == [{"1"}, {"1", "2"}, {"2", "3"}]


def test_new_weights_between_and_within_turns(folders, tmp_path) -> None:
    old, new = (folders["llama", False, seed] for seed in (0, 1))
    engine, tensors = make_engine(old, num_slots=3), named_tensors(new, tmp_path / "x")
    first = [dataclasses.replace(each, may_continue=True) for each in first_turns(3, max_tokens=6)]
    turns = [one(engine, request) for request in first]
    for request, completion in turns:
        engine.submit(next_turn(request, completion, (5, 6, 7)))
    followed = {request.request_id: request for request in engine._waiting}
    engine.step()
    engine.step()
    before = engine.num_prefilled_tokens
    engine.load_weights([tensors], V1)  # within the second turn, which began with keys and values of the old weights
    second = [(followed[each.request_id], each) for each in finish(engine)]
    assert [span.version for _, each in second for span in each.version_spans] == [START, V1] * 3
    assert engine.num_prefilled_tokens - before == sum(len(request.prompt_tokens) + 1 for request, _ in second)
    before = engine.num_prefilled_tokens
    third = [one(engine, next_turn(*each, (8, 9))) for each in second]
    assert engine.num_prefilled_tokens - before == 3 * 3
    engine.load_weights([tensors], V1)  # between two turns
    before = engine.num_prefilled_tokens
    fourth = [one(engine, next_turn(*each, (8, 9))) for each in third]
    assert engine.num_prefilled_tokens - before == sum(len(request.prompt_tokens) for request, _ in fourth)
    assert_exact(hf_model(old), [*turns, *second])
    assert_exact(hf_model(new), [*second, *third, *fourth], since=V1)


@pytest.mark.parametrize(
    ("prompt", "num_computed"),
    [
        ((3, 4, 5, 6, 7, 8), 3),  # 3, 4, 5 are kept, and 6 is the last token of the response
        ((3, 4, 5, 7, 7, 8), 3),  # nothing of it was computed, so another token may stand there
        ((3, 4, 5, 6), 1),
        ((3, 4, 9, 6, 7, 8), 6),
        ((4, 4, 5, 6, 7, 8), 6),
        ((3, 4, 5), 1),  # the prompt itself, whose prefix is shared as between rollouts
        ((3,), 1),
        ((7, 3, 4, 5, 6), 5),
    ],
)
def test_kept_tokens_that_do_not_begin_the_prompt_are_not_used(folders, prompt, num_computed: int) -> None:
    folder = folders["llama", False, 0]
    engine = make_engine(folder)
    run_all(engine, [make_request("first", (3, 4, 5), Sampling.of(1.0), **OF_ONE_TOKEN)])
    before = engine.num_prefilled_tokens
    turn = one(engine, make_request("second", prompt, Sampling.of(1.0), continues="first"))
    assert engine.num_prefilled_tokens - before == num_computed
    assert_exact(hf_model(folder), [turn])


@pytest.mark.parametrize("fields", [{"may_continue": False}, {"request_id": "another"}, {"continues": "nobody"}])
def test_only_the_request_that_is_named_is_continued_and_only_if_it_may_be(folders, fields: dict[str, Any]) -> None:
    engine = make_engine(folders["llama", False, 0])
    first = make_request("first", (3, 4, 5), Sampling.of(1.0), **OF_ONE_TOKEN)
    run_all(engine, [dataclasses.replace(first, **fields)])
    before = engine.num_prefilled_tokens
    one(engine, make_request("second", (3, 4, 5, 6, 7), Sampling.of(1.0), continues="first"))
    assert engine.num_prefilled_tokens - before == (2 if "continues" in fields else 5)


def test_several_requests_may_continue_one(folders) -> None:
    """In one round, beside the rollouts of a visit, which share the prefix of their prompt as ever."""
    folder = folders["llama", False, 0]
    engine = make_engine(folder)
    first = one(engine, make_request("first", (3, 4, 5), Sampling.of(1.0), **OF_ONE_TOKEN))
    before = engine.num_prefilled_tokens
    requests = [next_turn(*first, (5 + n, 6), request_id=str(n), max_response_tokens=9) for n in range(3)]
    requests += [make_request(f"of a visit {n}", (9, 8, 7, 6), Sampling.of(1.0)) for n in range(3)]
    done = run_all(engine, requests)
    assert engine.num_prefilled_tokens - before == 3 * 3 + 3 + 3
    assert_exact(hf_model(folder), [(request, done[request.request_id]) for request in requests])


def test_conversations_that_have_begun_go_first(folders) -> None:
    engine = make_engine(folders["llama", False, 0], num_slots=1)
    first = one(engine, make_request("first", (3, 4, 5), Sampling.of(1.0), **OF_ONE_TOKEN))
    begun = [make_request(str(n), (9, 8 + n), Sampling.of(1.0)) for n in range(2)]
    for request in (*begun, next_turn(*first, (5, 6)), next_turn(*first, (), request_id="false", prompt_tokens=(7,))):
        engine.submit(request)
    assert [each.request_id for each in finish(engine)] == ["first/2", "0", "1", "false"]


def test_without_conversations_nothing_is_kept(folders) -> None:
    engine = make_engine(folders["llama", False, 0])
    run_all(engine, make_requests(12))
    assert engine._conversations._kept == {}

"""The sampling of the embedded engine, and the end of its responses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tba_searcher.engines.engine import Completion, EngineDiedError, EngineSettings, Request
from tba_searcher.engines.tokenizer import StopStringMatcher, TextCodec, response_decoder, stop_start
from tba_searcher.engines.torch.engine import EmbeddedEngine, SamplingOptions, sample
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tba.versions import START
from tba.wire import Sampling
from tests.support.chi_square import assert_follows
from tests.support.engine_contract import make_request, run_all
from tests.support.tiny_model import EOS_ID, make_tiny_model

# ---- Top-k, top-p, minimum lengths and seeds ------------------------------------------------------------------------


LOGITS = torch.tensor([2.0, 0.5, 1.5, -1.0, 1.0, 0.5, -3.0])
NUM_DRAWS = 20_000


def options(*, top_k: int = 7, top_p: float = 1.0, banned: tuple[int, ...] = (), num_rows: int) -> SamplingOptions:
    rows = torch.arange(num_rows)
    return SamplingOptions(
        banned_rows=rows.repeat_interleave(len(banned)),
        banned_tokens=torch.tensor(banned, dtype=torch.long).repeat(num_rows),
        limited_rows=rows,
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
    )


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_k": 3}, [0, 2, 4]),
        ({"top_k": 4}, [0, 1, 2, 4, 5]),  # tokens that tie with the fourth stay
        ({"top_k": 99}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_p": 0.3}, [0]),
        ({"top_p": 0.6}, [0, 2]),
        ({"top_k": 3, "top_p": 0.75}, [0, 2]),  # of the three that are left, two hold 0.81
        ({"banned": (0, 4)}, [1, 2, 3, 5, 6]),
        ({"banned": (0,), "top_k": 2}, [2, 4]),
        ({"top_p": 1e-6}, [0]),
    ],
)
def test_draws_follow_the_restricted_distribution_and_so_do_their_logprobs(asked: dict, allowed: list) -> None:
    temperature = 0.9
    probs = np.zeros(7)
    probs[allowed] = np.exp(LOGITS.double().numpy()[allowed] / temperature)
    probs /= probs.sum()
    tokens, logprobs = sample(
        LOGITS.expand(NUM_DRAWS, 7),
        torch.full((NUM_DRAWS,), temperature),
        torch.Generator().manual_seed(3),
        options(num_rows=NUM_DRAWS, **asked),
    )
    assert_follows(np.bincount(tokens.numpy(), minlength=7), probs)
    np.testing.assert_allclose(logprobs.numpy(), np.log(probs[tokens.numpy()]), atol=1e-5)


def test_options_of_one_row_leave_the_others_alone() -> None:
    some = options(top_k=1, banned=(0,), num_rows=1)
    plain = sample(LOGITS.expand(4, 7), torch.ones(4), torch.Generator().manual_seed(1))
    mixed = sample(LOGITS.expand(4, 7), torch.ones(4), torch.Generator().manual_seed(1), some)
    assert (int(mixed[0][0]), float(mixed[1][0])) == (2, 0.0)
    for ours, theirs in zip(mixed, plain, strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], rtol=0, atol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def run(folder: Path, requests: list[Request], *, num_slots: int = 16) -> dict[str, Completion]:
    settings = EngineSettings(num_slots=num_slots, max_prompt_tokens=24, max_response_tokens=40, seed=5)
    return run_all(EmbeddedEngine(folder, START, settings), requests)


def test_ends_of_sequence_come_as_soon_as_they_may_and_no_sooner(folder: Path) -> None:
    shortest = {}
    for least in (0, 6, 20):
        requests = make_requests(200, max_response_tokens=20, min_response_tokens=least)
        done = run(folder, requests, num_slots=64)
        shortest[least] = min(len(completion.response_tokens) for completion in done.values())
        ends = {completion.finish_reason for completion in done.values()}
        assert ends == ({"length"} if least == 20 else {"stop", "length"})
    assert shortest == {0: 1, 6: 7, 20: 20}


def test_more_slots_than_there_is_memory_for_are_one_sentence(folder: Path) -> None:
    with pytest.raises(EngineDiedError, match=r"out of memory with 1000000000 slots; lower searcher\.num_slots"):
        run(folder, [], num_slots=10**9)


# ---- Stop strings ---------------------------------------------------------------------------------------------------


WORDS = ["a", "b", "ab", "ba", "\n", "\n\n", "b\na", "Ġ", "Ġa"]
STOPS = ["b", "ab", "\n\n", "ba\n", " a", "é", "。", "aé"]


def byte_tokenizer() -> Any:
    """One token per byte, as GPT-2 spells them, and some longer ones."""
    spelled = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(word.replace("\n", "Ċ") for word in WORDS)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(spelled))}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False)


TOKENIZER = byte_tokenizer()
DECODE = response_decoder(TOKENIZER)
IDS = [*TOKENIZER.convert_tokens_to_ids(["a", "b", "ab", "ba", "Ċ", "ĊĊ", "bĊa", "Ġ", "Ġa"])]
IDS += TOKENIZER.convert_tokens_to_ids(["Ã", "©", "ã", "Ģ", "Ĥ"])  # the bytes of é and 。
WATCH = StopStringMatcher(DECODE, len(TOKENIZER))


@given(st.lists(st.sampled_from(IDS), min_size=1, max_size=10), st.lists(st.sampled_from(STOPS), max_size=3))
def test_a_stop_is_seen_at_the_very_token_that_brings_it_into_the_text(ids: list[int], stops: list[str]) -> None:
    """Against the plain way: decode after every token and look whether the text now holds a stop string."""
    for end in range(1, len(ids) + 1):
        text = DECODE([ids[:end]])[0]
        holds = any(stop in text for stop in stops)
        assert WATCH.completes(ids[:end], tuple(stops)) == holds
        if holds:
            start = stop_start(text, DECODE([ids[: end - 1]])[0], stops)
            assert start == min(text.index(stop) for stop in stops if stop in text)
            return


def test_a_stop_that_was_there_before_the_last_token_does_not_count() -> None:
    assert stop_start("x\ny", "x\n", ["\n"]) is None
    assert stop_start("x\ny\n", "x\ny", ["\n"]) == 3
    assert stop_start("end", "en", ["nd", "end"]) == 0


def make_requests(num: int, *stops: str, **changes: Any) -> list[Request]:
    fields, sampling = {"max_response_tokens": 30, **changes}, Sampling.of(1.0, stop=stops)
    return [make_request(str(i), (5, 6), sampling, **fields) for i in range(num)]


def test_a_response_ends_with_the_token_that_completes_a_stop_and_its_text_before_the_stop(folder: Path) -> None:
    codec = TextCodec(folder)
    done = list(run(folder, make_requests(150, "3", "N=", "<eos>")).values())
    texts = codec.decode_responses(done)
    assert {completion.finish_reason for completion in done} == {"stop", "stop_string", "length"}
    plain = [replace(c, finish_reason="length") for c in done]
    for completion, text, whole in zip(done, texts, codec.decode_responses(plain), strict=True):
        assert len(completion.sampler_logprobs) == len(completion.response_tokens)
        assert "3" not in text
        assert "N=" not in text
        if completion.finish_reason == "stop_string":
            assert completion.response_tokens[-1] != EOS_ID  # that is an end of sequence, though its text is a stop
            assert whole in {text + "3", text + "N="}
        elif completion.finish_reason == "stop":
            assert whole == text + "<eos>"
        else:
            assert (whole, len(completion.response_tokens)) == (text, 30)


def test_a_stop_within_the_minimum_length_does_not_count(folder: Path) -> None:
    done = run(folder, make_requests(300, "3", min_response_tokens=8))
    codec, three = TextCodec(folder), TextCodec(folder).encode_prompt("3")[0]
    early = 0
    for completion in done.values():
        tokens = completion.response_tokens
        assert len(tokens) > 8
        early += three in tokens[:8]
        assert three not in tokens[8:-1]
        assert (completion.finish_reason == "stop_string") == (tokens[-1] == three and len(tokens) <= 30)
        if completion.finish_reason == "stop_string":  # only the stop that ended it is cut off
            assert codec.decode_responses([completion])[0].count("3") == np.count_nonzero(tokens[:-1] == three)
    assert early > 10

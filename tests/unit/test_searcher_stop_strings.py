"""Stop strings: the token that completes one ends the response, whatever the borders of tokens and characters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_searcher.engines.engine import Completion, EngineSettings, Request
from tba_searcher.engines.tokenizer import StopStringMatcher, TextCodec, response_decoder, stop_start
from tba_searcher.engines.torch.engine import EmbeddedEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tba.versions import START
from tba.wire import Sampling
from tests.support.tiny_model import EOS_ID, make_tiny_model

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def complete(folder: Path, requests: list[Request]) -> dict[str, Completion]:
    settings = EngineSettings(num_slots=16, max_prompt_tokens=8, max_response_tokens=40, seed=5)
    engine = EmbeddedEngine(folder, START, settings)
    for request in requests:
        engine.submit(request)
    done: dict[str, Completion] = {}
    while engine.num_active + engine.num_waiting:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def make_requests(num: int, *stops: str, **changes: Any) -> list[Request]:
    plain = Request(
        request_id="",
        prompt_tokens=(5, 6),
        sampling=Sampling(temperature=1.0, stop=stops),
        max_response_tokens=30,
        eos_ids=(EOS_ID,),
    )
    return [replace(plain, request_id=str(i), **changes) for i in range(num)]


def test_a_response_ends_with_the_token_that_completes_a_stop_and_its_text_before_the_stop(folder: Path) -> None:
    codec = TextCodec(folder)
    done = list(complete(folder, make_requests(150, "3", "N=", "<eos>")).values())
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
    done = complete(folder, make_requests(150, "3", min_response_tokens=8))
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


def test_greedy_responses_with_a_stop_are_those_without_it_up_to_the_stop(folder: Path) -> None:
    codec = TextCodec(folder)
    prompts = [(3 + i, 4 + i) for i in range(12)]
    greedy = {"eos_ids": (), "max_response_tokens": 25}
    free = [r for i, p in enumerate(prompts) for r in make_requests(1, prompt_tokens=p, **greedy)]
    free = [replace(r, request_id=str(i), sampling=Sampling(temperature=0.0)) for i, r in enumerate(free)]
    whole = complete(folder, free)
    texts = codec.decode_responses([whole[r.request_id] for r in free])
    stop = next(char for char in "0123456789+-*/=" if sum(char in text for text in texts) >= 2)
    ended = complete(folder, [replace(r, sampling=Sampling(temperature=0.0, stop=(stop,))) for r in free])
    for request, text in zip(free, texts, strict=True):
        completion = ended[request.request_id]
        assert completion.finish_reason == ("stop_string" if stop in text else "length")
        assert codec.decode_responses([completion])[0] == text.partition(stop)[0]
        num = len(completion.response_tokens)
        assert completion.response_tokens.tolist() == whole[request.request_id].response_tokens[:num].tolist()

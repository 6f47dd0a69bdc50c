"""The texts of tokens: a division of the text of all of them, at the right places."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tba_buffer.rollouts.token_texts import texts_of
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PIECES = ["hello", " world", "\n", "é", "你好", "😀", "\ufffd", "<s>", "  ", "'s"]


def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it, with few merges: characters are spread over tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["hello world", "你好 hello"] * 10, trainer)
    return core


def byte_fallback() -> Tokenizer:
    """Characters with spaces as "▁" and bytes for what is unknown, as Llama 2 and Gemma have it."""
    tokens = ["<unk>", "<s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", *"helowrd'sn", "▁world"]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


def word_piece() -> Tokenizer:
    """Words and their continuations, as BERT has it; its decoder also moves spaces."""
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "he": 1, "##llo": 2, "world": 3, ".": 4, "'": 5, "s": 6}))
    core.decoder = decoders.WordPiece()
    return core


MAKERS = {"byte-level": byte_level, "byte-fallback": byte_fallback, "word-piece": word_piece}
TOKENIZERS = {name: make() for name, make in MAKERS.items()}


def whole(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=False)


def by_all_beginnings(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Decode every beginning: a token adds what is then the same as in the text of all."""
    text, ends = whole(tokenizer, tokens), [0]
    for number in range(1, len(tokens) + 1):
        ends.append(max(ends[-1], len(commonprefix([whole(tokenizer, tokens[:number]), text]))))  # noqa: RUF071
    ends[-1] = len(text)
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("name", MAKERS)
@given(data=st.data())
def test_any_tokens_have_a_text_each(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    # beyond the vocabulary too: models have more tokens than their tokenizers
    numbers = st.integers(0, tokenizer.get_vocab_size() + 2)
    tokens = data.draw(st.lists(numbers, max_size=60), label="tokens")
    texts, text = texts_of(tokenizer, tokens), whole(tokenizer, tokens)
    assert len(texts) == len(tokens)
    if "\ufffd" not in text:
        assert "".join(texts) == text


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
@given(pieces=st.lists(st.sampled_from([piece for piece in PIECES if piece != "\ufffd"]), max_size=20))
def test_texts_are_divided_as_all_beginnings_say(name: str, pieces: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode("".join(pieces)).ids
    assert texts_of(tokenizer, tokens) == by_all_beginnings(tokenizer, tokens)


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_the_token_that_completes_a_character_adds_it(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode("😀h").ids[-5:]
    assert texts_of(tokenizer, tokens) == ["", "", "", "😀", "h"]
    assert texts_of(tokenizer, tokens[:2] + tokens[4:])[-1].endswith("h"), "half a character comes with the next token"
    assert texts_of(tokenizer, []) == []


def test_special_tokens_have_their_text_and_unknown_ones_none() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    hello = tokenizer.encode("hello").ids
    tokens = [tokenizer.token_to_id("<s>"), 10**6, *hello, 10**6]
    texts = texts_of(tokenizer, tokens)
    assert (texts[0], texts[1], texts[-1], "".join(texts)) == ("<s>", "", "", "<s>hello")


def test_the_tokenizer_of_the_quickstart_has_one_character_per_token(tmp_path: Path) -> None:
    from tba_cli.starter_models.starting_model import build_tokenizer

    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = [*tokenizer.encode("12+34=46").ids, tokenizer.token_to_id("<eos>")]
    assert texts_of(tokenizer, tokens) == [*"12+34=46", "<eos>"]

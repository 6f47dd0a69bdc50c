"""Between text and tokens: one rule for prompts, one for responses.

Prompt: exactly what the tokenizer of the policy version makes of `prompt.text`, i.e. special tokens only where the
tokenizer's own template adds them (Llama's leading BOS, for example), no chat template.
Response: all sampled tokens except the final end of sequence, decoded on their own, without cleaning up spaces, and cut
before the stop string that ended it. Other special tokens stay in the text: a reward must see them, or a policy learns
to hide them in right answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tba.config import Recipe
from tba.errors import ConfigError
from tba_searcher.engines.base import Completion
from tba_searcher.engines.stopping import Decode, stop_start
from tba_searcher.simulated_text import SimulatedCodec


class Codec(Protocol):
    """What the loop needs of a tokenizer."""

    eos_ids: tuple[int, ...]
    """The end-of-sequence ids that it knows; may be empty."""

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt."""
        ...

    def decode_responses(self, completions: Sequence[Completion]) -> list[str]:
        """The text of each response."""
        ...


def open_codec(recipe: Recipe, folder: Path) -> Codec:
    """The codec for the recipe's engine and the model in `folder`.

    Raises:
        ConfigError: the folder holds nothing usable.
    """
    if recipe.searcher.engine == "simulated":
        return SimulatedCodec(folder)
    return TextCodec(folder, trust_remote_code=recipe.model.trust_remote_code)


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer in a model folder.

    Raises:
        ConfigError: no usable tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {folder} holds no usable tokenizer: {error}") from None


def response_decoder(tokenizer: Any) -> Decode:
    """Token ids of several responses -> their texts, nothing left out or cleaned up."""

    def decode(ids: Sequence[Sequence[int]]) -> list[str]:
        return tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else []

    return decode


class TextCodec:
    """Tokenizes prompts and decodes responses with the tokenizer in a model folder.

    Raises:
        ConfigError: no usable tokenizer, or one whose template ends every prompt with end-of-sequence.
    """

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        self._tokenizer: Any = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        self._decode = response_decoder(self._tokenizer)
        eos = self._tokenizer.eos_token_id
        self.eos_ids: tuple[int, ...] = () if eos is None else (int(eos),)
        probe, bare = self._tokenizer("1"), self._tokenizer("1", add_special_tokens=False)
        if self.eos_ids and probe["input_ids"][-1:] == [eos] and bare["input_ids"][-1:] != [eos]:
            raise ConfigError(
                "the tokenizer ends every prompt with end-of-sequence; "
                "set add_eos_token to false in tokenizer_config.json"
            )

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return tuple(self._tokenizer(text, verbose=False)["input_ids"])

    def encode_response(self, text: str) -> tuple[int, ...]:
        """Token ids of a response that ended by itself: those of its text, and end-of-sequence.

        Raises:
            ConfigError: the tokenizer knows no end of sequence.
        """
        if not self.eos_ids:
            raise ConfigError("the tokenizer names no end-of-sequence token, so a response cannot be ended")
        return (*self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], self.eos_ids[0])

    def decode_responses(self, completions: Sequence[Completion]) -> list[str]:
        """The text of each response."""
        tokens = [c.response_tokens.tolist() for c in completions]
        texts = self._decode(
            [ids[: -1 if c.finish_reason == "stop" else None] for ids, c in zip(tokens, completions, strict=True)]
        )
        cut = [number for number, c in enumerate(completions) if c.finish_reason == "stop_string"]
        before = self._decode([tokens[number][:-1] for number in cut])
        for number, text_before in zip(cut, before, strict=True):
            texts[number] = texts[number][: stop_start(texts[number], text_before, completions[number].sampling.stop)]
        return texts

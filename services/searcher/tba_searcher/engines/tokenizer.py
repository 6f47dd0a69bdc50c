"""Text to tokens and back, and stop strings.

Prompt of text: exactly the tokens that the policy version's tokenizer makes of it, with what it puts before each text
(Llama's BOS, for example). Prompt of messages: those of the chat template, where special tokens in contents stay text
(`tba_searcher.conversations`).

Response: all sampled tokens except the final end of sequence, decoded without the prompt and without cleaning up
spaces. The text is cut before the stop string that ended it. Other special tokens stay in the text: a reward must see
them, or a policy learns to hide them in right answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tba.api import Prompt
from tba.config import Recipe
from tba.errors import ConfigError
from tba.model_folders import trust_hint
from tba_searcher.conversations.chat import ChatRenderer
from tba_searcher.conversations.known_families import open_renderer
from tba_searcher.conversations.template import TemplateRenderer
from tba_searcher.engines.engine import Completion, as_ids

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Maps the token ids of several responses to their texts."""
_UNFINISHED = "\ufffd"
"""The replacement character: decoders write it for bytes that do not form a whole character yet."""


class Codec(Protocol):
    """The tokenizer interface that the searcher's loop uses."""

    eos_ids: tuple[int, ...]
    """The ids that end a response, of the tokenizer, its chat template and generation_config.json; may be empty."""

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt of text."""
        ...

    def prompt_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt; raise RenderError if its messages cannot be rendered."""
        ...

    def decode_responses(self, completions: Sequence[Completion]) -> list[str]:
        """Return the text of each response."""
        ...


def open_codec(recipe: Recipe, folder: Path) -> Codec:
    """Open the codec for the recipe's engine and the model in `folder`."""
    if recipe.searcher.engine == "simulated":
        from tba_searcher.engines.simulated import SimulatedCodec

        return SimulatedCodec(folder)
    return TextCodec(folder, trust_remote_code=recipe.model.trust_remote_code)


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a model folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # files of a tokenizer raise anything
        raise ConfigError(f"model folder {folder} holds no usable tokenizer: {error}{trust_hint(error)}") from None


def _generation_ends(folder: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of a folder's generation_config.json."""
    file = folder / "generation_config.json"
    try:
        return as_ids(json.loads(file.read_bytes()).get("eos_token_id")) if file.is_file() else ()
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} has no usable eos_token_id: {error}") from None


def response_decoder(tokenizer: Any) -> Decode:
    """Return a decoder that keeps special tokens and does not clean up spaces."""

    def decode(ids: Sequence[Sequence[int]]) -> list[str]:
        return tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else []

    return decode


class TextCodec:
    """Tokenizes prompts and decodes responses with the tokenizer in a model folder."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        self._tokenizer: Any = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        self._decode = response_decoder(self._tokenizer)
        eos = self._tokenizer.eos_token_id
        ends = {*_generation_ends(folder), *([] if eos is None else [int(eos)])}
        if self._tokenizer.chat_template is not None:
            ends |= TemplateRenderer(self._tokenizer, {}).stop_ids
        self.eos_ids: tuple[int, ...] = tuple(sorted(ends))
        self._renderers: dict[str, ChatRenderer] = {}
        probe, bare = self._tokenizer("1"), self._tokenizer("1", add_special_tokens=False)
        if eos is not None and probe["input_ids"][-1:] == [eos] and bare["input_ids"][-1:] != [eos]:
            raise ConfigError(
                "the tokenizer ends every prompt with end-of-sequence; "
                "set add_eos_token to false in tokenizer_config.json"
            )

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt of text."""
        return tuple(self._tokenizer(text, verbose=False)["input_ids"])

    def prompt_tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt; raise RenderError if its messages cannot be rendered."""
        if prompt.messages is None:
            return self.encode_prompt(prompt.text)
        return self.renderer(prompt.chat_template_kwargs).render(prompt.messages, tools=prompt.tools).tokens

    def renderer(self, template_kwargs: Mapping[str, Any]) -> ChatRenderer:
        """Return the chat renderer for these arguments of the chat template; raise RenderError without a template."""
        key = json.dumps(template_kwargs, sort_keys=True)
        if key not in self._renderers:
            self._renderers[key] = open_renderer(self._tokenizer, template_kwargs, self.eos_ids)
        return self._renderers[key]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of runs of tokens, special tokens included."""
        return self._decode(ids)

    def save(self, folder: str) -> None:
        """Write the files of the tokenizer."""
        self._tokenizer.save_pretrained(folder)

    def cut(self, text: str, max_tokens: int) -> str:
        """Return a text with at most `max_tokens` tokens, and behind them how many it had."""
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) <= max_tokens:
            return text
        (kept,) = self._decode([ids[:max_tokens]])
        return f"{kept.rstrip(_UNFINISHED)}\n[cut: {max_tokens} of {len(ids)} tokens]"

    def decode_responses(self, completions: Sequence[Completion]) -> list[str]:
        """Return the text of each response."""
        tokens = [c.response_tokens.tolist() for c in completions]
        texts = self._decode(
            [ids[: -1 if c.finish_reason == "stop" else None] for ids, c in zip(tokens, completions, strict=True)]
        )
        cut = [number for number, c in enumerate(completions) if c.finish_reason == "stop_string"]
        before = self._decode([tokens[number][:-1] for number in cut])
        for number, text_before in zip(cut, before, strict=True):
            texts[number] = texts[number][: stop_start(texts[number], text_before, completions[number].sampling.stop)]
        return texts


def stop_start(text: str, text_before: str, stops: Sequence[str]) -> int | None:
    """Return the index in `text` of the first stop string that the last token completed; None if there is none.

    Args:
        text, text_before: the decoded response with and without its last token.
        stops: strings that are not empty.
    """
    # tokens and characters have no common borders: the last token may have completed a character before it
    old = len(text_before.rstrip(_UNFINISHED))
    found = [text.find(stop, max(0, old - len(stop) + 1)) for stop in stops]
    return min((start for start in found if start >= 0), default=None)


class StopStringMatcher:
    """Tells whether the newest token of a response completes a stop string."""

    def __init__(self, decode: Decode, vocab_size: int) -> None:
        self._decode, self._vocab_size = decode, vocab_size
        self._pairs: list[str] | None = None
        self._candidates: dict[tuple[str, ...], NDArray[np.bool_]] = {}

    def completes(self, tokens: Sequence[int], stops: tuple[str, ...]) -> bool:
        """Return whether the last of `tokens` completes one of `stops`."""
        # Decoding is slow, so it is done only for tokens [V] whose own text could complete a stop string: it has the
        # last character of one, or a part of a character.
        if stops not in self._candidates:
            if self._pairs is None:
                # each token twice: some decoders drop the space that a text begins with
                self._pairs = self._decode([(token, token) for token in range(self._vocab_size)])
            ends = {stop[-1] for stop in stops} | {_UNFINISHED}
            self._candidates[stops] = np.array([not ends.isdisjoint(text) for text in self._pairs])
        if not self._candidates[stops][tokens[-1]]:
            return False
        # the whole response is decoded: this is the text that rewards see
        text, text_before = self._decode([tokens, tokens[:-1]])
        return stop_start(text, text_before, stops) is not None

"""Encodes rendered chats so that special tokens inside contents stay text.

A content may hold the text of a special token, such as `<|im_end|>`, which would end its turn. `marked` puts a lone
surrogate behind the first character of each; the text before and behind a surrogate is encoded by itself, so no
special token is found there. No valid text has lone surrogates. Text without marks is encoded as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from tba_searcher.conversations.chat import Messages, RenderError

_MARK = "\ud800"
ESCAPED_MARK = r"\ud800"
"""What is left of a mark where a template writes contents as JSON."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_IN_BRACKETS = re.compile(r"[<\[].+[>\]]")
OPEN_MARKS = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"})
"""Marks that prompts name when they explain how to reply. They stay tokens where the tokenizer does not flag them."""


class ContentTokenizer:
    """A tokenizer of transformers that knows marks; it has every other attribute of the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content]
        # some models flag the tokens of their turns as ordinary ones; runs of spaces are added tokens too
        marks = {token.content for token in added if token.special or _IN_BRACKETS.fullmatch(token.content)}
        self._special = _any_of(marks - (OPEN_MARKS & {token.content for token in added if not token.special}))
        self._added = _any_of({token.content for token in added})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def marked(self, value: Any) -> Any:
        """Return a JSON value with a mark in the text of each special token."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(child) for key, child in value.items()}
        return [self.marked(child) for child in value] if isinstance(value, (list, tuple)) else value

    def marked_messages(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages with marks in all but their roles, which a template compares with its own."""
        return [
            {key: value if key == "role" else self.marked(value) for key, value in message.items()}
            for message in messages
        ]

    def first_added(self, text: str) -> tuple[int, int] | None:
        """Return the id of the added token that a text begins with, and where it ends; spaces may stand before it."""
        found = self._added.match(text, len(text) - len(text.lstrip()))
        return None if found is None else (self._tokenizer.convert_tokens_to_ids(found[0]), found.end())

    def encoded(self, text: str, *, add_special_tokens: bool = False) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and for each of them the character that it begins with, in order.

        Args:
            add_special_tokens: whether to add what the tokenizer puts before each text.
        """
        coded = self(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        return coded["input_ids"], list(accumulate((start for start, _ in coded["offset_mapping"]), max))

    def encode(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Return the token ids of a text."""
        return self(text, add_special_tokens=add_special_tokens)["input_ids"]

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False, **_: Any
    ) -> dict[str, Any]:
        """Return `input_ids`, and `offset_mapping` if asked: characters [start, end) of each token, marks counted."""
        ids, offsets, place = list[int](), list[tuple[int, int]](), 0
        # a slow tokenizer knows no offsets: all of its tokens begin with the text
        knows = return_offsets_mapping and self._tokenizer.is_fast
        for part in text.split(_MARK):
            coded = self._tokenizer(
                part, add_special_tokens=add_special_tokens, return_offsets_mapping=knows, verbose=False
            )
            found = coded["input_ids"]
            spans = coded["offset_mapping"] if knows else [(0, len(part))] * len(found)
            ids += found
            offsets += [(place + start, place + end) for start, end in spans]
            place, add_special_tokens = place + len(part) + len(_MARK), False
        return {"input_ids": ids, **({"offset_mapping": offsets} if return_offsets_mapping else {})}

    def _marked_text(self, text: str) -> str:
        text, parts = _SURROGATE.sub("\ufffd", text), list[str]()
        # again behind each mark: names of special tokens may overlap
        while (found := self._special.search(text)) is not None:
            if len(found[0]) == 1:
                raise RenderError(f"a message holds {found[0]!r}, which no text can name: it is a special token itself")
            parts.append(text[: found.start() + 1])
            text = text[found.start() + 1 :]
        return _MARK.join([*parts, text])


def _any_of(texts: set[str]) -> re.Pattern[str]:
    # the longest first, as tokenizers do; without texts a pattern that matches nothing
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")

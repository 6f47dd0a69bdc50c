"""Examples: rows of a JSONL file, their token ids, and the order in which an epoch goes through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tba.errors import ConfigError

Ids = NDArray[np.int32]
Row = dict[str, str]
Example = TypeVar("Example")
TOO_LONG, NO_TOKENS = "too_long", "no_tokens"
"""Reasons to leave an example out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples(Generic[Example]):
    """Examples as token ids."""

    kept: list[Example] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    """How many are not used, by reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and the response that is learned, which ends with end-of-sequence."""

    prompt: Ids
    response: Ids

    @property
    def num_tokens(self) -> int:
        """Tokens of both."""
        return len(self.prompt) + len(self.response)

    @property
    def largest_id(self) -> int:
        """The largest token id."""
        return int(max(self.prompt.max(), self.response.max()))


def read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """Read the examples of a JSONL file.

    Args:
        columns: texts that every row has.

    Raises:
        ConfigError: the file cannot be read or is empty, or a row is no object with these texts.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"examples {path} cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = msgspec.json.decode(line)
        except ValueError as error:
            raise ConfigError(f"examples {path}, line {number} is not JSON: {error}") from None
        for column in columns:
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                raise ConfigError(
                    f"examples {path}, line {number} has no text {column!r}; every row needs {', '.join(columns)}"
                )
        rows.append(row)
    if not rows:
        raise ConfigError(f"examples {path} is empty; give at least one example")
    return rows


def keep_fitting(
    examples: Iterable[Example], lengths: Callable[[Example], Sequence[int]], *, max_tokens: int, path: Path
) -> Examples[Example]:
    """Leave out examples of which a text is too long or has no tokens.

    Args:
        lengths: tokens of each text of an example.
        max_tokens: of one text.
        path: of the examples, for errors.

    Raises:
        ConfigError: nothing is left.
    """
    kept, left_out, longest = [], Counter[str](), 0
    for example in examples:
        sizes = lengths(example)
        longest = max(longest, *sizes)
        if max(sizes) > max_tokens:
            left_out[TOO_LONG] += 1
        elif min(sizes) == 0:
            left_out[NO_TOKENS] += 1
        else:
            kept.append(example)
    if not kept:
        raise ConfigError(
            f"no example of {path} can be used ({dict(left_out)}; the longest has {longest} tokens): raise "
            f"max_length_tokens, which is {max_tokens}, or give other examples"
        )
    return Examples(kept=kept, left_out=dict(left_out))


def encode_answers(rows: Sequence[Row], tokenizer: Any, *, max_tokens: int, path: Path) -> Examples[Answer]:
    """Return prompts as a searcher encodes them, and responses that end as its completions do.

    A prompt gets the special tokens of the tokenizer's own template; a response gets none but end-of-sequence.

    Args:
        max_tokens: of prompt and response together; longer examples are left out.
        path: of the rows, for errors.

    Raises:
        ConfigError: the tokenizer has no end of sequence, or puts one behind every prompt; or nothing is left.
    """
    eos = end_of_sequence(tokenizer, path)
    prompts = token_ids(tokenizer, [row["prompt"] for row in rows])
    responses = token_ids(tokenizer, [row["response"] for row in rows], add_special_tokens=False)
    if all(len(ids) > 1 and ids[-1] == eos for ids in prompts):
        raise ConfigError(
            "the tokenizer ends every prompt with end-of-sequence; set add_eos_token to false in its "
            "tokenizer_config.json"
        )
    pairs = zip(prompts, responses, strict=True)
    answers = (Answer(np.array(p, np.int32), np.array([*r, eos], np.int32)) for p, r in pairs)
    # a model needs one token to predict from
    return keep_fitting(answers, lambda a: (a.num_tokens if len(a.prompt) else 0,), max_tokens=max_tokens, path=path)


def end_of_sequence(tokenizer: Any, path: Path) -> int:
    """Return the id of end-of-sequence.

    Raises:
        ConfigError: the tokenizer has none.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer names no end-of-sequence token, so the examples of {path} cannot be ended")
    return int(tokenizer.eos_token_id)


def token_ids(tokenizer: Any, texts: Sequence[str], **options: Any) -> list[list[int]]:
    """Return the token ids of texts; `verbose=False` leaves out the warning about long ones, which are counted."""
    return list(tokenizer(list(texts), verbose=False, **options)["input_ids"])


class Order:
    """The examples of each step: one epoch after another, each shuffled by the seed and its number.

    A pure function of the step, so a resume needs no state.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int) -> None:
        self._num_examples, self._batch_size, self._seed = num_examples, batch_size, seed
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def of_step(self, step: int) -> list[int]:
        """Return the examples of optimizer step `step` (0 is the first)."""
        first = step * self._batch_size
        places = (divmod(place, self._num_examples) for place in range(first, first + self._batch_size))
        return [int(self._epoch(epoch)[place]) for epoch, place in places]

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_examples)

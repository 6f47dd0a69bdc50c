"""Text and tokens of the simulated engine: about four characters a token, no tokenizer, no model.

Ids are valid for the run's real model (its `config.json` says how many there are), so that a trainer accepts them; what
they mean to it is noise. A prompt always has the same ids; a response is read as numbers of three digits.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tba.errors import ConfigError
from tba.weights.versions import MODEL_CONFIG_NAME
from tba_searcher.engines.base import Completion

CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The token ids of a model: 0 to `num_ids` - 1."""

    num_ids: int
    eos_ids: tuple[int, ...]
    """Those that end a sequence."""
    plain_ids: NDArray[np.int32]
    """Those that responses are made of: the first thousand without the ends of sequence."""

    @classmethod
    def of_folder(cls, folder: Path) -> Vocabulary:
        """Of the model whose `config.json` is in `folder`; one that names no end of sequence ends with its last id.

        Raises:
            ConfigError: it names no vocabulary.
        """
        path = folder / MODEL_CONFIG_NAME
        try:
            document = json.loads(path.read_text())
            document = {**document.get("text_config", {}), **document}
            num_ids, eos = int(document["vocab_size"]), document.get("eos_token_id")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the simulated engine finds no vocab_size in {path} ({type(error).__name__}: {error}); "
                "the version must hold the config.json of a language model"
            ) from None
        ids = eos if isinstance(eos, list) else [num_ids - 1] if eos is None else [eos]
        known = tuple(sorted({int(number) for number in ids if 0 <= int(number) < num_ids}))
        eos_ids = known or (num_ids - 1,)
        plain_ids = np.setdiff1d(np.arange(min(num_ids, 1000 + len(eos_ids)), dtype=np.int32), eos_ids)
        if not len(plain_ids):
            raise ConfigError(f"{path}: all {num_ids} ids end a sequence; the simulated engine has nothing to say")
        return cls(num_ids, eos_ids, plain_ids)

    def draw(self, rng: np.random.Generator, num_tokens: int) -> NDArray[np.int32]:
        """Ids [num_tokens], any but the ends of sequence."""
        return self.plain_ids[rng.integers(len(self.plain_ids), size=num_tokens)]


class SimulatedCodec:
    """Implements `tba_searcher.text.Codec`.

    Raises:
        ConfigError: `config.json` names no vocabulary.
    """

    def __init__(self, folder: Path) -> None:
        self._vocabulary = Vocabulary.of_folder(folder)
        self.eos_ids = self._vocabulary.eos_ids

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """One id for every four bytes of a prompt."""
        raw = text.encode(errors="replace")
        parts = (raw[at : at + CHARS_PER_TOKEN] for at in range(0, len(raw), CHARS_PER_TOKEN))
        return tuple(zlib.crc32(part) % self._vocabulary.num_ids for part in parts)

    def decode_responses(self, completions: Sequence[Completion]) -> list[str]:
        """Every token but the end of sequence as a number of three digits, spaces between them."""
        return [
            " ".join(f"{token % 1000:03d}" for token in c.response_tokens[: -1 if c.finish_reason == "stop" else None])
            for c in completions
        ]

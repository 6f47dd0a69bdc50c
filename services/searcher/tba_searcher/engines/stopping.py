"""Stop strings: which sampled token completes one, and where the text of the response then ends.

Tokens and characters have no common borders, so the text is decoded to find out: that of the whole response, the same
text that rewards see. Only a token whose own text could complete a stop string is worth decoding, and which ones these
are is known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Token ids of several responses -> their texts."""
_UNFINISHED = "\ufffd"
"""What stands for bytes that are no whole character yet."""


def stop_start(text: str, text_before: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string begins that the last token completed; None when it completed none.

    Args:
        text, text_before: the decoded response with and without its last token.
        stops: not empty strings.
    """
    old = len(text_before.rstrip(_UNFINISHED))
    found = [text.find(stop, max(0, old - len(stop) + 1)) for stop in stops]
    return min((start for start in found if start >= 0), default=None)


class StopWatch:
    """Says whether the newest token of a response completes a stop string.

    Args:
        decode: the decoder of responses.
        vocab_size: token ids are below it.
    """

    def __init__(self, decode: Decode, vocab_size: int) -> None:
        self._decode, self._vocab_size = decode, vocab_size
        self._pairs: list[str] | None = None
        self._candidates: dict[tuple[str, ...], NDArray[np.bool_]] = {}

    def completes(self, tokens: Sequence[int], stops: tuple[str, ...]) -> bool:
        """Whether the last of `tokens` completes one of `stops`."""
        if not self._candidates_of(stops)[tokens[-1]]:
            return False
        text, text_before = self._decode([tokens, tokens[:-1]])
        return stop_start(text, text_before, stops) is not None

    def _candidates_of(self, stops: tuple[str, ...]) -> NDArray[np.bool_]:
        """Which tokens [V] can complete one of the stops: those whose text holds a last character of one, or a part of
        a character."""
        known = self._candidates.get(stops)
        if known is None:
            if self._pairs is None:  # twice the token: some decoders drop the space that a text begins with
                self._pairs = self._decode([(token, token) for token in range(self._vocab_size)])
            ends = {stop[-1] for stop in stops} | {_UNFINISHED}
            known = np.array([not ends.isdisjoint(text) for text in self._pairs])
            self._candidates[stops] = known
        return known

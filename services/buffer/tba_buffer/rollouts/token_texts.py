"""The text that each token of a response adds, for people who look at log-probs token by token.

split_text    text of all tokens -> text per token; their concatenation is the text of all
TokenTexts    reads `tokenizer.json` of the run's model from the object store, once, and keeps the tokenizer in memory
              (for 128,000 tokens: about 110 MB, and nothing else runs for the half second that it takes to parse)
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tba.concurrency import in_thread
from tba.config.sections import StoreSection
from tba.logs import get_logger
from tba.store import open_store
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba_buffer.storage.context import Context, RunHash

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
RETRY_S = 30.0
"""Pause after a load that failed and may succeed later."""
LOAD_WAIT_S = 3.0
"""How long a request waits for a load. A slower one continues, and the requests after it have its result."""
MAX_PENDING = 16
"""Most tokens that are added to a window before the next one begins. Characters have four bytes at most, so with more
the bytes are no text, or the decoder is an unusual one."""
REPLACEMENT = "\ufffd"
log = get_logger("token_texts")


def split_text(decode: Callable[[list[int]], str], tokens: list[int]) -> list[str]:
    """Return the text that each token adds: the concatenation is `decode(tokens)`. O(n)

    A token that ends in the middle of a character adds "", and the one that completes it adds the character.

    Args:
        decode: tokens -> text; the beginning and the end of the text may depend on what stands beside them.
        tokens: [n] that `decode` knows.
    """
    # Windows of a few tokens are decoded and found again in the text of all: so the result is a division of that text,
    # whatever a decoder does at the edges of a window, such as to strip a space or to replace half of a character.
    whole, texts = decode(tokens), []
    context, anchor, done, end = 0, 0, 0, 0  # whole[:done] is the text of tokens[:anchor]
    before = ""  # the text of tokens[context:anchor], by itself
    for number in range(1, len(tokens) + 1):
        window, start = decode(tokens[context:number]), end
        added = window[len(before) :] if window.startswith(before) else ""
        num_same = _num_same(added, whole[done : done + len(added)])
        end, is_same, is_long = max(end, done + num_same), num_same == len(added), number - anchor >= MAX_PENDING
        if is_long and not is_same:
            end = max(end, _end_of(decode(tokens[anchor:number]), whole, done))
        # behind half of a character, or bytes that are none, another window might begin in the middle of a character
        if is_long or (added and is_same and not added.endswith(REPLACEMENT)):
            context, anchor, done = anchor, number, end
            before = decode(tokens[context:anchor])
        texts.append(whole[start:end])
    if texts:
        texts[-1] += whole[end:]
    return texts


def _num_same(text: str, other: str) -> int:
    """Return how many characters at their beginning are the same."""
    if text == other:
        return len(text)
    return next((at for at, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), len(other))


def _end_of(text: str, whole: str, start: int) -> int:
    """Return where `text` ends in `whole`, by its longest part that is found near `start`."""
    part = max(text.split(REPLACEMENT), key=len)
    at = whole.find(part, start, start + 2 * len(text) + 4 * MAX_PENDING)
    return min(len(whole), max(start, at - text.index(part)) + len(text))


class TokenTexts:
    """Gives the texts of tokens, if the tokenizer of the run's model can be had.

    Args:
        context: Redis and settings.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tokenizer: Tokenizer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._due_s = -math.inf
        """When to load again (monotonic)."""
        self._problem = ""

    async def of(self, tokens: list[int]) -> list[str] | None:
        """Return the text that each token adds [n]; None: there is no tokenizer, and the log says why."""
        if self._tokenizer is None:
            await self._wait_for_load()
        if (tokenizer := self._tokenizer) is None:
            return None
        return await in_thread(lambda: texts_of(tokenizer, tokens))

    async def _wait_for_load(self) -> None:
        if self._loading is None or self._loading.done():
            if time.monotonic() < self._due_s:
                return
            self._loading = asyncio.create_task(self._load(), name="load-tokenizer")
        await asyncio.wait([self._loading], timeout=LOAD_WAIT_S)

    async def _load(self) -> None:
        recipe = self._context.recipe
        try:
            # the newest version: older ones may have been deleted, and all have the same tokenizer
            newest = (await RunHash.read(self._context)).latest_version
            version = START if newest is None else PolicyVersion.parse(newest)
            self._tokenizer = await in_thread(lambda: load_tokenizer(recipe.store, recipe.run.name, version))
            problem, retry_s = f"the model has no {TOKENIZER_NAME}", math.inf
        except ImportError as error:
            problem, retry_s = f"{error}; install tba-buffer[tokens]", math.inf
        except Exception as error:  # tokenizers raises a plain Exception for a file that it cannot read
            problem, retry_s = f"{type(error).__name__}: {error}", RETRY_S
        self._due_s = time.monotonic() + retry_s
        if self._tokenizer is None and problem != self._problem:  # one line, not one per request
            log.warning("no_token_texts", problem=problem)
        self._problem = problem


def load_tokenizer(store: StoreSection, run: str, version: PolicyVersion) -> Tokenizer | None:
    """Read the tokenizer of a weight version from the store; None: it has none.

    Raises:
        ImportError: the package tokenizers is not installed.
        StoreError: the version is not there (yet), the store is away, or the file is damaged.
        Exception: this release of tokenizers cannot read the file.
    """
    from tokenizers import Tokenizer

    data = WeightVersions(open_store(store), run).read_file(version, TOKENIZER_NAME)
    return None if data is None else Tokenizer.from_str(data.decode())


def texts_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds [n]; tokens that the tokenizer does not know add nothing."""
    # a model may have more tokens than its tokenizer: `decode` skips them, and many in a row would make long windows
    unknown = {token for token in set(tokens) if tokenizer.id_to_token(token) is None}
    known = [token for token in tokens if token not in unknown]
    texts = iter(split_text(lambda window: tokenizer.decode(window, skip_special_tokens=False), known))
    return ["" if token in unknown else next(texts) for token in tokens]

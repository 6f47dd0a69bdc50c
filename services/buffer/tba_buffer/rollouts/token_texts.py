"""The text that each token of a response adds, for people who look at log-probs token by token.

`tokenizer.json` of the run's model is read from the object store once, and the tokenizer stays in memory. With 128,000
tokens it takes about 110 MB, and parsing it stops the whole process for half a second.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tba.concurrency import in_thread
from tba.config.sections import StoreSection
from tba.errors import pip_install
from tba.logs import get_logger
from tba.store import open_store
from tba.versions import START, PolicyVersion
from tba.weights import WeightVersions
from tba_buffer.storage.context import Context, RunHash

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
RETRY_S = 30.0
"""Pause after a load of the tokenizer that failed and may succeed later."""
LOAD_WAIT_S = 3.0
"""How long a request waits for the tokenizer. A slower load continues in the background for later requests."""
MAX_PENDING = 16
"""After this many tokens without a complete character (at most four bytes), their bytes are decoded as they are."""
log = get_logger("token_texts")


class TokenTexts:
    """Gives the texts of tokens, if the tokenizer of the run's model can be loaded."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tokenizer: Tokenizer | None = None
        self._loading: asyncio.Task[None] | None = None
        self._due_s = -math.inf
        """When to load again (monotonic)."""
        self._problem = ""

    async def of(self, tokens: list[int]) -> list[str] | None:
        """Return the text that each token adds [n]; None if no tokenizer is loaded within LOAD_WAIT_S."""
        if self._tokenizer is None:
            if self._loading is None or self._loading.done():
                if time.monotonic() < self._due_s:
                    return None
                self._loading = asyncio.create_task(self._load(), name="load-tokenizer")
            await asyncio.wait([self._loading], timeout=LOAD_WAIT_S)
        if (tokenizer := self._tokenizer) is None:
            return None
        return await in_thread(lambda: texts_of(tokenizer, tokens))

    async def _load(self) -> None:
        recipe = self._context.recipe
        try:
            # the newest version: older ones may have been deleted, and all have the same tokenizer
            newest = (await RunHash.read(self._context)).latest_version
            version = START if newest is None else PolicyVersion.parse(newest)
            self._tokenizer = await in_thread(lambda: load_tokenizer(recipe.store, recipe.run.name, version))
            problem, retry_s = f"the model has no {TOKENIZER_NAME}", math.inf
        except ImportError as error:
            problem, retry_s = f"{error}; {pip_install('tokenizers')}", math.inf
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
    """Return the text that each token adds. [n]

    A token that ends in the middle of a character adds "", and the token that completes the character adds it. Bytes
    that are no text are decoded with a later token. Tokens that the tokenizer does not know add nothing.
    """
    from tokenizers.decoders import DecodeStream

    texts, pending, stream = list[str](), list[int](), DecodeStream(skip_special_tokens=False)
    for token in tokens:
        pending.append(token)
        try:
            text, is_lost = stream.step(tokenizer, token), len(pending) >= MAX_PENDING
        except Exception:  # tokenizers raises a plain Exception where bytes that are no text end
            text, is_lost = None, True
        if text is None and is_lost:
            text, stream = tokenizer.decode(pending, skip_special_tokens=False), DecodeStream(skip_special_tokens=False)
        if text is not None:
            pending = []
        texts.append(text or "")
    if pending:
        texts[-1] = tokenizer.decode(pending, skip_special_tokens=False)
    return texts

"""Score with neural networks in a model process: the common part of the kinds `reward_model` and `redteam`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tba.config.reward import ModelScorerSpec
from tba.errors import ConfigError
from tba_reward.model_server.client import ModelProcess
from tba_reward.scorer import Item, Outcome, installed_version, version_of
from tba_reward.scorers import Tools

LOAD_TIMEOUT_S = 600.0
"""Deadline for loading the models of a scorer; enough for some billions of parameters from a slow disk."""


class ModelServerScorer:
    """Scores items in a model process, which gets all items at once and cuts them into batches itself."""

    def __init__(self, spec: ModelScorerSpec, tools: Tools, *, implementation: int) -> None:
        for name in ("model", "victim", "classifier"):
            path: str | None = getattr(spec, name, None)
            if path is None or Path(path).expanduser().is_dir():
                continue
            if path.startswith((".", "/", "~")) or path.count("/") != 1:
                raise ConfigError(
                    f"reward kind {spec.kind!r}: {name} = {path!r} is not a folder; tba data prepare RECIPE fetches or "
                    "makes what a recipe needs"
                )
        names = ("torch", "transformers")
        self._packages = [installed_version(spec.kind, name) for name in names]
        self._spec, self._implementation = spec, implementation
        self._process: ModelProcess = tools.models.process(spec, load_timeout_s=LOAD_TIMEOUT_S)

    @property
    def version(self) -> str:
        """Digest of the models' files, the versions of torch and transformers, and all settings that decide a score."""
        return version_of(self._spec, self._implementation, self._process.digest, *self._packages)

    async def start(self) -> None:
        """Start the model process, and wait until it has loaded the models or failed to."""
        await self._process.start()

    async def close(self) -> None:
        """Kill the model process, also for other scorers that share it."""
        await self._process.close()

    def health(self) -> str:
        """Return `ok` while the models are loaded, else what is wrong."""
        return self._process.health()

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Return one outcome per item, in order."""
        return await asyncio.gather(*(self._score(item) for item in items))

    async def _score(self, item: Item) -> Outcome:
        finished, timeout_s = item.is_finished, self._spec.timeout_s
        return await self._process.score(item.prompt, item.response, finished=finished, timeout_s=timeout_s)

"""Weight versions on this machine: pulled in the background, checked before use, kept while needed."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tba.errors import DigestError, TbaError
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Manifest
from tba_searcher.engines.base import Engine, EngineCheckError, EngineDiedError

FIRST_RETRY_S = 30.0
"""Pause before a refused version is tried again; it doubles with every refusal, up to MAX_RETRY_S."""
MAX_RETRY_S = 600.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """How often a version was refused, and until when (of `time.monotonic`)."""

    count: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Pulled:
    """One version whose tensors lie in `paths`, digests verified."""

    version: PolicyVersion
    paths: tuple[Path, ...]
    manifest: Manifest


class PulledVersions:
    """The versions in a local folder.

    `fetch` blocks and runs in a thread; everything else belongs to the event loop's thread.
    """

    def __init__(self, versions: WeightVersions, folder: Path) -> None:
        self._versions, self._folder = versions, folder
        self._pulled: dict[PolicyVersion, Pulled] = {}
        self._refusals: dict[PolicyVersion, Refusal] = {}

    @property
    def refused(self) -> set[PolicyVersion]:
        """Versions that failed a check, until they may be tried again."""
        now_s = time.monotonic()
        return {version for version, refusal in self._refusals.items() if now_s < refusal.until_s}

    def refuse(self, version: PolicyVersion) -> float:
        """A version failed a check: it is pulled and tried again after a pause, which doubles each time.

        The refusal may have been false (memory was short, a disk flipped a bit); one must not stop a fleet for ever.

        Returns:
            Seconds until it is tried again.
        """
        count = self._refusals[version].count + 1 if version in self._refusals else 1
        pause_s = min(FIRST_RETRY_S * 2 ** min(count - 1, 10), MAX_RETRY_S)
        self._refusals[version] = Refusal(count, time.monotonic() + pause_s)
        self._delete(version)
        return pause_s

    def try_again(self) -> list[PolicyVersion]:
        """An operator wants every refused version tried again at once; which these are."""
        found = sorted(self.refused)
        self._refusals = {version: replace(refusal, until_s=0.0) for version, refusal in self._refusals.items()}
        return found

    def accepted(self, version: PolicyVersion) -> None:
        """A version has passed its checks."""
        self._refusals.pop(version, None)

    def inherit(self, other: PulledVersions) -> None:
        """Refuse what another one refuses."""
        self._refusals = dict(other._refusals)

    def fetch_all(self, version: PolicyVersion) -> tuple[Pulled, Path]:
        """Pull tensors, config and tokenizer; returns the version and the folder of its files.

        Raises:
            StoreError, MalformedError
        """
        folder = self._folder / f"model-{version}"
        manifest = self._versions.download(version, folder)
        return Pulled(version, tuple(folder / stored.name for stored in manifest.tensors), manifest), folder

    def fetch(self, version: PolicyVersion) -> Pulled:
        """Pull the tensors of a version.

        Raises:
            StoreError, MalformedError
        """
        manifest, paths = self._versions.download_tensors(version, self._folder / f"tensors-{version}")
        return Pulled(version, tuple(paths), manifest)

    def add(self, pulled: Pulled) -> None:
        """A version has arrived."""
        self._pulled[pulled.version] = pulled

    def get(self, version: PolicyVersion | None) -> Pulled | None:
        """The version, if it is here and not refused."""
        return None if version is None or version in self.refused else self._pulled.get(version)

    def keep_only(self, versions: Collection[PolicyVersion | None]) -> None:
        """Delete every other version's tensors."""
        for version in set(self._pulled) - set(versions):
            self._delete(version)

    def _delete(self, version: PolicyVersion) -> None:
        if (pulled := self._pulled.pop(version, None)) is not None:
            for path in pulled.paths:
                path.unlink(missing_ok=True)


class Loaded(Protocol):
    """A model in memory."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    def params_sha256(self) -> str:
        """`tba.wire.manifest.params_digest` over its parameters."""
        ...

    def canary_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs [R] at temperature 1 of a given response."""
        ...


def check_loaded(engine: Loaded, manifest: Manifest) -> None:
    """The two checks before a version may be used: the parameters the engine holds, and the canary.

    Raises:
        DigestError: naming the check, what was found and what was published.
    """
    found = engine.params_sha256()
    if found != manifest.params_sha256:
        raise DigestError(
            f"weight version {manifest.version}: the engine holds parameters with sha256 {found}, "
            f"published were {manifest.params_sha256}; this version is not used"
        )
    canary = manifest.canary
    highest = max(*canary.prompt_tokens, *canary.response_tokens)
    if highest >= engine.vocab_size:  # before it runs: on a GPU it would take the engine with it
        raise DigestError(
            f"weight version {manifest.version}: its canary has the token id {highest}, the model's vocabulary "
            f"{engine.vocab_size} tokens; this version is not used"
        )
    logprobs = engine.canary_logprobs(canary.prompt_tokens, canary.response_tokens)
    distance = float(np.abs(logprobs - np.array(canary.logprobs)).max())
    if not distance <= canary.tolerance:
        raise DigestError(
            f"weight version {manifest.version}: canary log-probs are off by {distance:.3g}, allowed are "
            f"{canary.tolerance:.3g}; this version is not used"
        )


def refusal(engine: Engine, manifest: Manifest) -> DigestError | EngineCheckError | None:
    """Why what the engine has loaded may not be used; None when it passes its checks.

    Whatever an engine raises meanwhile refuses the version alone. Whether the engine can still be used shows when it
    goes back to the version before.
    """
    try:
        engine.verify(manifest)
    except DigestError as error:
        return error
    except Exception as error:
        return _check_error(manifest, "checked", error)
    return None


def swap(engine: Engine, new: Pulled, old: Pulled) -> TbaError | None:
    """Load `new` and check it; where that fails, load `old` again and return the reason.

    Raises:
        EngineDiedError: the engine cannot go on.
    """
    refused: TbaError | None
    try:
        engine.load_weights(new.paths, new.version)
    except EngineDiedError:
        raise
    except TbaError as error:
        refused = error
    except Exception as error:
        refused = _check_error(new.manifest, "loaded", error)
    else:
        refused = refusal(engine, new.manifest)
    if refused is None:
        return None
    try:
        engine.load_weights(old.paths, old.version)
        if isinstance(refused, EngineCheckError):  # it failed in an unknown way: does it still compute what it should?
            engine.verify(old.manifest)
    except EngineDiedError:
        raise
    except Exception as second:
        raise EngineDiedError(
            f"version {new.version} was refused ({refused}), and {old.version} cannot be loaded again: {second}"
        ) from None
    return refused


def _check_error(manifest: Manifest, doing: str, error: Exception) -> EngineCheckError:
    what = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return EngineCheckError(
        f"weight version {manifest.version}: the engine failed while it was {doing} ({what}); this version is not used"
    )

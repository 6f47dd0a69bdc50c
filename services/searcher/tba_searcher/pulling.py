"""Weight versions on this machine: pulled in the background, checked before use, kept while needed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tba.errors import DigestError, TbaError
from tba.versions import PolicyVersion
from tba.weights import WeightVersions
from tba.wire import Manifest
from tba_searcher.engines.base import Engine, EngineDiedError


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
        self.refused: set[PolicyVersion] = set()
        """Versions that failed a check; never tried again by this process."""

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
            for path in self._pulled.pop(version).paths:
                path.unlink(missing_ok=True)


class Loaded(Protocol):
    """A model in memory."""

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
    logprobs = engine.canary_logprobs(canary.prompt_tokens, canary.response_tokens)
    distance = float(np.abs(logprobs - np.array(canary.logprobs)).max())
    if not distance <= canary.tolerance:
        raise DigestError(
            f"weight version {manifest.version}: canary log-probs are off by {distance:.3g}, allowed are "
            f"{canary.tolerance:.3g}; this version is not used"
        )


def swap(engine: Engine, new: Pulled, old: Pulled) -> TbaError | None:
    """Load `new` and check it; where that fails, load `old` again and return the reason.

    Raises:
        EngineDiedError: the engine cannot go on.
    """
    try:
        engine.load_weights(new.paths, new.version)
        engine.verify(new.manifest)
    except EngineDiedError:
        raise
    except TbaError as error:
        try:
            engine.load_weights(old.paths, old.version)
        except EngineDiedError:
            raise
        except TbaError as second:
            raise EngineDiedError(
                f"version {new.version} was refused ({error}), and {old.version} cannot be loaded again: {second}"
            ) from None
        return error
    return None

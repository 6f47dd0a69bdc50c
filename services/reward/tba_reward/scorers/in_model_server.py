"""Score by neural networks in a model process: the common part of `reward_model` and `redteam`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tba.config.reward import ModelScorerSpec
from tba.errors import ConfigError
from tba_reward.model_server.client import ModelProcess
from tba_reward.scorer import version_of
from tba_reward.scorers import Tools

LOAD_TIMEOUT_S = 600.0
"""Deadline for loading the models of a scorer: models of some billions of parameters from a slow disk."""
_PATH_FIELDS = ("model", "victim", "classifier")
_RUNTIME_FIELDS = ("device", "trust_remote_code", "batch_tokens", "batch_wait_s", "num_threads")


class ModelServerScorer:
    """A scorer with one model process; its subclasses have `score`.

    Args:
        implementation: see `version_of`.

    Raises:
        ConfigError: a package or a folder is missing.
    """

    def __init__(self, spec: ModelScorerSpec, tools: Tools, *, implementation: int) -> None:
        for name in _PATH_FIELDS:
            _check_folder(spec.kind, name, getattr(spec, name, None))  # type: ignore[attr-defined]  # all kinds have it
        self._packages = [_installed(spec.kind, name) for name in ("torch", "transformers")]  # type: ignore[attr-defined]
        self._spec, self._implementation = spec, implementation
        self._versions: dict[str, str] = {}  # by the digest of the files; kept because every result has its version
        self._timeout_s = spec.timeout_s
        self._process: ModelProcess = tools.models.process(spec, load_timeout_s=LOAD_TIMEOUT_S)

    @property
    def version(self) -> str:
        """The digest of the models' files and of all settings that decide a score."""
        digest = self._process.digest
        if digest not in self._versions:
            self._versions[digest] = self._version_with(digest)
        return self._versions[digest]

    def _version_with(self, digest: str) -> str:
        fields = type(self._spec).model_fields
        # where the files are and how they are run does not change a score
        same = {name: fields[name].default for name in _RUNTIME_FIELDS if name in fields}
        for name in _PATH_FIELDS:
            same |= {name: ""} if name in fields else {}
        spec = self._spec.model_copy(update=same)
        return version_of(spec, self._implementation, digest, *self._packages)

    async def start(self) -> None:
        """Load the models."""
        await self._process.start()

    async def close(self) -> None:
        """End the process."""
        await self._process.close()

    def health(self) -> str:
        """Return `ok` while the models are loaded."""
        return self._process.health()


def _check_folder(kind: str, field: str, path: str | None) -> None:
    if path is None or Path(path).expanduser().is_dir():
        return
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(
            f"reward kind {kind!r}: {field} = {path!r} is not a folder; tba data prepare RECIPE fetches or makes what "
            "a recipe needs"
        )


def _installed(kind: str, package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"reward kind {kind!r} needs the package {package}, not installed: pip install 'tba[reward-models]'"
        ) from error

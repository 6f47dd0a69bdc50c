"""What all scorers with a model process have in common."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tba.config.reward import ModelScorerSpec
from tba.errors import ConfigError
from tba_reward.models.messages import ModelSet
from tba_reward.models.process import ModelProcess
from tba_reward.scorers.base import Tools, version_of

_WHERE_IT_IS = ("model", "victim", "classifier")
_HOW_IT_RUNS = ("device", "trust_remote_code", "batch_tokens", "batch_wait_s", "batch_timeout_s", "load_timeout_s")
_HOW_IT_RUNS += ("num_threads",)


class ModelScorer:
    """The life of a scorer that asks one model process; `score` is for its kinds.

    Args:
        models: what the process has to load.
        implementation: see `version_of`.

    Raises:
        ConfigError: a package or a folder is missing.
    """

    def __init__(self, spec: ModelScorerSpec, tools: Tools, models: ModelSet, *, implementation: int) -> None:
        for name in _WHERE_IT_IS:
            _check_folder(spec.kind, name, getattr(spec, name, None))  # type: ignore[attr-defined]  # all kinds have one
        self._packages = [_installed(spec.kind, name) for name in ("torch", "transformers")]  # type: ignore[attr-defined]
        self._spec, self._implementation = spec, implementation
        self._versions: dict[str, str] = {}  # by the digest of the files: asked for with every result
        self._timeout_s = tools.timeout_s(spec)
        self._process: ModelProcess = tools.models.process(
            models, load_timeout_s=spec.load_timeout_s, batch_timeout_s=spec.batch_timeout_s
        )

    @property
    def version(self) -> str:
        """Digest of the files of the models and of all settings but for where they are and how they run."""
        digest = self._process.digest
        if digest not in self._versions:
            self._versions[digest] = self._version_with(digest)
        return self._versions[digest]

    def _version_with(self, digest: str) -> str:
        fields = type(self._spec).model_fields
        same = {name: fields[name].default for name in _HOW_IT_RUNS}
        for name in _WHERE_IT_IS:
            same |= {field: "" for field in (name, f"{name}_revision", "revision") if field in fields}
        spec = self._spec.model_copy(update=same)
        return version_of(spec, self._implementation, digest, *self._packages)

    async def start(self) -> None:
        """Load the models."""
        await self._process.start()

    async def close(self) -> None:
        """End the process."""
        await self._process.close()

    def health(self) -> str:
        """Whether the models are loaded."""
        return self._process.health()


def _check_folder(kind: str, field: str, path: str | None) -> None:
    if path is None or Path(path).expanduser().is_dir():
        return
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(
            f"reward kind {kind!r}: {field} = {path!r} is no folder; tba data prepare RECIPE fetches or makes what a "
            "recipe needs"
        )


def _installed(kind: str, package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"reward kind {kind!r} needs the package {package}, which is not installed; install tba-reward[models]"
        ) from error

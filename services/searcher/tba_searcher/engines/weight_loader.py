"""Weight versions on this machine: downloaded in the background, checked before use, kept while needed; and the
parameters of torch models: load a model, replace its parameters in place from safetensors files.

torch is imported by the functions that need it: a searcher with the simulated engine runs without torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from tba.errors import ConfigError, TbaError
from tba.logs import get_logger
from tba.versions import START, PolicyVersion
from tba.weights import LocalVersion, WeightVersions
from tba.weights.load_report import check_load_report
from tba_searcher.engines.engine import Engine, EngineCheckError, EngineDiedError, StagingEngine
from tba_searcher.engines.weight_check import check_error, check_tensors, dtype_name, file_stamps, verification_error

if TYPE_CHECKING:
    from torch import Tensor, nn

FIRST_RETRY_S = 30.0
"""Pause before a refused version is retried; it doubles with every refusal, up to MAX_RETRY_S."""
MAX_RETRY_S = 600.0
log = get_logger("weights")


@dataclass(frozen=True, slots=True)
class Refusal:
    """How often a version was refused, and until when (of `time.monotonic`)."""

    count: int
    until_s: float


class WeightLoader:
    """Downloads versions into a local folder, and remembers which were refused.

    `download` and `download_model` block and run in a thread. The event loop's thread calls everything else.
    """

    def __init__(self, versions: WeightVersions, folder: Path) -> None:
        self._versions, self._folder = versions, folder
        self._weights: dict[PolicyVersion, LocalVersion] = {}
        self._refusals: dict[PolicyVersion, Refusal] = {}
        self._lock = threading.Lock()
        """For the three fields around it, which a download reads in its thread."""
        self._num_downloads = 0
        self._unneeded: list[LocalVersion] = []
        """Not kept any more; deleted when no download uses them."""

    @property
    def refused(self) -> set[PolicyVersion]:
        """Versions that failed a check, until they may be retried."""
        # computed at each call, so that a refusal ends without a timer
        now_s = time.monotonic()
        return {version for version, refusal in self._refusals.items() if now_s < refusal.until_s}

    def refuse(self, version: PolicyVersion) -> float:
        """Refuse a version that failed a check, delete its files, and retry it after a pause that doubles each time.

        Returns:
            Seconds until it is retried.
        """
        # a refusal may be false (memory was short, a disk flipped a bit), and must not stop all searchers for ever
        count = self._refusals[version].count + 1 if version in self._refusals else 1
        pause_s = min(FIRST_RETRY_S * 2 ** min(count - 1, 10), MAX_RETRY_S)
        self._refusals[version] = Refusal(count, time.monotonic() + pause_s)
        self._delete(version)
        return pause_s

    def accept(self, version: PolicyVersion) -> None:
        """Forget the refusals of a version that has passed its checks."""
        self._refusals.pop(version, None)

    def copy_refusals(self, other: WeightLoader) -> None:
        """Refuse the versions that another loader refuses."""
        self._refusals = dict(other._refusals)

    @property
    def counts(self) -> Mapping[str, int]:
        """What downloads cost and how their ways failed since the start (`WeightVersions.counts`)."""
        return self._versions.counts

    def download_model(self, version: PolicyVersion) -> tuple[LocalVersion, Path]:
        """Download tensors, config and tokenizer; return the version and the folder of its files.

        Raises:
            StoreError, MalformedError
        """
        # a folder of its own: an engine may still read the files of the version before
        folder = self._folder / f"model-{version}"
        return self._versions.download_model(version, folder, keeps_base=True), folder

    def download(self, version: PolicyVersion) -> LocalVersion:
        """Download the tensors of a version, by deltas to a version that is kept where that is cheaper.

        A version that was refused is made anew, from whole ones alone: what is wrong may be here. The starting model is
        one, and stays: every tensor that is made of it is verified, and where one is wrong it is downloaded as well.

        Raises:
            StoreError, MalformedError
        """
        with self._lend() as kept:
            is_refused = version in self._refusals
            held = tuple(each for each in kept if each.version == START) if is_refused else kept
            folder, like = self._folder / f"tensors-{version}", next((each.manifest for each in kept), None)
            return self._versions.download_tensors(version, folder, held=held, like=like, keeps_base=True)

    def add(self, weights: LocalVersion) -> None:
        """Keep a version that has been downloaded, with the starting model that its adapter was merged into."""
        with self._lock:
            self._weights[weights.version] = weights
            if (base := weights.base) is not None:
                # a second one comes where the one that is kept did not fit (damaged), or does for the first time
                old = self._weights.get(base.version)
                self._weights[base.version] = base
                if old is not None and old.paths != base.paths:
                    self._unneeded.append(old)
        self._delete_unneeded()

    def get(self, version: PolicyVersion | None) -> LocalVersion | None:
        """Return the version, if it is here and not refused."""
        return None if version is None or version in self.refused else self._weights.get(version)

    def keep_only(self, versions: Collection[PolicyVersion | None]) -> None:
        """Delete the tensors of all other versions; files that a download uses go when it ends.

        The starting model stays while a version that is kept is an adapter: the next one is merged into it as well.
        """
        # a version of a large model has many gigabytes, and a new one comes every few minutes
        adapters = [self._weights[version].manifest.adapter for version in self._weights if version in versions]
        bases = {PolicyVersion.parse(each.base) for each in adapters if each is not None}
        for version in set(self._weights) - set(versions) - bases:
            self._delete(version)

    @contextmanager
    def _lend(self) -> Iterator[tuple[LocalVersion, ...]]:
        """Yield the versions that are kept; their files stay inside the block."""
        with self._lock:
            self._num_downloads += 1
            kept = tuple(self._weights.values())
        try:
            yield kept
        finally:
            with self._lock:
                self._num_downloads -= 1
            self._delete_unneeded()

    def _delete(self, version: PolicyVersion) -> None:
        with self._lock:
            if (weights := self._weights.pop(version, None)) is not None:
                self._unneeded.append(weights)
        self._delete_unneeded()

    def _delete_unneeded(self) -> None:
        with self._lock:
            if self._num_downloads:
                return
            for path in (path for weights in self._unneeded for path in weights.paths):
                path.unlink(missing_ok=True)
            self._unneeded.clear()


def stage_weights(engine: Engine, new: LocalVersion) -> None:
    """Have the engine prepare a version beside generation, where it can; a failure only makes the pause longer."""
    if isinstance(engine, StagingEngine):
        try:
            engine.stage_weights(new.paths)
        except Exception as error:
            log.warning("weights_not_staged", version=str(new.version), reason=f"{type(error).__name__}: {error}")


def swap_weights(engine: Engine, new: LocalVersion, old: LocalVersion) -> TbaError | None:
    """Load `new` and check it; when that fails, load `old` again and return the reason.

    Raises:
        EngineDiedError: the engine cannot continue.
    """
    reason: TbaError | None
    try:
        engine.load_weights(new.paths, new.version)
    # a dead engine cannot take the old weights either
    except EngineDiedError:
        raise
    except TbaError as error:
        reason = error
    except Exception as error:
        reason = check_error(new.manifest, "loaded", error)
    else:
        reason = verification_error(engine, new.manifest)
    if reason is None:
        return None
    try:
        # a load that failed may have replaced half of the parameters
        engine.load_weights(old.paths, old.version)
        if isinstance(reason, EngineCheckError):
            # the engine failed in an unknown way: check that it still computes what it should
            engine.verify(old.manifest)
    except EngineDiedError:
        raise
    except Exception as second:
        raise EngineDiedError(
            f"version {new.version} was refused ({reason}), and {old.version} cannot be loaded again: {second}"
        ) from None
    return reason


def load_model(folder: Path, *, dtype: str, device: str, trust_remote_code: bool) -> Any:
    """Load a causal language model in Hugging Face format, in eval mode and without gradients.

    Args:
        dtype: float32, bfloat16 or float16.
        device: torch device.

    Raises:
        ConfigError: the folder holds no usable causal language model, or not all of its weights.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    try:
        model, report = auto.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,  # never a pickle: loading one runs its code
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report names them
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        has_parts = "Unrecognized configuration class" in first_line
        hint = "; if text is a part of what it does, save its text model by itself" if has_parts else ""
        raise ConfigError(f"model folder {folder} holds no usable causal language model: {first_line}{hint}") from None
    check_load_report(report, model, where=f"model folder {folder}")
    model.to(torch.device(device))
    return model.eval().requires_grad_(False)


class StagedParams:
    """The tensors of safetensors files in memory, to become the parameters of a model.

    Raises:
        EngineError: a file is not readable, or names, shapes or dtypes are not exactly the model's.
    """

    def __init__(self, model: nn.Module, tensors_paths: Sequence[Path]) -> None:
        expected = {name: (dtype_name(param), list(param.shape)) for name, param in model.named_parameters()}
        check_tensors(tensors_paths, expected)
        self.stamps = file_stamps(tensors_paths)
        # copies: the tensors of `safe_open` are read from the file when they are used; a GPU reads pinned ones faster
        pins = next(model.parameters()).device.type == "cuda"
        self._tensors: dict[str, Tensor] = {}
        for path in tensors_paths:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    tensor = file.get_tensor(name)
                    self._tensors[name] = tensor.pin_memory() if pins else tensor.clone()

    def put_into(self, model: nn.Module) -> None:
        """Replace the parameters; on the CPU nothing is copied."""
        import torch

        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.device.type == "cpu":
                    param.data = self._tensors[name]
                else:  # a GPU may have no room for two
                    param.copy_(self._tensors[name])

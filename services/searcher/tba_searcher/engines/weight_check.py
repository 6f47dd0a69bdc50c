"""Gives an engine other weights, and checks them before the engine generates with them.

check_tensors    the files: names, shapes and dtypes of the tensors are the model's
check_loaded     the model in memory: the digest of its parameters, and the log-probs of the canary
swap_weights     load, check, and go back to the old weights when that fails
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from tba.errors import DigestError, MalformedError, StoreError, TbaError
from tba.logs import get_logger
from tba.weights import LocalVersion, digest, tensor_header
from tba.weights.digest import FileStamps, in_parallel, tensor_digest
from tba.wire import Manifest
from tba.wire.weight_manifest import MAX_CANARY_TOLERANCE, table_sha256
from tba_searcher.engines.engine import Engine, EngineCheckError, EngineDiedError, EngineError, StagingEngine

if TYPE_CHECKING:
    from torch import Tensor, nn

DtypeAndShape = tuple[str, list[int]]
"""Dtype and shape of a tensor, as safetensors writes them."""
_DTYPE_NAMES = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
log = get_logger("weights")


class CheckableModel(Protocol):
    """A model in memory that `check_loaded` can check."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        ...

    def params_sha256(self) -> str:
        """Return `tba.weights.digest.params_sha256` of its parameters."""
        ...

    def canary_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs [R] at temperature 1 of a given response."""
        ...


def check_loaded(model: CheckableModel, manifest: Manifest) -> None:
    """Check that a model holds what was published: the digest of its parameters, and the log-probs of the canary.

    Raises:
        DigestError: the parameters or the canary differ; the message names the values found and published.
    """
    # the parameters first: they are exact, and the canary depends on kernels and rounding
    found = model.params_sha256()
    if found != manifest.params_sha256:
        raise DigestError(
            f"weight version {manifest.version}: the engine holds parameters with sha256 {found}, "
            f"the published ones have {manifest.params_sha256}; this version is not used"
        )
    canary = manifest.canary
    highest = max(*canary.prompt_tokens, *canary.response_tokens)
    if highest >= model.vocab_size:
        # checked before the forward pass: on a GPU an index beyond the embedding kills the engine
        raise DigestError(
            f"weight version {manifest.version}: its canary has the token id {highest}, the model's vocabulary "
            f"{model.vocab_size} tokens; this version is not used"
        )
    logprobs = model.canary_logprobs(canary.prompt_tokens, canary.response_tokens)
    distance = float(np.abs(logprobs - np.array(canary.logprobs)).max())
    # a manifest may come from another release, and beyond this no check is left
    limit = min(canary.tolerance, MAX_CANARY_TOLERANCE)
    if not distance <= limit:  # in this form NaN fails too
        raise DigestError(
            f"weight version {manifest.version}: canary log-probs are off by {distance:.3g} nats, the limit is "
            f"{limit:.3g}; this version is not used. Its parameters are right, so the engine computes something else "
            "with them than the trainer: compare dtype, attention and config of the model"
        )


def verification_error(engine: Engine, manifest: Manifest) -> DigestError | EngineCheckError | None:
    """Return why the weights in the engine may not be used; None when they pass their checks."""
    try:
        engine.verify(manifest)
    except DigestError as error:
        return error
    except Exception as error:
        # any exception refuses only the version: going back to the old one shows whether the engine still works
        return _check_error(manifest, "checked", error)
    return None


def _check_error(manifest: Manifest, doing: str, error: Exception) -> EngineCheckError:
    """Return the error of an engine that failed in an unknown way while the version was loaded or checked."""
    cause = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return EngineCheckError(
        f"weight version {manifest.version}: the engine failed while it was {doing} ({cause}); this version is not used"
    )


def stage_weights(engine: Engine, new: LocalVersion) -> None:
    """Have a `StagingEngine` prepare a version while it generates. A failure is logged; the load then takes longer."""
    if isinstance(engine, StagingEngine):
        try:
            engine.stage_weights(new.paths)
        except Exception as error:
            log.warning("weights_not_staged", version=str(new.version), reason=f"{type(error).__name__}: {error}")


def swap_weights(engine: Engine, new: LocalVersion, old: LocalVersion) -> TbaError | None:
    """Load `new` and check it; return None. If that fails, load `old` again and return the reason.

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
        reason = _check_error(new.manifest, "loaded", error)
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


def params_sha256(model: nn.Module) -> str:
    """Return the manifest's `params_sha256` over `model.named_parameters()` (a tied output embedding counts once)."""

    # copied off the device in these threads, so that few tensors are on the host at once
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    return table_sha256(in_parallel(lambda item: table_entry(*item), model.named_parameters(), size_bytes=size_bytes))


def table_entry(name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...], str]:
    """Return name, dtype, shape and digest of a tensor, as `table_sha256` takes them."""
    import torch

    # as bytes: numpy has no bfloat16; without a copy where the tensor is contiguous and on the CPU
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return name, dtype_name(tensor), tuple(tensor.shape), tensor_digest(raw)


def read_headers(tensors_paths: Sequence[Path]) -> dict[str, tuple[Path, DtypeAndShape]]:
    """Read the headers of safetensors files; return for each tensor name its file, and its dtype and shape."""
    found = {}
    for path in tensors_paths:
        try:
            header = tensor_header(path)
        except (MalformedError, StoreError) as error:
            raise EngineError(f"weights: {error}") from None
        found |= {name: (path, (entry["dtype"], list(entry["shape"]))) for name, entry in header.items()}
    return found


def check_tensors(tensors_paths: Sequence[Path], expected: Mapping[str, DtypeAndShape]) -> dict[str, Path]:
    """Check that the files hold exactly the expected tensors; return the file of each tensor.

    Raises:
        EngineError: a file is not readable, or names, shapes or dtypes are not exactly those expected.
    """
    files = {}
    for name, (path, found) in read_headers(tensors_paths).items():
        required = expected.get(name)
        if required is not None and found != required:
            raise EngineError(
                f"weights {path}: tensor {name!r} is {found[0]} {found[1]}, the model has {required[0]} {required[1]}"
            )
        files[name] = path
    differing = sorted(set(expected) ^ set(files))
    if differing:
        where = "missing in the files" if differing[0] in expected else "not a parameter of the model"
        names = ", ".join(str(path) for path in tensors_paths)
        raise EngineError(f"weights {names}: tensor {differing[0]!r} is {where} ({len(differing)} names differ)")
    return files


def file_stamps(paths: Iterable[Path | str]) -> FileStamps:
    """Return path, time of the last change and size of each file; raise EngineError if one does not exist."""
    try:
        return digest.file_stamps(paths)
    except StoreError as error:
        raise EngineError(f"weights: {error}") from None


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype of a tensor as safetensors writes it."""
    return _DTYPE_NAMES.get(str(tensor.dtype), str(tensor.dtype))

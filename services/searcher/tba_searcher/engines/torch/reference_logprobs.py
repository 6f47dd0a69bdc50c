"""Ref log-probs at the searcher: the starting model in memory beside the engine.

With `objective.reference_placement = "searcher"` every rollout carries the sum of log pi_start over its response, at
the policy temperature. The trainer then holds no reference model, as in the paper.

The starting model is version 0-0 as published: in `model.dtype`, checked like any version that an engine loads. The
passes run in a thread of their own beside the engine's, with the same number of torch threads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tba.errors import DigestError, MalformedError, ObjectNotFoundError, TbaError
from tba.versions import START
from tba.weights import LocalVersion, WeightVersions
from tba.wire.sequences import TokenSequence
from tba_searcher.engines.engine import ReferenceRefusedError
from tba_searcher.engines.torch.model import load_model
from tba_searcher.engines.weight_check import check_loaded, params_sha256

PASS_TOKENS = 4096
"""Most padded tokens of one forward pass; a longer sequence gets a pass of its own."""
LOGITS_BYTES = 128 * 1024 * 1024
"""Most bytes of float32 logits at once."""
_PROBE_TOKENS = 4
_PROBE_TOLERANCE = 1e-6


class StartingModel:
    """Computes ref log-probs with the starting model."""

    def __init__(
        self, folder: Path, *, temperature: float, dtype: str, device: str, trust_remote_code: bool = False
    ) -> None:
        self._model = load_model(folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        self._device, self._temperature = torch.device(device), temperature
        self._has_plain_head = self._probe()

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return int(self._model.config.get_text_config().vocab_size)

    def params_sha256(self) -> str:
        """Return the digest of the parameters."""
        return params_sha256(self._model)

    def canary_logprobs(self, prompt_tokens: Sequence[int], response_tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs [R] at temperature 1 of a given response."""
        pair = (np.array(prompt_tokens, np.int32), np.array(response_tokens, np.int32))
        return self._token_logprobs([pair], 1.0).cpu().numpy()

    def sums(self, rollouts: Sequence[Sequence[TokenSequence]]) -> list[float]:
        """Return the sum of log pi_start over the trained tokens of each rollout, at the policy temperature."""
        found, owners, pairs, spans = [0.0] * len(rollouts), list[int](), list[tuple[Any, Any]](), list[Any]()
        for owner, sequence in ((owner, each) for owner, rollout in enumerate(rollouts) for each in rollout):
            start, end = sequence.trained_spans[0][0], sequence.trained_spans[-1][1]
            owners.append(owner)
            pairs.append((sequence.tokens[:start], sequence.tokens[start:end]))
            spans.append([slice(first - start, last - start) for first, last in sequence.trained_spans])
        lengths = [len(prompt) + len(response) - 1 for prompt, response in pairs]
        for rows in _passes(lengths):
            chosen = [pairs[i] for i in rows]
            values = self._token_logprobs(chosen, self._temperature).cpu()
            for i, part in zip(rows, values.split([len(response) for _, response in chosen]), strict=True):
                found[owners[i]] += sum(float(part[span].double().sum()) for span in spans[i])
        return found

    @torch.inference_mode()
    def _token_logprobs(
        self, pairs: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]], temperature: float
    ) -> Float[Tensor, " T"]:
        """Return the log-probs [T] of all response tokens, (prompt, response) pair after pair."""
        # padding is on the right, so no real token attends to it
        ids = np.zeros((len(pairs), max(len(p) + len(r) - 1 for p, r in pairs)), np.int64)  # [B, longest]
        for line, (prompt, response) in zip(ids, pairs, strict=True):
            line[: len(prompt) + len(response) - 1] = np.concatenate([prompt, response[:-1]])
        row = np.repeat(np.arange(len(pairs)), [len(response) for _, response in pairs])  # [T]
        # the last prompt token predicts the first response token
        column = np.concatenate([np.arange(len(p) - 1, len(p) + len(r) - 1) for p, r in pairs])  # [T]
        targets = self._tensor(np.concatenate([response for _, response in pairs]))
        places = (self._tensor(row), self._tensor(column))
        pieces = []
        if self._has_plain_head:  # at most LOGITS_BYTES at a time
            hidden = self._model.base_model(input_ids=self._tensor(ids), use_cache=False).last_hidden_state[places]
            head = self._model.get_output_embeddings()
            size = max(1, LOGITS_BYTES // (4 * head.weight.shape[0]))
            parts = ((head(part), chunk) for part, chunk in zip(hidden.split(size), targets.split(size), strict=True))
        else:
            parts = [(self._model(input_ids=self._tensor(ids), use_cache=False).logits[places], targets)]
        for logits, chunk in parts:
            wide = logits.float() / temperature
            pieces.append(wide.gather(1, chunk[:, None])[:, 0] - wide.logsumexp(dim=1))
        return torch.cat(pieces)

    @torch.inference_mode()
    def _probe(self) -> bool:
        """Return whether the logits are just the output head applied to the hidden states; soft-capped ones are not."""
        head = self._model.get_output_embeddings()
        if head is None or self._model.base_model is self._model:
            return False
        vocab_size = self._model.config.get_text_config().vocab_size
        ids = torch.arange(_PROBE_TOKENS, device=self._device)[None, :] % vocab_size
        logits = self._model(input_ids=ids, use_cache=False).logits.float()
        direct = head(self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state).float()
        tolerance = _PROBE_TOLERANCE * float(logits.abs().max())
        return direct.shape == logits.shape and bool(torch.allclose(direct, logits, rtol=0.0, atol=tolerance))

    def _tensor(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def load_starting_model(
    versions: WeightVersions,
    folder: Path,
    *,
    held: Sequence[LocalVersion] = (),
    temperature: float,
    device: str,
    trust_remote_code: bool,
) -> StartingModel:
    """Download version 0-0, load it and check it.

    Args:
        folder: gets a temporary folder for the files, until the model is loaded.
        held: versions with files on this machine; tensors that they share with version 0-0 are not downloaded.

    Raises:
        StoreUnavailableError: the object store cannot be reached; try again.
        ReferenceRefusedError: version 0-0 is damaged, or the model failed while it was loaded or checked; try again.
        TbaError: version 0-0 is missing; trying again is no use.
    """
    cannot = 'searchers hold the starting model (objective.reference_placement = "searcher"), which cannot be'
    try:
        with tempfile.TemporaryDirectory(prefix="reference-", dir=folder) as name:
            manifest = versions.download_model(START, Path(name), held=held).manifest
            model = StartingModel(
                Path(name),
                temperature=temperature,
                dtype=manifest.dtype,
                device=device,
                trust_remote_code=trust_remote_code,
            )
        check_loaded(model, manifest)
    except (DigestError, MalformedError) as error:
        raise ReferenceRefusedError(f"{cannot} used: {error}") from None
    except ObjectNotFoundError as error:
        raise TbaError(f"{cannot} used: {error}") from None
    except TbaError:
        raise
    except Exception as error:  # any exception refuses the version, as in `weight_check.verification_error`
        cause = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
        raise ReferenceRefusedError(f"{cannot} loaded and checked: {cause}") from None
    return model


def _passes(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield lists of indices into `lengths`, longest first; each list is one pass of at most `PASS_TOKENS`."""
    rows: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if rows and lengths[rows[0]] * (len(rows) + 1) > PASS_TOKENS:
            yield rows
            rows = []
        rows.append(i)
    if rows:
        yield rows

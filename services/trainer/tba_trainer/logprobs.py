"""Token log-probs of responses under a causal language model, at the policy temperature.

The output head is the expensive part in memory: it runs only where a response token is predicted, in chunks, and in
the backward pass it is recomputed chunk by chunk.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tba_trainer.microbatch import PaddedSequences

HEAD_CHUNK_TOKENS = 2048
"""Positions whose logits exist at once; at 150,000 vocabulary entries in float32 that is 1.2 GB."""
_PROBE_TOKENS = 4
_PROBE_TOLERANCE = 1e-6


class LogprobModel:
    """A causal language model as a source of log-probs.

    Args:
        model: Hugging Face causal LM in eval mode (or in train mode with every dropout at 0).
        temperature: divides the logits. The policy temperature for theta and reference, 1 for canaries.
        autocast_dtype: bfloat16 runs matrix products in it; None computes in the model's own dtype.
    """

    def __init__(self, model: Any, *, temperature: float, autocast_dtype: torch.dtype | None = None) -> None:
        self.model = model
        self._temperature = temperature
        self._autocast_dtype = autocast_dtype
        self._has_plain_head = _has_plain_head(model)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.model.parameters()).device

    def token_logprobs(self, sequences: PaddedSequences) -> Float[Tensor, "B R"]:
        """log pi(token | what precedes it) of every response token; 0 where the mask is false.

        float32, or the model's dtype if that is wider. Differentiable unless called under `torch.no_grad`.
        """
        with self._autocast():
            if self._has_plain_head:
                hidden = self._hidden(sequences)  # [B, T, H]
                rows = torch.arange(len(hidden), device=hidden.device)[:, None].expand_as(sequences.mask)
                picked = hidden[rows[sequences.mask], sequences.predictors[sequences.mask]]  # [num_tokens, H]
                values = self._through_head(picked, sequences.response_tokens[sequences.mask])
            else:
                logits = self._forward(self.model, sequences).logits  # [B, T, V]
                rows = torch.arange(len(logits), device=logits.device)[:, None].expand_as(sequences.mask)
                picked = logits[rows[sequences.mask], sequences.predictors[sequences.mask]]
                values = self._log_softmax_at(picked, sequences.response_tokens[sequences.mask])
        return torch.zeros(sequences.mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
            sequences.mask, values
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast_dtype)

    def _forward(self, module: Any, sequences: PaddedSequences) -> Any:
        return module(
            input_ids=sequences.input_ids,
            attention_mask=sequences.attention_mask,
            position_ids=sequences.position_ids,
            use_cache=False,
        )

    def _hidden(self, sequences: PaddedSequences) -> Tensor:
        return self._forward(self.model.base_model, sequences).last_hidden_state

    def _through_head(
        self, hidden: Float[Tensor, "num_tokens H"], targets: Int[Tensor, " num_tokens"]
    ) -> Float[Tensor, " num_tokens"]:
        head = self.model.get_output_embeddings()

        def values(chunk: Tensor, chunk_targets: Tensor) -> Tensor:
            return self._log_softmax_at(head(chunk), chunk_targets)

        if len(hidden) <= HEAD_CHUNK_TOKENS:
            return values(hidden, targets)
        pieces = []
        for chunk, chunk_targets in zip(hidden.split(HEAD_CHUNK_TOKENS), targets.split(HEAD_CHUNK_TOKENS), strict=True):
            if torch.is_grad_enabled():
                pieces.append(checkpoint(values, chunk, chunk_targets, use_reentrant=False))
            else:
                pieces.append(values(chunk, chunk_targets))
        return torch.cat(pieces)

    def _log_softmax_at(self, logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self._temperature
        return wide.gather(1, targets[:, None])[:, 0] - wide.logsumexp(dim=1)


def _has_plain_head(model: Any) -> bool:
    """Whether head(hidden states) reproduces the model's logits; soft-capped or scaled logits need the full pass."""
    head = model.get_output_embeddings()
    if head is None or model.base_model is model:
        return False
    device = next(model.parameters()).device
    ids = torch.arange(_PROBE_TOKENS, device=device)[None, :] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        direct = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    scale = float(logits.float().abs().max())
    return direct.shape == logits.shape and bool(
        torch.allclose(direct.float(), logits.float(), rtol=0.0, atol=_PROBE_TOLERANCE * scale)
    )

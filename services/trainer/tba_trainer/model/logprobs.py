"""Token log-probs of responses under a causal language model, at the policy temperature.

A pass runs over packed sequences where the model family allows it, else over padded rows. Only the positions where a
response token is predicted reach the output head, in chunks (lm_head.py): the head is the expensive part in memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tba_trainer.model.attention import find_segments, use_packed_attention
from tba_trainer.model.fsdp import is_sharded, run_as_forward
from tba_trainer.model.lm_head import head_logprobs
from tba_trainer.model.packing import PackedSequences, padded_outputs
from tba_trainer.model.parameters import is_adapted

_PROBE_TOKENS = 4
_PROBE_TOLERANCE = 1e-6


class LogprobModel:
    """A causal language model as a source of log-probs.

    Args:
        model: Hugging Face causal LM in eval mode (or in train mode with every dropout at 0). Where its family can be
            packed, its attention is replaced: from then on it cannot generate.
        temperature: divides the logits. The policy temperature for theta and reference, 1 for canaries.
        autocast_dtype: bfloat16 runs matrix products in it; None computes in the model's own dtype.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self._temperature = temperature
        self._autocast_dtype = autocast_dtype
        # every pass of a sharded model is a collective of several ranks, so all make the same number of them: one
        self._sharded = is_sharded(model)
        self._has_plain_head = run_as_forward(model, _has_plain_head, model)
        self.is_packed = use_packed_attention(model)
        """Whether passes run without padding."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.model.parameters()).device

    def token_logprobs(self, sequences: PackedSequences) -> Float[Tensor, " T"]:
        """Return log pi(token | its prefix) of every response token.

        float32, or the model's dtype if that is wider. Differentiable unless called under `torch.no_grad`.
        """
        return run_as_forward(self.model, self._token_logprobs, sequences)

    def _token_logprobs(self, sequences: PackedSequences) -> Float[Tensor, " T"]:
        with self._autocast():
            if self._has_plain_head:
                hidden = self._outputs(self.model.base_model, "last_hidden_state", sequences)  # [T, H]
                head = self.model.get_output_embeddings()
                return head_logprobs(
                    hidden, head.weight, head.bias, sequences.response_tokens, temperature=self._temperature
                )
            logits = self._outputs(self.model, "logits", sequences)  # [T, V]
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self._temperature
        return wide.gather(1, sequences.response_tokens[:, None])[:, 0] - wide.logsumexp(dim=1)

    def _outputs(self, module: Any, name: str, sequences: PackedSequences) -> Float[Tensor, "T X"]:
        """Return one output of a module at the positions where response tokens are predicted."""
        if not self.is_packed:
            segments = find_segments(sequences.lengths, self.device, one_bucket=self._sharded)
            return padded_outputs(lambda *inputs: _padded_pass(module, name, inputs), sequences, segments)
        outputs = module(
            input_ids=sequences.input_ids,
            attention_mask=torch.ones_like(sequences.input_ids),  # nothing is padding; gpt2 warns without
            position_ids=sequences.position_ids,
            use_cache=False,
            segments=find_segments(sequences.lengths, self.device),
        )
        return getattr(outputs, name)[0].index_select(0, sequences.predictors)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        # autocast's cache would keep 16-bit copies of all weights until the pass ends; without checkpointing the
        # backward pass needs them anyway
        keeps_copies = not getattr(self.model, "is_gradient_checkpointing", False)
        return torch.autocast(self.device.type, dtype=self._autocast_dtype, cache_enabled=keeps_copies)


def _padded_pass(module: Any, name: str, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    ids, attention_mask, position_ids = inputs
    return getattr(
        module(input_ids=ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False), name
    )


def _has_plain_head(model: Any) -> bool:
    """Return whether W h + b reproduces the model's logits."""
    # a probe decides: soft-capped or scaled logits need the model's own pass
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or is_adapted(head) or model.base_model is model:
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

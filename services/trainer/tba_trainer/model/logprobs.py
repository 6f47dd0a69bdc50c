"""Token log-probs of replies under a causal language model, at the policy temperature.

A pass runs over packed sequences where the model family allows it, else over padded rows. Only positions that predict a
trained token reach the output head. Their logits are computed in chunks: with a vocabulary of 150,000 entries, the
logits of all positions would be the largest tensor of a step.

    logp_t = z_t[y_t] - logsumexp(z_t),    z_t = (W h_t + b) / temperature
    d logp_t / d z_t = onehot(y_t) - softmax(z_t)

Forward and backward walk over the positions in chunks whose logits, in float32, fit `CHUNK_BYTES`. The backward pass
computes the logits of a chunk again, unless all positions are one chunk. docs/adr/0010-packing-and-the-output-head.md
says why this is own code.

Shapes: T positions, H hidden units, V vocabulary entries, C positions of one chunk, K experts of a token.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tba_trainer.model.context import RowPart, check_context, context_of
from tba_trainer.model.packing import PackedSequences, find_segments, padded_outputs, upload, use_packed_attention
from tba_trainer.model.parameters import is_adapted
from tba_trainer.model.sharding import device_of, is_sharded, run_as_forward

CHUNK_BYTES = {"cpu": 128 * 1024**2, "cuda": 1024**3}
"""Most bytes of logits at once, by device type: a GPU needs more rows in one matrix product than a CPU to be busy."""
WIDE_PRODUCTS = {"cuda"}
"""Device types that can multiply 16-bit matrices and return the float32 sums unrounded (`out_dtype`)."""
ENTROPY_POSITIONS = 128
"""Largest number of positions of a pass at which the entropy is computed."""
AUTOCAST_EXPERTS = "tba_autocast"
"""Name of `autocast_experts` in transformers' table of experts functions."""
_PROBE_TOKENS = 4
_PROBE_TOLERANCE = 1e-6


class LogprobModel:
    """A causal language model as a source of log-probs.

    Args:
        model: Hugging Face causal LM in eval mode (or in train mode with every dropout at 0). If its family can be
            packed, its attention is replaced, and the model can no longer generate.
        temperature: divides the logits. The policy temperature for theta and reference, 1 for canaries.
        autocast_dtype: dtype of matrix products under autocast; None: everything runs in the model's own dtype.

    Raises:
        ConfigError: the model has a context group, and its passes cannot be shared by several processes.
    """

    def __init__(self, model: Any, *, temperature: float, autocast_dtype: torch.dtype | None = None) -> None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        self.model = model
        self._temperature = temperature
        self._autocast_dtype = autocast_dtype
        # every pass of a sharded model is a collective of several ranks, so all make the same number of them: one
        self._sharded = is_sharded(model)
        # A mixture of experts (Qwen3-MoE and the like) sorts tokens by expert for one grouped product each. Autocast
        # does not know that product: it would run in float32, which has no grouped kernel on a GPU. A model keeps
        # another function that was chosen for it, for example one that came with its code
        if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
            # compile_layers registers a function that is not compiled
            if AUTOCAST_EXPERTS not in ALL_EXPERTS_FUNCTIONS:
                ALL_EXPERTS_FUNCTIONS.register(AUTOCAST_EXPERTS, autocast_experts)
            model.set_experts_implementation(AUTOCAST_EXPERTS)
        self._has_plain_head = run_as_forward(model, self._probe_head)
        self.is_packed = use_packed_attention(model)
        """Whether passes run without padding."""
        self._context = context_of(model)
        if self._context is not None:
            check_context(model, self._context.size, is_packed=self.is_packed)

    @property
    def device(self) -> torch.device:
        """Device of the passes."""
        return device_of(self.model)

    def token_logprobs(self, sequences: PackedSequences) -> Float[Tensor, " T"]:
        """Return log pi(token | its prefix) of every trained token.

        float32, or the model's dtype if that is wider. Differentiable unless called under `torch.no_grad`.
        """
        return run_as_forward(self.model, self._token_logprobs, sequences, False)[0]

    def logprobs_and_entropy(self, sequences: PackedSequences) -> tuple[Float[Tensor, " T"], Float[Tensor, ""]]:
        """Return the result of `token_logprobs`, and the policy's mean entropy in nats, without gradient.

        The mean is over at most `ENTROPY_POSITIONS` evenly spaced positions: all would cost a pass over the logits.
        """
        logprobs, entropy = run_as_forward(self.model, self._token_logprobs, sequences, True)
        return logprobs, entropy

    def _token_logprobs(
        self, sequences: PackedSequences, with_entropy: bool
    ) -> tuple[Float[Tensor, " T"], Float[Tensor, ""]]:
        # of numpy: the memory trace makes torch's tensors fake, and a context group reads which these are
        num = len(sequences.trained_tokens) if with_entropy else 0
        spaced = np.linspace(0, num - 1, min(num, ENTROPY_POSITIONS)).round().astype(np.int64)
        if self._context is None:
            chosen = upload(torch.from_numpy(spaced), self.device) if with_entropy else None
            logprobs, entropy = self._of_row(sequences, chosen)
        else:
            part = self._context.part_of(sequences, chosen=spaced)
            logprobs, entropy = self._of_row(part, part.chosen if with_entropy else None)
            logprobs = self._context.whole(logprobs, part)
            entropy = self._context.sum(entropy) if with_entropy else entropy
        return logprobs, entropy / max(1, len(spaced))

    def _of_row(
        self, row: PackedSequences | RowPart, chosen: Int[Tensor, " C"] | None
    ) -> tuple[Float[Tensor, " T"], Float[Tensor, ""]]:
        """Return the log-probs of the trained tokens of a row, and the sum of the entropies at the `chosen` ones."""
        entropy = torch.zeros((), device=self.device)
        with self._autocast():
            if self._has_plain_head:
                hidden = self._outputs(self.model.base_model, "last_hidden_state", row)  # [T, H]
                head = self.model.get_output_embeddings()
                if chosen is not None:
                    with torch.no_grad():
                        entropy = self._entropies(head(hidden[chosen])).sum()
                logprobs = head_logprobs(
                    hidden, head.weight, head.bias, row.trained_tokens, temperature=self._temperature
                )
                return logprobs, entropy
            logits = self._outputs(self.model, "logits", row)  # [T, V]
        if chosen is not None:
            entropy = self._entropies(logits[chosen]).sum()
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self._temperature
        return wide.gather(1, row.trained_tokens[:, None])[:, 0] - wide.logsumexp(dim=1), entropy

    @torch.no_grad()
    def _entropies(self, logits: Float[Tensor, "C V"]) -> Float[Tensor, " C"]:
        log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / self._temperature).log_softmax(dim=1)
        return -(log_p.exp() * log_p).sum(dim=1)

    def _outputs(self, module: Any, name: str, row: PackedSequences | RowPart) -> Float[Tensor, "T X"]:
        """Return one output of a module at the positions where trained tokens are predicted."""
        if isinstance(row, RowPart):
            segments = row.segments
        else:
            one_bucket = self._sharded and not self.is_packed
            segments = find_segments(row.lengths, self.device, positions=row.positions, one_bucket=one_bucket)
            if not self.is_packed:

                def padded(ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
                    return getattr(
                        module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False), name
                    )

                return padded_outputs(padded, row, segments)
        outputs = module(
            input_ids=row.input_ids,
            attention_mask=torch.ones_like(row.input_ids),  # nothing is padding; gpt2 warns without
            position_ids=row.position_ids,
            use_cache=False,
            segments=segments,
        )
        return getattr(outputs, name)[0].index_select(0, row.predictors)

    def _probe_head(self) -> bool:
        """Return whether W h + b reproduces the model's logits."""
        # a probe decides: soft-capped or scaled logits need the model's own pass
        model, head = self.model, self.model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or is_adapted(head) or model.base_model is model:
            return False
        ids = torch.arange(_PROBE_TOKENS, device=self.device)[None, :] % model.config.get_text_config().vocab_size
        with torch.no_grad(), self._autocast():
            logits = model(input_ids=ids, use_cache=False).logits
            direct = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
            atol = _PROBE_TOLERANCE * float(logits.float().abs().max())
            return direct.shape == logits.shape and bool(
                torch.allclose(direct.float(), logits.float(), rtol=0.0, atol=atol)
            )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return nullcontext()
        # autocast's cache would keep 16-bit copies of all weights until the pass ends; without checkpointing the
        # backward pass needs them anyway
        keeps_copies = not getattr(self.model, "is_gradient_checkpointing", False)
        return torch.autocast(self.device.type, dtype=self._autocast_dtype, cache_enabled=keeps_copies)


def head_logprobs(
    hidden: Float[Tensor, "T H"],
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    targets: Int[Tensor, " T"],
    *,
    temperature: float,
    chunk_bytes: int | None = None,
) -> Float[Tensor, " T"]:
    """Return log softmax((W h_t + b) / temperature)[y_t] of every position; differentiable (once) in h, W and b.

    Matrix products run in the dtype of W, or in the autocast dtype under `torch.autocast`. Softmax and result are in
    float32, or in float64 for float64 inputs.

    Args:
        hidden: last hidden states at the positions whose next token is scored.
        weight: W of the output head.
        bias: b of the output head; None: it has none.
        targets: y_t, the token that was sampled after each position.
        temperature: divides the logits before the softmax.
        chunk_bytes: most bytes of logits at once; None: `CHUNK_BYTES` of the device.
    """
    kind = hidden.device.type
    compute_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    limit = chunk_bytes if chunk_bytes is not None else CHUNK_BYTES.get(kind, CHUNK_BYTES["cpu"])
    bytes_per_row = len(weight) * torch.promote_types(compute_dtype, torch.float32).itemsize
    with torch.autocast(kind, enabled=False):  # dtypes are explicit from here on
        values = _HeadLogprobs.apply(
            hidden, weight, bias, targets, temperature, compute_dtype, max(1, limit // bytes_per_row)
        )
    assert isinstance(values, Tensor)
    return values


@dataclass(frozen=True, slots=True)
class _Head:
    """W and b in the dtype of the matrix products."""

    weight: Tensor
    bias: Tensor | None
    temperature: float
    wide: torch.dtype
    """dtype of softmax and sums: float32 at least."""

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, temperature: float, compute_dtype: torch.dtype) -> _Head:
        wide = torch.promote_types(compute_dtype, torch.float32)
        return cls(weight.to(compute_dtype), None if bias is None else bias.to(wide), temperature, wide)

    def buffer(self, num_rows: int) -> Tensor:
        """Return an empty tensor that all chunks use in turn for their logits."""
        # a new one per chunk would cost a page fault per 4 KiB
        return self.weight.new_empty((num_rows, len(self.weight)), dtype=self.wide)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Write z of some positions into the first rows of `out`, and return these rows."""
        out = out[: len(hidden)]  # [C, V]
        _matmul(hidden.to(self.weight.dtype), self.weight.t(), out=out)
        if self.bias is not None:
            out += self.bias
        return out if self.temperature == 1.0 else out.div_(self.temperature)


class _HeadLogprobs(torch.autograd.Function):
    """See `head_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        compute_dtype: torch.dtype,
        num_rows: int,
    ) -> Tensor:
        head = _Head.of(weight, bias, temperature, compute_dtype)
        buffer = head.buffer(min(num_rows, len(hidden)))
        chosen = buffer.new_empty(len(hidden))  # [T]
        log_total = torch.empty_like(chosen)  # [T]
        for start in range(0, len(hidden), num_rows):
            rows = slice(start, start + num_rows)
            logits = head.logits(hidden[rows], buffer)  # [C, V]
            chosen[rows] = logits.gather(1, targets[rows, None])[:, 0]
            highest = logits.amax(dim=1)  # [C]
            # in place: another tensor of this size would double the peak
            log_total[rows] = logits.sub_(highest[:, None]).exp_().sum(dim=1).log_().add_(highest)
        ctx.kept = None
        # with a single chunk the buffer holds exp(z - max) of all positions: normalised, the backward pass can use it
        if len(hidden) <= num_rows and any(ctx.needs_input_grad):
            ctx.kept = buffer.div_(buffer.sum(dim=1, keepdim=True))
        ctx.save_for_backward(hidden, weight, bias, targets, log_total)
        ctx.settings = (temperature, compute_dtype, num_rows)
        return chosen.sub_(log_total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_total = ctx.saved_tensors
        temperature, compute_dtype, num_rows = ctx.settings
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head = _Head.of(weight, bias, temperature, compute_dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # one buffer that every chunk adds to, in at least float32
        grad_weight = torch.zeros_like(weight, dtype=head.wide) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=head.wide) if needs_bias else None
        buffer = head.buffer(min(num_rows, len(hidden))) if ctx.kept is None else ctx.kept
        for start in range(0, len(hidden), num_rows):
            rows = slice(start, start + num_rows)
            if ctx.kept is None:
                softmax = head.logits(hidden[rows], buffer).sub_(log_total[rows, None]).exp_()  # [C, V]
            else:
                softmax, ctx.kept = ctx.kept, None  # overwritten below; a second backward pass computes it again
            factor = (grad[rows] / temperature)[:, None]  # [C, 1]
            target = targets[rows, None]
            grad_logits = softmax.mul_(-factor)
            grad_logits.scatter_(1, target, grad_logits.gather(1, target) + factor)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            narrow = grad_logits.to(compute_dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (narrow @ head.weight).to(hidden.dtype)
            if grad_weight is not None:
                _add_matmul(grad_weight, narrow.t(), hidden[rows].to(compute_dtype))
            del narrow  # the next chunk makes its own
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None,) * 4,
        )


def _matmul(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """Write left @ right into `out`, whose dtype may be wider."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.device.type in WIDE_PRODUCTS:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(left @ right)


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right in place to `total`, whose dtype may be wider."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.device.type in WIDE_PRODUCTS:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


def autocast_experts(
    module: Any, hidden: Float[Tensor, "T H"], experts: Int[Tensor, "T K"], weights: Float[Tensor, "T K"]
) -> Float[Tensor, "T H"]:
    """Return the weighted sum of each token's experts, in the autocast dtype if there is one. transformers calls it."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        module = _Cast(module, torch.get_autocast_dtype(kind))
    return grouped_mm_experts_forward(module, hidden, experts, weights)


class _Cast:
    """A view of a module that casts its parameters on access; gradients reach the original parameters."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, nn.Parameter) else value

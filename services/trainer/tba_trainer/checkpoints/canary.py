"""The canary of a version: log-probs of a short sequence, and how far an engine may be from them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from tba.config import Recipe
from tba.wire import Canary
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import pack_sequences
from tba_trainer.model.sharding import rounds_weights

PROMPT_TOKENS, RESPONSE_TOKENS = 8, 8
"""Tokens of a canary: few, because generation pauses while an engine computes their log-probs."""
NUM_CANDIDATES = 8
MIN_TOLERANCE = MappingProxyType({"float32": 2e-3, "float16": 0.03, "bfloat16": 0.25})
"""Smallest tolerance of canaries, in nats. Trainer and engine round differently: a logit of size 8 to 16 is exact to
2^-8 in float16 and to 2^-5 in bfloat16, and several such errors add up. An engine on a GPU also rounds its logits, but
the trainer does not, so its own gap is smaller. Therefore these are 5 times the largest gap that was measured in an
engine with the right weights of a trained dense model (docs/results.md, "Canary tolerances")."""
MAX_TOLERANCE = MappingProxyType({"float32": 0.0, "float16": 0.125, "bfloat16": 1.0})
"""Largest tolerance to which the trainer's own gap can lead, in nats: an engine with swapped layers is off by more."""
EIGHT_BIT_TOLERANCE = 1.0
"""Smallest tolerance if an engine has weights, keys or values in 8 bits, which the trainer's own gap does not show.
A small model was off by up to 0.18 nats (docs/searcher.md); above 1 an engine with swapped layers would pass."""
GAP_FACTOR = 4.0
"""The tolerance is this multiple of the trainer's own gap, but within the smallest and the largest tolerance."""


class CanaryMaker:
    """Computes the canaries of one model. The exact check of a version is `params_sha256`; the canary finds an engine
    that computes another model.

    The trainer's own gap of a sequence is the largest difference between theta's log-probs and those of the published
    tensors in the published dtype. The candidate sequence with the smallest gap becomes the canary. This avoids tokens
    that rounding sends to other experts of a mixture. The median gap of the candidates gives the tolerance.

    Args:
        theta: the model that is trained.
        published: the model with the published tensors in the published dtype; theta itself where that is the same.
        recipe: gives the dtypes of the engines.
    """

    def __init__(self, theta: Any, published: Any, recipe: Recipe) -> None:
        dtype = recipe.model.dtype
        self._published = LogprobModel(published, temperature=1.0)
        has_8_bits = recipe.searcher.engine == "vllm" and recipe.searcher.vllm.quantization is not None
        least = EIGHT_BIT_TOLERANCE if has_8_bits else MIN_TOLERANCE[dtype]
        self._least, self._most = least, MAX_TOLERANCE[dtype]
        self._is_compiled = recipe.trainer.compile
        self._theta = None
        if dtype != "float32":  # there nothing is rounded
            # only a pass under autocast has kernels for grouped products of experts on a GPU; one in float32 shows all
            # that rounding changes
            is_on_gpu = next(theta.parameters()).device.type == "cuda"
            has_experts = any(name.endswith(".experts") for name, _ in theta.named_modules())
            needs_autocast = rounds_weights(theta) or (has_experts and is_on_gpu)
            autocast_dtype = torch.bfloat16 if needs_autocast else None
            with self._uncompiled():
                self._theta = LogprobModel(theta, temperature=1.0, autocast_dtype=autocast_dtype)
        vocab_size = int(theta.get_input_embeddings().num_embeddings)
        self._candidates = [candidate(seed, vocab_size) for seed in range(NUM_CANDIDATES)]

    @torch.no_grad()
    def make(self) -> Canary:
        """Return the canary of the published model, which must hold theta's current tensors in the published dtype.

        A collective for a sharded model: every process must call it.
        """
        chosen, gap = 0, 0.0
        if self._theta is not None:
            rounded = _logprobs(self._published, self._candidates)
            with self._uncompiled():
                found = _logprobs(self._theta, self._candidates)
            gaps = (found - rounded).abs().view(NUM_CANDIDATES, RESPONSE_TOKENS).amax(dim=1)
            chosen = int(gaps.nan_to_num(nan=torch.inf).argmin())
            gap = float(np.median(gaps.cpu().numpy()))  # the least one is small by chance, too
        tokens = self._candidates[chosen]
        return Canary(
            prompt_tokens=tokens[:PROMPT_TOKENS].tolist(),
            response_tokens=tokens[PROMPT_TOKENS:].tolist(),
            # by itself, as in an engine: another shape rounds otherwise
            logprobs=_logprobs(self._published, [tokens]).tolist(),
            tolerance=tolerance(gap, least=self._least, most=self._most),
        )

    def _uncompiled(self) -> AbstractContextManager[object]:
        """Return a context in which passes of theta do not use its compiled layers, and so compile nothing anew."""
        return torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext()


def tolerance(gap: float, *, least: float, most: float) -> float:
    """Return a canary's tolerance in nats: `GAP_FACTOR` times the gap, within `least` and `most` (`least` for NaN)."""
    return max(least, min(GAP_FACTOR * gap, most))


def candidate(seed: int, vocab_size: int) -> NDArray[np.int32]:
    """Return the tokens [16] of a candidate: random ones, since the canary compares two computations, not texts."""
    return np.random.default_rng(seed).integers(0, vocab_size, PROMPT_TOKENS + RESPONSE_TOKENS, dtype=np.int32)


def _logprobs(model: LogprobModel, sequences: list[NDArray[np.int32]]) -> Float[Tensor, " T"]:
    prompts = [tokens[:PROMPT_TOKENS] for tokens in sequences]
    responses = [tokens[PROMPT_TOKENS:] for tokens in sequences]
    return model.token_logprobs(pack_sequences(prompts, responses, model.device))

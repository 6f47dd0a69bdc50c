"""Sampling for all rows at once, with the log-probs of exactly the distribution that was sampled.

Without options nothing is masked: the sampler draws from softmax(logits / temperature) over the whole vocabulary, so
that the trainer's log_softmax(logits / temperature) is the same number. PAD is never written as filler (rows carry
lengths); where the model gives PAD some probability it is a token like any other.

With options: tokens that may not come yet (end of sequence below a minimum length), then all but the `top_k` most
probable, then all but the fewest that hold `top_p` of what is left, have probability 0; the rest is renormalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What some rows of a step ask for beyond a temperature. Empty tensors: nothing."""

    banned_rows: Int[Tensor, " B"]
    """With `banned_tokens`: pairs (row, token) that may not be drawn."""
    banned_tokens: Int[Tensor, " B"]
    limited_rows: Int[Tensor, " M"]
    """Rows with a top-k or a top-p."""
    top_k: Int[Tensor, " M"]
    """At least 1; the size of the vocabulary, or more, is off."""
    top_p: Float[Tensor, " M"]
    """Above 0; 1 is off."""
    seeded: Sequence[tuple[int, torch.Generator]] = ()
    """Rows that have a random stream of their own."""


def sample(
    logits: Float[Tensor, "N V"],
    temperatures: Float[Tensor, " N"],
    generator: torch.Generator,
    options: Options | None = None,
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Draw one token per row.

    Args:
        temperatures: float32; 0 takes the most probable token and reports its log-prob at temperature 1.
        generator: source of randomness, on the device of `logits`.
        options: None where no row asks for anything.

    Returns:
        tokens int64 [N] and their log-probs float32 [N].
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    if options is not None:
        scaled[options.banned_rows, options.banned_tokens] = -torch.inf
        if len(options.limited_rows):
            rows = options.limited_rows
            scaled[rows] = _limited(scaled[rows], options.top_k, options.top_p)
    logprobs = torch.log_softmax(scaled, dim=-1)
    # argmax(p / e) with e ~ Exp(1) is a draw from p (the exponential race); no host synchronisation, unlike multinomial
    noise = torch.empty_like(logprobs).exponential_(generator=generator)
    for row, own in () if options is None else options.seeded:
        noise[row].exponential_(generator=own)
    tokens = torch.where(greedy[:, None], logprobs, logprobs - noise.log_()).argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _limited(logits: Float[Tensor, "M V"], top_k: Int[Tensor, " M"], top_p: Float[Tensor, " M"]) -> Tensor:
    """The logits [M, V] with -inf for the tokens that top-k and top-p leave out. Tokens that tie with the k-th stay."""
    ordered, order = logits.sort(dim=-1, descending=True)
    last = ordered.gather(1, (top_k.clamp(max=logits.shape[1]) - 1)[:, None])  # [M, 1]
    ordered = ordered.masked_fill(ordered < last, -torch.inf)
    probs = torch.softmax(ordered, dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    dropped = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(dropped, -torch.inf))

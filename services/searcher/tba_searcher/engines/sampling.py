"""Sampling for all rows at once, with the log-probs of exactly the distribution that was sampled.

Nothing is masked: the sampler draws from softmax(logits / temperature) over the whole vocabulary, so that the
trainer's log_softmax(logits / temperature) is the same number. PAD is never written as filler (rows carry lengths);
where the model gives PAD some probability it is a token like any other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [N, V].
        temperatures: float32 [N]; 0 takes the most probable token and reports its log-prob at temperature 1.
        generator: source of randomness, on the device of `logits`.

    Returns:
        tokens int64 [N] and their log-probs float32 [N].
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    # argmax(p / e) with e ~ Exp(1) is a draw from p (the exponential race); no host synchronisation, unlike multinomial
    noise = torch.empty_like(logprobs).exponential_(generator=generator).log_()
    tokens = torch.where(greedy[:, None], logprobs, logprobs - noise).argmax(dim=-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

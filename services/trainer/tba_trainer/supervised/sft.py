"""Supervised fine-tuning: the mean log-prob of the response tokens of a step goes up.

    loss = -sum_t log pi(y_t | x, y_<t) / T,    T response tokens of all examples of the step, end-of-sequence included

Sequences are packed as in every pass of the trainer (model/packing.py, model/logprobs.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tba.config.supervised import SftSection
from tba_trainer.learner.forward_backward import Ranks
from tba_trainer.learner.micro_batches import plan_micro_batches
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.model.packing import PackedSequences, pack_sequences
from tba_trainer.supervised.examples import Answer

_FILLER = np.zeros(1, np.int32)


class SftTask:
    """Responses to learn, and held-out ones.

    Args:
        model: a causal language model, in the mode of training.
        answers, heldout: may not be empty, may be empty.
        ranks: the processes that share every step.
    """

    def __init__(
        self, model: Any, answers: Sequence[Answer], heldout: Sequence[Answer], section: SftSection, ranks: Ranks
    ) -> None:
        dtype = torch.bfloat16 if section.compute_dtype == "bfloat16" else None
        self.policy = LogprobModel(model, temperature=1.0, autocast_dtype=dtype)
        self._answers, self._heldout, self._ranks = answers, heldout, ranks
        self._max_tokens = section.micro_batch_tokens

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Return the tokens of examples."""
        return sum(self._answers[i].num_tokens for i in rows)

    def divisor(self, rows: Sequence[int]) -> int:
        """Return the response tokens of examples."""
        return sum(len(self._answers[i].response) for i in rows)

    def micro_batches(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the rows of each pass of this process."""
        return self._plan(self._answers, rows)

    def loss_sum(self, rows: Sequence[int]) -> Float[Tensor, ""]:
        """Return the negative log-prob of all response tokens of some examples; 0 of none."""
        logprobs = self.policy.token_logprobs(self._pack(self._answers, rows))
        return -logprobs.sum() * bool(rows)  # the filler has no gradient

    def evaluate(self) -> dict[str, float]:
        """Return loss per token, perplexity, and the share of responses of which every token is the likeliest."""
        if not self._heldout:
            return {}
        loss = num_exact = 0.0
        for rows in self._plan(self._heldout, range(len(self._heldout))):
            sequences = self._pack(self._heldout, rows)
            logprobs, is_greedy = self.policy.logprobs_and_greedy(sequences)
            if rows:
                loss -= float(logprobs.double().sum())
                wrong = np.bincount(sequences.row.cpu().numpy(), weights=(~is_greedy).cpu().numpy())  # [B]
                num_exact += int((wrong == 0).sum())
        loss, num_exact = self._ranks.all_reduce(torch.tensor([loss, num_exact], dtype=torch.float64)).tolist()
        loss /= sum(len(answer.response) for answer in self._heldout)
        return {
            "heldout_loss": loss,
            "heldout_perplexity": math.exp(min(loss, 700.0)),
            "heldout_exact": num_exact / len(self._heldout),
        }

    def _plan(self, answers: Sequence[Answer], rows: Sequence[int]) -> list[list[int]]:
        plan = plan_micro_batches(
            [answers[i].num_tokens for i in rows],
            range(len(rows)),
            self._max_tokens,
            num_ranks=self._ranks.num_ranks,
            keep_groups=False,
        )
        return [[rows[place] for place in each.indices] for each in plan.of_rank(self._ranks.rank)]

    def _pack(self, answers: Sequence[Answer], rows: Sequence[int]) -> PackedSequences:
        # an empty micro-batch is passed through the model all the same: the other ranks wait in the same collectives
        prompts, responses = [answers[i].prompt for i in rows], [answers[i].response for i in rows]
        return pack_sequences(prompts or [_FILLER], responses or [_FILLER], self.policy.device)

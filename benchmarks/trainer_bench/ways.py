"""Two ways to make one optimizer step with the same GRPO objective: ours, and the plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tba_trainer.learner.forward_backward import ForwardBackward
from tba_trainer.model.logprobs import LogprobModel
from tba_trainer.objectives import Sequences, Tokens, Totals, advantages, objective_loss, resolve
from torch import Tensor

from benchmarks.trainer_bench.workload import Workload
from tba.config import ObjectiveSection

OBJECTIVE = resolve(ObjectiveSection.model_validate({"preset": "grpo"}))
LEARNING_RATE = 1e-6
Step = Callable[[], float]
"""Makes one optimizer step; returns the gradient norm."""


def ours(work: Workload) -> Step:
    """Packed micro-batches balanced by tokens, chunked output head."""
    model = work.fresh_model()
    policy = LogprobModel(model, temperature=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        ForwardBackward(
            policy,
            OBJECTIVE,
            work.rollouts,
            groups=group_numbers(work),
            rewards=work.rewards,
            policy_ages=[0] * len(work.rollouts),
            beta=0.0,
            micro_batch_tokens=work.micro_batch_tokens,
        ).backward()
        return finish(model, optimizer)

    return step


def finish(model: Any, optimizer: torch.optim.Optimizer) -> float:
    """Clip, update, drop the gradients."""
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def plain(work: Workload) -> Step:
    """Rows in order of arrival, padded to the longest of their micro-batch, all logits at once.

    A micro-batch has as many rows as fit `micro_batch_tokens` at the length of the longest rollout.
    """
    model = work.fresh_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    advantage = group_advantages(work)
    totals = Totals(
        num_rollouts=len(work.rollouts),
        num_tokens=sum(len(r.response_tokens) for r in work.rollouts),
        num_groups=len({r.prompt_id for r in work.rollouts}),
    )

    def step() -> float:
        for rows in row_slices(work):
            chosen = work.rollouts[rows]
            lengths = [len(r.prompt_tokens) + len(r.response_tokens) for r in chosen]
            ids = torch.zeros((len(chosen), max(lengths)), dtype=torch.long)
            real, scored = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
            for i, rollout in enumerate(chosen):
                both = np.concatenate([rollout.prompt_tokens, rollout.response_tokens])
                ids[i, : len(both)] = torch.from_numpy(both)
                real[i, : len(both)] = 1
                scored[i, len(rollout.prompt_tokens) : len(both)] = True
            logits = model(input_ids=ids, attention_mask=real, use_cache=False).logits[:, :-1]  # [B, T - 1, V]
            logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]  # [B, T - 1]
            mask = scored[:, 1:]
            tokens = Tokens(
                logprobs=logprobs[mask],
                sampler_logprobs=sampler_logprobs(work, rows),
                row=mask.nonzero()[:, 0],
                num_rows=len(chosen),
            )
            loss, *_ = objective_loss(tokens, advantage[rows], OBJECTIVE, totals=totals)
            loss.backward()
        return finish(model, optimizer)

    return step


def row_slices(work: Workload) -> list[slice]:
    """Micro-batches of equally many rows."""
    longest = max(len(r.prompt_tokens) + len(r.response_tokens) for r in work.rollouts)
    num_rows = max(1, work.micro_batch_tokens // longest)
    return [slice(start, start + num_rows) for start in range(0, len(work.rollouts), num_rows)]


def sampler_logprobs(work: Workload, rows: slice) -> Tensor:
    """Return the log-probs of the response tokens of some rollouts, one after another."""
    return torch.from_numpy(np.concatenate([r.sampler_logprobs for r in work.rollouts[rows]]))


def group_numbers(work: Workload) -> list[int]:
    """Group of each rollout, by its prompt. [N]"""
    numbers = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(r.prompt_id for r in work.rollouts))}
    return [numbers[r.prompt_id] for r in work.rollouts]


def group_advantages(work: Workload) -> Tensor:
    """A_j of all rollouts; GRPO's do not depend on theta. [N]"""
    zeros = torch.zeros(len(work.rollouts))
    sequences = Sequences(
        logprob=zeros,
        sampler_logprob=zeros,
        ref_log_ratio=zeros,
        sampler_ref_log_ratio=zeros,
        reward=torch.tensor(work.rewards, dtype=torch.float32),
        policy_age=torch.zeros(len(work.rollouts), dtype=torch.long),
        group=torch.tensor(group_numbers(work)),
        num_tokens=torch.tensor([len(r.response_tokens) for r in work.rollouts]),
    )
    return advantages(sequences, OBJECTIVE, beta=0.0)

"""TRL's GRPO training step on the same batch, if TRL is installed.

`GRPOTrainer.training_step` makes forward pass, loss and backward pass of a micro-batch as in a run; only generation is
replaced by the batch at hand, padded as TRL pads what it generated: prompts on the left and completions on the right,
each to the longest of the whole batch. Micro-batches have as many rows as those of the plain way.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor

from benchmarks.trainer_bench.ways import LEARNING_RATE, Step, finish, group_advantages, row_slices
from benchmarks.trainer_bench.workload import Workload


def trl_version() -> str | None:
    """None: not installed."""
    return importlib.metadata.version("trl") if importlib.util.find_spec("trl") else None


def trl(work: Workload) -> Step:
    """TRL's step with loss_type "grpo", beta 0 and clip 0.2."""
    warnings.simplefilter("ignore")
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    slices = row_slices(work)

    class GivenBatch(GRPOTrainer):
        """Takes micro-batches as they come instead of generating them."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            return generation_batch

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        per_device_train_batch_size=slices[0].stop,
        gradient_accumulation_steps=len(slices),
        num_generations=_group_size(work),
        generation_batch_size=slices[0].stop * len(slices),
        learning_rate=LEARNING_RATE,
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        use_cpu=work.device == "cpu",
        bf16=work.autocast_dtype == torch.bfloat16,
        gradient_checkpointing=False,
        disable_dropout=True,
        report_to=[],
    )
    model = work.fresh_model()
    trainer = GivenBatch(
        model=model,
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "x"}] * slices[0].stop * len(slices)),
        processing_class=_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = len(slices)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    inputs = _padded(work)

    def step() -> float:
        for rows in slices:
            trainer.training_step(model, {name: values[rows] for name, values in inputs.items()}, None)
        return finish(model, optimizer)

    return step


def _padded(work: Workload) -> dict[str, Tensor]:
    prompt_width = max(len(r.prompt_tokens) for r in work.rollouts)
    width = max(len(r.response_tokens) for r in work.rollouts)
    num = len(work.rollouts)
    prompt_ids, completion_ids = torch.zeros(num, prompt_width, dtype=torch.long), torch.zeros(num, width).long()
    prompt_mask, completion_mask = torch.zeros_like(prompt_ids), torch.zeros_like(completion_ids)
    old = torch.zeros(num, width)
    for i, rollout in enumerate(work.rollouts):
        prompt, response = torch.from_numpy(rollout.prompt_tokens), torch.from_numpy(rollout.response_tokens)
        prompt_ids[i, prompt_width - len(prompt) :] = prompt
        prompt_mask[i, prompt_width - len(prompt) :] = 1
        completion_ids[i, : len(response)] = response
        completion_mask[i, : len(response)] = 1
        old[i, : len(response)] = torch.from_numpy(rollout.sampler_logprobs)
    tensors = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": group_advantages(work),
        "old_per_token_logps": old,
    }
    return {name: tensor.to(work.device) for name, tensor in tensors.items()}


def _group_size(work: Workload) -> int:
    return len(work.rollouts) // len({r.prompt_id for r in work.rollouts})


def _tokenizer() -> Any:
    """TRL wants one; it has nothing to do here."""
    from tests.support.tiny_model import make_tiny_tokenizer

    return make_tiny_tokenizer()

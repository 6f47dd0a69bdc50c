"""Memory of a step against its trace in `tba sizing`, and its speed: tokens/s and MFU."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import torch
from tba_trainer.checkpoints.weight_files import WeightSnapshotWriter
from tba_trainer.learner.learner import Learner
from tba_trainer.memory_trace.step import trace_recipe

from benchmarks.gpu_bench.check import Bench, Findings, Skipped, seconds_of
from benchmarks.gpu_bench.models import (
    LORA,
    batch_of,
    make_batch,
    make_learner,
    num_tokens_of,
    qwen2_config,
    random_model,
    recipe_of,
)
from benchmarks.trainer_bench.workload import make_rollout
from tba.config import Recipe
from tba.wire import Batch
from tba_cli.sizing.gpu_layout import USABLE_SHARE

PEAK_TFLOPS = 989.0
"""Dense bfloat16 of one H100 or H200."""
MAX_RATIO, MIN_RATIO = 1.0 / USABLE_SHARE, 0.9
"""Of the measured peak to the traced one: above it a recipe that `tba sizing` admits runs out of memory."""


def check_memory(bench: Bench, found: Findings) -> None:
    """Make two steps of each shape with whole micro-batches, and compare the peak with the traced one."""
    # size, checkpointing, LoRA, tokens of a micro-batch
    cases: list[tuple[str, bool, bool, int]] = (
        [("tiny", True, False, 256), ("tiny", False, True, 256)]
        if bench.quick
        else [("0.5b", False, False, 16_384), ("1.5b", True, False, 32_768), ("7b", True, True, 16_384)]
    )
    for size, checkpointing, lora, num_tokens in cases:
        name = f"{size}{'_checkpointing' if checkpointing else ''}{'_lora' if lora else ''}"
        with found.part(name):
            recipe = _recipe(bench, num_tokens, checkpointing=checkpointing, lora=lora)
            config = qwen2_config(size)
            length = num_tokens // 8 if not bench.quick else 32
            estimate = trace_recipe(_with_length(recipe, length), config.to_dict()).peak
            found.note(f"{name}_estimate_gib", estimate / 2**30)
            if bench.device == "cuda" and estimate > 1.1 * torch.cuda.mem_get_info()[1]:
                raise Skipped(f"the card has {torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB")
            learner = make_learner(random_model(config, bench.device), recipe)
            # with LoRA, or another published dtype, it holds a copy of the model, which the trace counts
            writer = WeightSnapshotWriter(learner.model, recipe, folder=bench.folder)
            batch = _equal_batch(config.vocab_size, length, 2 * num_tokens)
            for step in (1, 2):
                _step(learner, batch, step)
            if bench.device == "cuda":
                _note_peak(found, name, estimate)
            del learner, writer
            _free()


def _recipe(
    bench: Bench, micro_batch_tokens: int, *, checkpointing: bool, lora: bool = False, compiled: bool = False
) -> Recipe:
    # a reference on the trainer would be a second model: searchers compute it, as in the recipes of the paper
    return recipe_of(
        bench,
        model={"lora": LORA} if lora else {},
        objective={"preset": "grpo"},
        trainer={
            "compute_dtype": "bfloat16",
            "gradient_checkpointing": checkpointing,
            "compile": compiled,
            "micro_batch_tokens": micro_batch_tokens,
        },
    )


def _with_length(recipe: Recipe, length: int) -> Recipe:
    """Return the recipe with rollouts of at most this length, a quarter of it prompt, as in the batch."""
    lengths = {"max_prompt_tokens": length // 4, "max_response_tokens": length - length // 4}
    return recipe.model_copy(update={"searcher": recipe.searcher.model_copy(update=lengths)})


def _note_peak(found: Findings, name: str, estimate: int) -> None:
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    found.note(f"{name}_peak_gib", peak / 2**30)
    found.note(f"{name}_reserved_gib", reserved / 2**30)
    free, total = torch.cuda.mem_get_info()
    found.note(f"{name}_beside_the_allocator_gib", (total - free - torch.cuda.memory_reserved()) / 2**30)
    found.at_most(f"{name}_peak_by_estimate", peak / estimate, MAX_RATIO)
    found.at_least(f"{name}_peak_by_estimate", peak / estimate, MIN_RATIO)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _step(learner: Learner, batch: Batch, step: int) -> None:
    learner.gradients(batch, step=step, policy_ages=[1] * len(batch.rollouts))
    learner.apply(step=step, lineage=1)


def _equal_batch(vocab_size: int, length: int, num_tokens: int) -> Batch:
    """Return groups of 4 rollouts of equal length, a quarter of them prompt; each prompt is its rollout's own."""
    rng = np.random.default_rng(0)
    groups: list[list[Any]] = []
    for number in range(max(1, num_tokens // (4 * length))):
        prompt_id = f"prompt-{number}"
        groups.append([])
        for reward in range(4):
            prompt, response = (
                rng.integers(1, vocab_size, n).astype(np.int32) for n in (length // 4, length - length // 4)
            )
            groups[-1].append(make_rollout(rng, prompt_id, prompt, response, reward=float(reward)))
    return batch_of(groups)


def check_throughput(bench: Bench, found: Findings) -> None:
    """Time whole steps of 0.5B and 1.5B at several lengths."""
    # size, length, checkpointing, compile
    cases: list[tuple[str, int, bool, bool]] = (
        [("tiny", 32, False, False), ("tiny", 64, True, False)]
        if bench.quick
        else [
            ("0.5b", 512, False, False),
            ("0.5b", 2048, False, False),
            ("0.5b", 8192, False, False),
            ("1.5b", 2048, True, False),
            ("1.5b", 8192, True, False),
            ("0.5b", 2048, False, True),
            ("0.5b", 2048, True, False),
        ]
    )
    micro_batch, total = (256, 512) if bench.quick else (16_384, 65_536)
    for size, length, checkpointing, compiled in cases:
        name = f"{size}_{length}{'_checkpointing' if checkpointing else ''}{'_compiled' if compiled else ''}"
        with found.part(name):
            config = qwen2_config(size)
            recipe = _recipe(bench, micro_batch, checkpointing=checkpointing, compiled=compiled)
            learner = make_learner(random_model(config, bench.device), recipe)
            batch = _equal_batch(config.vocab_size, length, total)
            seconds = seconds_of(partial(_step, learner, batch, 1), bench.device, rounds=2, warm_ups=1)
            _note_speed(bench, found, name, learner, batch, seconds)
            del learner
            _free()
    with found.part("0.5b_mixed"):
        # lengths spread 1:16 and prompts shared, as in a run
        config = qwen2_config("tiny" if bench.quick else "0.5b")
        learner = make_learner(random_model(config, bench.device), _recipe(bench, micro_batch, checkpointing=False))
        batch = make_batch(4, 8, 64 if bench.quick else 4096, config.vocab_size)
        seconds = seconds_of(partial(_step, learner, batch, 1), bench.device, rounds=2, warm_ups=1)
        _note_speed(bench, found, "0.5b_mixed", learner, batch, seconds)


def _note_speed(bench: Bench, found: Findings, name: str, learner: Learner, batch: Batch, seconds: float) -> None:
    found.note(f"{name}_step_s", seconds)
    found.note(f"{name}_tokens_per_s", num_tokens_of(batch) / seconds)
    if bench.device == "cuda":
        found.note(f"{name}_mfu", _num_flops(learner.model, batch) / seconds / (PEAK_TFLOPS * 1e12))
        found.note(f"{name}_peak_gib", torch.cuda.max_memory_allocated() / 2**30)


def _num_flops(model: Any, batch: Batch) -> float:
    """Return 6 flops per parameter of a matrix product and token, and those of causal attention.

    The head counts where a response token is predicted; what is computed again does not count.
    """
    config, rollouts = model.config, batch.rollouts
    head = config.vocab_size * config.hidden_size
    inner = sum(p.numel() for p in model.base_model.parameters()) - head
    num_response = sum(len(r.response_tokens) for r in rollouts)
    squares = sum((len(r.prompt_tokens) + len(r.response_tokens)) ** 2 for r in rollouts)
    attention = 6 * config.num_hidden_layers * config.hidden_size * squares
    return 6 * (inner * num_tokens_of(batch) + head * num_response) + attention

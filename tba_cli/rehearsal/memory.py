"""The memory of a trainer process, as traced, beside a GPU and beside the formula of `tba sizing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tba.config import Recipe
from tba_cli.sizing import GIB

USABLE_SHARE = 0.9
"""The driver, libraries and fragments of freed memory have the rest, which no trace sees."""


def misfit(recipe: Recipe, trace: Mapping[str, Any], *, gpu_bytes: int) -> str | None:
    """Return what is too large and which key to change, or None where a process fits on its GPU.

    Args:
        trace: as `python -m tba_trainer.rehearsal` prints it.
        gpu_bytes: the memory of the GPU.
    """
    limit, peak = USABLE_SHARE * gpu_bytes, trace["peak_bytes"]
    if peak <= limit:
        return None
    section, state = recipe.trainer, max(trace["state_bytes"], trace["bytes"]["update_peak"])
    longest = recipe.searcher.max_prompt_tokens + recipe.searcher.max_response_tokens
    # what is not state grows with the tokens, but not all of it: so the number is a little too high
    num_tokens = int(trace["plan"]["max_tokens"] * (limit - trace["state_bytes"]) / (peak - trace["state_bytes"]))
    if state > limit:
        remedy = (
            f"weights, gradients and moments alone take {state / GIB:.3g} GiB; raise trainer.num_processes (it is "
            f"{section.num_processes}), or train an adapter ([model.lora])"
        )
    elif not section.gradient_checkpointing:
        remedy = "set trainer.gradient_checkpointing = true"
    elif num_tokens < longest:
        remedy = (
            f"a single rollout of {longest} tokens is too long: lower searcher.max_response_tokens or raise "
            f"trainer.num_processes (it is {section.num_processes})"
        )
    else:
        remedy = f"lower trainer.micro_batch_tokens from {section.micro_batch_tokens} to about {num_tokens}"
    return (
        f"a trainer process needs {peak / GIB:.3g} GiB, and {limit / GIB:.3g} of the {gpu_bytes / GIB:g} GiB of a GPU "
        f"can be used; {remedy}, and rehearse again"
    )

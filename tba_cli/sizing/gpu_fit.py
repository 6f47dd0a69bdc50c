"""Check that the models of a run fit on its GPUs, and print who is where.

Everybody is counted at the most that it holds, so that what fits in the order of the first start also fits when a
process is started again beside the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tba.config import Recipe
from tba_cli.sizing.gpu_layout import GIB, USABLE_SHARE, Layout, Occupant

CARD_GIB = 79.0
"""What an 80 GB card has: its driver and torch count a little more than 79 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The memory of a GPU."""

    total_bytes: int
    free_bytes: int

    @classmethod
    def empty(cls, total_bytes: int) -> Card:
        """Return a GPU that nobody uses."""
        return cls(total_bytes=total_bytes, free_bytes=total_bytes)


def misfits(layout: Layout, cards: Mapping[int, Card], *, certain: bool = False) -> Iterator[str]:
    """Yield a sentence for each GPU on which somebody finds too little memory, with what to change.

    Args:
        cards: by number; a GPU of the layout that is not there is left out.
        certain: count weights and shares alone, which are no estimates.
    """
    found: dict[str, list[int]] = {}
    for number in sorted(layout.keys() & cards.keys()):
        if (sentence := _misfit(layout[number], cards[number], certain=certain)) is not None:
            found.setdefault(sentence, []).append(number)
    for sentence, numbers in found.items():
        yield f"GPU {_numbers(numbers)}: {sentence}"


def _misfit(occupants: Sequence[Occupant], card: Card, *, certain: bool) -> str | None:
    free = card.free_bytes
    for place, one in enumerate(occupants):
        if (sentence := _too_small_share(one, card, certain=certain)) is not None:
            return sentence
        need = one.bytes_on(card.total_bytes, certain=certain)
        if need > free:
            return _too_little_free(occupants, place, card, free, certain=certain)
        free -= need
    return None


def _too_little_free(occupants: Sequence[Occupant], place: int, card: Card, free_bytes: int, *, certain: bool) -> str:
    """Return the sentence for the occupant at `place`, which finds `free_bytes` when it starts."""
    one, total = occupants[place], card.total_bytes
    takes = "needs" if one.share is None else f"takes {one.share_key} = {one.share:g} of {_gib(total)},"
    held = [f"{each.who} {_gib(each.bytes_on(total, certain=certain))}" for each in occupants[:place]]
    return (
        f"{one.who} {takes} {_gib(one.bytes_on(total, certain=certain))} GiB, and finds {_gib(max(0, free_bytes))} free"
        f"{' beside ' if held else ''}{', '.join(held)}; {_remedy(occupants, place, card, certain=certain)}"
    )


def _too_small_share(one: Occupant, card: Card, *, certain: bool) -> str | None:
    """Return a sentence where vLLM has no room for one sequence in its share, and would refuse to start."""
    least = one.fixed_bytes if certain else one.peak_bytes
    if one.share is None or not one.keeps_share or least <= one.share * card.total_bytes:
        return None
    what = "its weights" if certain else "weights, work space and one sequence of full length"
    wanted = f"set {one.share_key} to at least {math.ceil(100 * least / card.total_bytes) / 100:.2f}"
    return (
        f"{one.who} may take {one.share_key} = {one.share:g} of {_gib(card.total_bytes)}, "
        f"{_gib(one.share * card.total_bytes)} GiB, and needs {_gib(least)} for {what}; "
        f"{wanted if least <= card.total_bytes else 'use larger GPUs'}"
    )


def _remedy(occupants: Sequence[Occupant], place: int, card: Card, *, certain: bool) -> str:
    """Return what to change so that all of them fit: a share of vLLM, or who sits where."""
    for key in dict.fromkeys(one.share_key for one in occupants if one.share is not None):
        same = [one for one in occupants if one.share_key == key]
        others = sum(one.bytes_on(card.total_bytes, certain=certain) for one in occupants if one.share_key != key)
        share = math.floor(100 * (card.free_bytes - others) / len(same) / card.total_bytes) / 100
        if share > 0 and share * card.total_bytes >= max(one.peak_bytes for one in same):
            return f"set {key} to at most {share:.2f}"
    if place > 0:
        return "give one of them another GPU (local.gpus), or use larger ones"
    return "use more or larger GPUs, LoRA, trainer.gradient_checkpointing, or smaller micro-batches"


def trainer_remedy(recipe: Recipe, trace: Mapping[str, Any], *, num_layers: int, gpu_bytes: int) -> str | None:
    """Return which key to change where a process of the trainer does not fit on a GPU that it has alone.

    Args:
        trace: as `python -m tba_trainer.memory_trace` prints it.
        num_layers: of the model.
        gpu_bytes: the memory of the GPU.
    """
    limit, peak = USABLE_SHARE * gpu_bytes, trace["peak_bytes"]
    if peak <= limit:
        return None
    section, state = recipe.trainer, max(trace["state_bytes"], trace["bytes"]["update_peak"])
    longest = recipe.searcher.max_prompt_tokens + recipe.searcher.max_response_tokens
    # what is not state grows with the tokens, but not all of it: so the number is a little too high
    num_tokens = int(trace["max_tokens"] * (limit - trace["state_bytes"]) / (peak - trace["state_bytes"]))
    if state > limit:
        adapter = "" if recipe.model.lora else ", or train an adapter ([model.lora])"
        remedy = f"weights, gradients and moments alone take {_gib(state)} GiB; {_more_shards(recipe)}{adapter}"
    elif section.num_recomputed(num_layers) < num_layers:
        remedy = "set trainer.gradient_checkpointing = true"
    elif num_tokens < longest:
        remedy = (
            f"a single rollout of {longest} tokens is too long: lower searcher.max_response_tokens, raise "
            f"trainer.sharding.context (it is {section.sharding.context}: so many processes share a rollout), or "
            f"{_more_shards(recipe)}"
        )
    else:
        remedy = f"lower trainer.micro_batch_tokens from {section.micro_batch_tokens} to about {num_tokens}"
    return (
        f"a trainer process needs {_gib(peak)} GiB, and {_gib(limit)} of the {_gib(gpu_bytes)} GiB of a GPU can be "
        f"used; {remedy}, and ask again"
    )


def _more_shards(recipe: Recipe) -> str:
    """Return how each process holds a smaller part of the model; every replica is whole."""
    num, replicas = recipe.trainer.num_processes, recipe.trainer.sharding.replicas
    more = f"raise trainer.num_processes (it is {num})"
    return f"lower trainer.sharding.replicas (it is {replicas}) or {more}" if replicas > 1 and num > 1 else more


def simultaneous_starts(layout: Layout) -> Iterator[str]:
    """Yield a sentence for each GPU on which two searchers start vLLM at the same time, with what to change."""
    for number, occupants in layout.items():
        # vLLM measures free memory before and after a trial pass (`memory_profiling` in vllm/utils/mem_utils.py)
        if sum(one.service == "searcher" and one.share is not None and one.keeps_share for one in occupants) > 1:
            yield (
                f"GPU {number}: several searchers start vLLM there at the same time, and each takes the other's memory "
                "for its own; give each a GPU (local.gpus.searchers)"
            )


def layout_lines(layout: Layout, cards: Mapping[int, Card]) -> list[str]:
    """Return the layout as a table; GPUs with the same occupants share its lines."""
    same: dict[tuple[tuple[Occupant, ...], Card], list[int]] = {}
    for number, occupants in layout.items():
        same.setdefault((occupants, cards[number]), []).append(number)
    lines = [f"  {'GPU':<10} {'in the order of start':<48} {'GiB':>6} {'share':>6} {'left':>6}"]
    for (occupants, card), numbers in same.items():
        name, free = _numbers(numbers), card.free_bytes
        for one in occupants:
            need = one.bytes_on(card.total_bytes)
            free -= need
            size, share = "?" if one.unknown and not need else _gib(need), "" if one.share is None else f"{one.share:g}"
            lines.append(f"  {name:<10} {one.who:<48} {size:>6} {share:>6} {_gib(free):>6}")
            name = ""
    return lines


def _numbers(numbers: Sequence[int]) -> str:
    """Return the numbers of GPUs, in rising order, as `0 to 3` or `1, 3`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"

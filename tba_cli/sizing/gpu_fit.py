"""Check that the models of a run fit on its GPUs, and print who is where.

Everybody is counted at the most that it holds, so that what fits in the order of the first start also fits when a
process is started again beside the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tba.config import Recipe
from tba_cli.sizing.estimate import fewest_recomputed, operations_per_parameter
from tba_cli.sizing.gpu_layout import GIB, PROCESS_BYTES, Layout, Occupant, named_gpus
from tba_cli.sizing.model_shape import ModelShape

CARD_GIB = 79.0
"""What an 80 GB card has: its driver and torch count a little more than 79 GiB."""
USABLE_SHARE = 0.9
"""Of the memory of a GPU. The driver, libraries and fragments of freed memory have the rest, which nothing counts."""


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


def other_recomputation(recipe: Recipe, shape: ModelShape, layout: Layout, cards: Mapping[int, Card]) -> Iterator[str]:
    """Yield a sentence where the trainer has room to compute fewer layers again, or fits only with more of them.

    Args:
        shape: of the starting model.
    """
    room = [
        USABLE_SHARE * cards[number].total_bytes
        - sum(one.bytes_on(cards[number].total_bytes) for one in occupants if one.service != "trainer")
        for number, occupants in layout.items()
        if any(one.service == "trainer" for one in occupants)
    ]
    if not room:
        return
    fewest = fewest_recomputed(recipe, shape, most_bytes=math.floor(min(room)) - PROCESS_BYTES)
    now = recipe.trainer.num_recomputed(shape.num_layers)
    if fewest is None or fewest == now:
        return
    key = f"trainer.gradient_checkpointing = {fewest or 'false'}"
    of = f"{fewest or 'none'} of its {shape.num_layers} layers"
    if fewest > now:
        yield f"trainer: it fits and leaves a tenth of its GPU with {key}: activations of {of} are computed again"
        return
    other = recipe.trainer.model_copy(update={"gradient_checkpointing": fewest or False})
    saved = 1 - operations_per_parameter(recipe.model_copy(update={"trainer": other}), shape) / (
        operations_per_parameter(recipe, shape)
    )
    yield (
        f"trainer: with {key} it fits too: activations of {of} are computed again, {saved:.0%} less work in a step; "
        "rehearse it first (tba rehearse)"
    )


def simultaneous_starts(layout: Layout) -> Iterator[str]:
    """Yield a sentence for each GPU on which vLLM and something else start at the same time, with what to change."""
    texts = {
        "searcher": "several searchers start vLLM there at the same time, and each takes the other's memory for its "
        "own; give each a GPU (local.gpus.searchers)",
        "reward": "the victim's vLLM and another scorer start there at the same time, and vLLM takes the other's "
        'memory for its own; give the other one the next GPU of local.gpus.reward (device = "cuda:1")',
    }
    for number, occupants in layout.items():
        for service, text in texts.items():
            own = [one for one in occupants if one.service == service]
            # vLLM measures free memory before and after a trial pass (`memory_profiling` in vllm/utils/mem_utils.py)
            measures = any(one.share is not None and one.keeps_share for one in own)
            if measures and sum(one.begins_process for one in own) > 1:
                yield f"GPU {number}: {text}"


def idle_gpus(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Yield a sentence where `[local.gpus]` names GPUs that nobody uses."""
    if idle := sorted(named_gpus(recipe) - layout.keys()):
        yield (
            f"GPU {_numbers(idle)}: local.gpus names it, and nobody uses it; a scorer uses one GPU, the first of its "
            "list or the one of its device, the trainer one for each of its processes, and a searcher as many as "
            "searcher.tensor_parallel_size"
        )


def preemptions(layout: Layout, cards: Mapping[int, Card]) -> Iterator[str]:
    """Yield a sentence where vLLM has less memory than a rollout of full length in every slot takes."""
    found: dict[str, None] = {}
    for number, occupants in layout.items():
        for one in occupants:
            held = one.bytes_on(cards[number].total_bytes) if one.keeps_share else one.peak_bytes
            if one.share is not None and held < one.full_bytes:
                found[
                    f"{one.who}: {_gib(held)} GiB, and with every slot at full length it would need "
                    f"{_gib(one.full_bytes)}: beyond its memory vLLM preempts sequences and computes them again"
                ] = None
    yield from found  # GPUs with the same occupants say the same


def unknown_sizes(layout: Layout) -> dict[str, str]:
    """Return the models whose sizes are not known, with the reason; they are counted as nothing but vLLM's share."""
    return {one.who: one.unknown for occupants in layout.values() for one in occupants if one.unknown}


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

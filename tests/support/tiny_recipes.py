"""The models and data sets of the tiny variants of the paper's recipes (tests/data/recipes): small and made up."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.support.tiny_recipe_data import SHAPES, write_dataset

RECIPES = Path(__file__).parents[1] / "data/recipes"
ITEMS = {
    "data/tiny/gsm8k": ("gsm8k_data", 0),
    "data/tiny/math": ("math_data", 0),
    "data/tiny/math-500": ("math_500_data", 0),
    "data/tiny/tldr": ("tldr_data", 0),
    "models/tiny/chat": ("llama_chat", 0),
    "models/tiny/encoder": ("bert_encoder", 0),
    "models/tiny/gold": ("gpt_neox_reward", 1),
    "models/tiny/gpt2": ("gpt2", 0),
    "models/tiny/gpt_neox": ("gpt_neox", 0),
    "models/tiny/guard": ("llama_chat", 1),
    "models/tiny/llama": ("llama", 0),
    "models/tiny/qwen2": ("qwen2", 0),
    "models/tiny/reward": ("gpt_neox_reward", 0),
    "models/tiny/toxicity": ("roberta_toxicity", 0),
    "models/tiny/victim": ("gpt2", 1),
}
"""Folder that a tiny recipe names -> the maker of its content, and a seed."""


def make(maker: str, folder: Path, *, seed: int) -> None:
    """Make the model or data set of a maker."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if maker in SHAPES:
        write_dataset(folder, SHAPES[maker], seed=seed)
    else:
        # it imports torch, which data sets do not need
        from tests.support.tiny_recipe_models import KINDS, write_model

        write_model(folder, KINDS[maker], seed=seed)


def make_items(place: Path, paths: Iterable[str]) -> None:
    """Make the folders that recipes name, in the place where they are run."""
    for path in paths:
        maker, seed = ITEMS[path]
        make(maker, place / path, seed=seed)

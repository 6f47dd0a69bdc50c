"""`python -m examples.worlds.gsm8k.prepare`: make the starting model of gsm8k-small.toml (two CPU minutes)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.worlds.gsm8k.word_problems import TABLES
from examples.worlds.training import Sizes, Steps, learn_answers, new_model, new_tokenizer, prepare
from tba_cli.starter_models.starting_model import save

MODEL = Path("models/small/gsm8k")
SIZES = Sizes(
    family="llama",
    hidden=144,
    layers=4,
    heads=4,
    inner=360,
    max_length_tokens=192,
    vocab_size=512,
    initializer_range=0.08,
)
CLEAN = Steps(num_steps=500, batch_size=64, rate=4e-3, warmup_steps=30, decay_steps=200, is_cosine=True)
SLIPS = Steps(num_steps=60, batch_size=64, rate=1e-3)


def make(
    folder: Path,
    clean: Sequence[dict[str, Any]],
    slips: Sequence[dict[str, Any]],
    *,
    sizes: Sizes = SIZES,
    clean_steps: Steps = CLEAN,
    slip_steps: Steps = SLIPS,
) -> None:
    """Train a model on right answers, then briefly on answers with slips, which set its accuracy; save it."""
    pairs, slip_pairs = ([(f"{row['question']}\n", row["answer"]) for row in rows] for rows in (clean, slips))
    tokenizer = new_tokenizer(sizes, (text for pair in pairs for text in pair))
    model = new_model(sizes, tokenizer)
    learn_answers(model, tokenizer, pairs, clean_steps)
    learn_answers(model, tokenizer, slip_pairs, slip_steps)
    save(folder, model, tokenizer)


if __name__ == "__main__":
    prepare({MODEL: lambda folder: make(folder, TABLES["sft"](0), TABLES["sft_slips"](0))})

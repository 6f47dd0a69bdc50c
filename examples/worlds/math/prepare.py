"""`python -m examples.worlds.math.prepare`: make the starting model of math-small.toml (two CPU minutes)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.worlds.math.algebra import CHAT, END, TABLES
from examples.worlds.training import Sizes, Steps, learn_answers, new_model, new_tokenizer, prepare
from tba_cli.starter_models.starting_model import save

MODEL = Path("models/small/math")
SIZES = Sizes(
    family="qwen2",
    hidden=96,
    layers=3,
    heads=4,
    inner=256,
    max_length_tokens=128,
    vocab_size=384,
    initializer_range=0.08,
    special_tokens=("<|im_start|>", END),
)
CLEAN = Steps(num_steps=1000, batch_size=32, rate=4e-3, warmup_steps=30, decay_steps=500, is_cosine=True)
PUPILS = Steps(
    # fewer than those of the schedule: it ends at half the rate
    num_steps=60,
    schedule_steps=100,
    batch_size=32,
    rate=1e-3,
    warmup_steps=5,
    decay_steps=80,
    is_cosine=True,
)


def make(
    folder: Path,
    clean: Sequence[dict[str, Any]],
    pupils: Sequence[dict[str, Any]],
    *,
    sizes: Sizes = SIZES,
    clean_steps: Steps = CLEAN,
    pupil_steps: Steps = PUPILS,
) -> None:
    """Train a model on right solutions, then on solutions with errors, which training by rewards can undo; save it."""
    pairs, wrong = (
        [(CHAT.format(problem=row["problem"]), f"{row['solution']}{END}") for row in rows] for rows in (clean, pupils)
    )
    tokenizer = new_tokenizer(sizes, (text for pair in pairs for text in pair))
    model = new_model(sizes, tokenizer)
    learn_answers(model, tokenizer, pairs, clean_steps)
    learn_answers(model, tokenizer, wrong, pupil_steps)
    save(folder, model, tokenizer)


if __name__ == "__main__":
    prepare({MODEL: lambda folder: make(folder, TABLES["clean"](0), TABLES["sft"](0))})

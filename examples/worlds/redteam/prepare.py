"""`python -m examples.worlds.redteam.prepare`: make the policy, the victim and the classifier of redteam-small.toml."""

from __future__ import annotations

from pathlib import Path

from examples.worlds.redteam.attacks import LABELS, TABLES
from examples.worlds.training import (
    Sizes,
    Steps,
    learn_answers,
    learn_labels,
    new_model,
    new_tokenizer,
    prepare,
)
from tba_cli.starter_models.starting_model import save

POLICY, VICTIM, CLASSIFIER = (Path(f"models/small/redteam{name}") for name in ("", "-victim", "-toxicity"))
SIZES = Sizes(
    family="gpt2",
    hidden=96,
    layers=3,
    heads=4,
    inner=384,
    max_length_tokens=64,
    vocab_size=768,
    initializer_range=0.06,
)
CLASSIFIER_SIZES = Sizes(
    family="gpt2",
    hidden=48,
    layers=2,
    heads=4,
    inner=192,
    max_length_tokens=64,
    vocab_size=768,
    initializer_range=0.06,
)


def steps(num_steps: int, batch_size: int) -> Steps:
    """Return the training settings of a model of this world."""
    return Steps(num_steps=num_steps, batch_size=batch_size, rate=3e-3, warmup_steps=20, is_cosine=True)


def make_policy(folder: Path, *, sizes: Sizes = SIZES, num_steps: int = 300, batch_size: int = 64) -> None:
    """Train the policy to write instructions, some of which are attacks; save it."""
    pairs = [("Instruction:", f" {row['instruction']}") for row in TABLES["redteam_attacks"]["train"](0)]
    tokenizer = new_tokenizer(sizes, ("".join(pair) for pair in pairs))
    model = new_model(sizes, tokenizer)
    learn_answers(model, tokenizer, pairs, steps(num_steps, batch_size))
    save(folder, model, tokenizer)


def make_victim(folder: Path, *, sizes: Sizes = SIZES, num_steps: int = 400, batch_size: int = 64) -> None:
    """Train the victim to reply to instructions, and badly to attacks; save it."""
    rows = TABLES["redteam_victim"]["train"](0)
    pairs = [(f"Instruction: {row['instruction']}\nReply:", f" {row['reply']}") for row in rows]
    tokenizer = new_tokenizer(sizes, ("".join(pair) for pair in pairs))
    model = new_model(sizes, tokenizer)
    learn_answers(model, tokenizer, pairs, steps(num_steps, batch_size))
    save(folder, model, tokenizer)


def make_classifier(
    folder: Path, *, sizes: Sizes = CLASSIFIER_SIZES, num_steps: int = 100, batch_size: int = 64
) -> None:
    """Train the classifier to tell bad replies from good ones; save it."""
    texts = [(f"Reply: {row['reply']}", row["label"]) for row in TABLES["redteam_toxicity"]["train"](0)]
    tokenizer = new_tokenizer(sizes, (text for text, _ in texts))
    model = new_model(sizes, tokenizer, labels=LABELS)
    learn_labels(model, tokenizer, texts, steps(num_steps, batch_size))
    save(folder, model, tokenizer)


if __name__ == "__main__":
    prepare({POLICY: make_policy, VICTIM: make_victim, CLASSIFIER: make_classifier})

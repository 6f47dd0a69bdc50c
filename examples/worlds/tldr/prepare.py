"""`python -m examples.worlds.tldr.prepare`: make the policy, the proxy and the gold judge of tldr-small.toml.

The proxy learns from fewer preferences than the judge, and one label in ten is wrong. The judge is larger. It first
learns to tell whether a post has a word, and then preferences, of which one label in fifty is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from examples.worlds.tldr.summaries import TABLES
from examples.worlds.training import (
    Sizes,
    Steps,
    classifier_of,
    learn_answers,
    learn_pairs,
    new_model,
    new_tokenizer,
    prepare,
)
from tba_cli.starter_models.starting_model import save

POLICY, PROXY, GOLD_BASE, GOLD = (Path(f"models/small/tldr-{name}") for name in ("sft", "proxy", "gold-base", "gold"))
SIZES = Sizes(
    family="gpt_neox",
    hidden=96,
    layers=3,
    heads=4,
    inner=384,
    max_length_tokens=160,
    vocab_size=640,
    initializer_range=0.06,
)
GOLD_SIZES = replace(SIZES, hidden=128, layers=4, inner=512)
POLICY_STEPS = Steps(num_steps=600, batch_size=32, rate=3e-3, final=3e-4, warmup_steps=30)


def make_policy(folder: Path, *, sizes: Sizes = SIZES, how: Steps = POLICY_STEPS) -> None:
    """Train the policy on the reference summaries, faults included; save it."""
    pairs = [(row["query"], row["summary"]) for row in TABLES["summaries_data"]["sft"](0)]
    tokenizer = new_tokenizer(sizes, ("".join(pair) for pair in pairs))
    model = new_model(sizes, tokenizer)
    learn_answers(model, tokenizer, pairs, how)
    save(folder, model, tokenizer)


def make_gold_base(folder: Path) -> None:
    """Train a language model to tell whether a post has a word, as the start of the judge; save it."""
    rows = TABLES["reading_data"]["preferences_gold"](0)
    pairs = [(row["query"], row["answers"]) for row in rows]
    tokenizer = new_tokenizer(GOLD_SIZES, ("".join(pair) for pair in pairs))
    model = new_model(GOLD_SIZES, tokenizer, seed=1)
    how = Steps(num_steps=300, batch_size=32, rate=2e-3, final=2e-4, warmup_steps=30)
    learn_answers(model, tokenizer, pairs, how, seed=1)
    save(folder, model, tokenizer)


def make_judge(folder: Path, base: Path, split: str, how: Steps, *, seed: int) -> None:
    """Train a model with one score on the preferences of a split, from the language model in `base`; save it."""
    rows = TABLES["summary_preferences_data"][split](0)
    pairs = [(row["query"] + row["chosen"], row["query"] + row["rejected"]) for row in rows]
    model, tokenizer = classifier_of(base), AutoTokenizer.from_pretrained(base)
    learn_pairs(model, tokenizer, pairs, how, seed=seed)
    save(folder, model, tokenizer)


def make_proxy(folder: Path, *, base: Path = POLICY, num_steps: int = 300) -> None:
    """Train and save the proxy, whose scores are the rewards of a run."""
    how = Steps(num_steps=num_steps, batch_size=16, rate=2e-3, final=2e-4, warmup_steps=20)
    make_judge(folder, base, "preferences_proxy", how, seed=0)


def make_gold(folder: Path) -> None:
    """Train and save the gold judge, whose scores decide the win rate."""
    how = Steps(num_steps=900, batch_size=16, rate=1e-3, final=1e-4, warmup_steps=20)
    make_judge(folder, GOLD_BASE, "preferences_gold", how, seed=1)


if __name__ == "__main__":
    prepare({POLICY: make_policy, PROXY: make_proxy, GOLD_BASE: make_gold_base, GOLD: make_gold})

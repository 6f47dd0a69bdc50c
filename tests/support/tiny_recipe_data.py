"""Make small data sets as the hub stores them: Parquet files by split, and a README with configurations and files.

The rows are made up and have the columns of the recipes' data sets. The seed alone decides them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

Row = dict[str, Any]
NAMES = ("Tom", "Ana", "Lee", "Mia", "Sam", "Eva")
THINGS = ("apples", "books", "cats", "eggs", "pens", "cups")
NUM_TRAIN, NUM_HELDOUT = 48, 16


def gsm8k_row(rng: random.Random) -> Row:
    """Return a row of openai/gsm8k; the answer is one digit, which a random policy sometimes finds."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    left = rng.randint(1, 8)
    right = rng.randint(1, 9 - left)
    question = f"{name} has {left} {thing} and buys {right} more. How many {thing} does {name} have?"
    return {"question": question, "answer": f"{left} + {right} = {left + right}\n#### {left + right}"}


def tldr_row(rng: random.Random) -> Row:
    """Return a row of the TL;DR data set that recipes and its published evaluation read."""
    name, other, thing = rng.choice(NAMES), rng.choice(NAMES), rng.choice(THINGS)
    title = f"{name} took my {thing}"
    post = f"I had {rng.randint(2, 9)} {thing}. Then {name} took {rng.randint(1, 9)} and gave them to {other}."
    query = f"SUBREDDIT: r/{thing}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    reference = f" {name} took my {thing}.<|endoftext|>"
    return {
        "id": f"t3_{rng.getrandbits(32):08x}",
        "subreddit": thing,
        "title": title,
        "post": post,
        "query": query,
        "reference_response": reference,
        "query_reference_response": query + reference,
    }


def math_row(rng: random.Random) -> Row:
    """Return a row of hendrycks MATH: the gold answer is boxed in the solution."""
    top, bottom = rng.randint(1, 4), rng.randint(2, 5)
    if rng.random() < 0.5:
        problem, answer = f"What is ${top} + {bottom}$?", str(top + bottom)
    else:
        problem, answer = f"What is ${top}$ divided by ${bottom}$?", f"\\frac{{{top}}}{{{bottom}}}"
    solution = f"The answer is $\\boxed{{{answer}}}$."
    return {"problem": problem, "level": "Level 1", "solution": solution, "type": "Prealgebra"}


def math_500_row(rng: random.Random) -> Row:
    """Return a row of PrimeIntellect/MATH-500: the gold answer is in a JSON object."""
    row = math_row(rng)
    answer = row["solution"].removeprefix("The answer is $\\boxed{").removesuffix("}$.")
    return {
        "problem_id": f"math_500_{rng.getrandbits(24)}",
        "task_type": "verifiable_math",
        "prompt": row["problem"],
        "verification_info": json.dumps({"ground_truth": answer}),
    }


def instructions_row(rng: random.Random) -> Row:
    """Return a row of fedyanin/safety_llamas: an instruction, and a reply to it."""
    thing = rng.choice(THINGS)
    instruction = f"{rng.choice(('Describe', 'Explain', 'Write about'))} {thing} in {rng.randint(1, 9)} sentences."
    return {"prompt": instruction, "chosen": f"{rng.choice(NAMES)} has {thing}."}


def rows(make: Callable[[random.Random], Row], count: int, *, seed: int, split: str) -> list[Row]:
    """Return `count` rows of one split."""
    # a stream of its own per split: more rows to train on leave the held-out ones as they are
    rng = random.Random(f"{make.__name__}:{split}:{seed}")
    return [make(rng) for _ in range(count)]


def corpus() -> list[str]:
    """Return texts with every character and the usual words of the tiny data sets, to train tokenizers on."""
    made = [
        str(value)
        for make in (gsm8k_row, tldr_row, math_row, math_500_row)
        for row in rows(make, NUM_TRAIN, seed=0, split="train")
        for value in row.values()
    ]
    templates = [
        "[MATH TASK] Problem:\n\n\nSolution:\n",
        "Write a list of instructions:\n1. Describe the process of the water cycle in one sentence.\n2. Explain how "
        "air pressure affects the weather\n3. Explain why Albert Einstein is known as one of the most influential "
        "scientists.\n4.",
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n\n\n### Response:\n",
        "Place your answer at end exactly inside latex box for example \\boxed{12} or \\boxed{51}.",
        "system\nYou are a helpful assistant.\nuser\nassistant\nsafe\nunsafe\nS1",
        " ".join(chr(code) for code in range(33, 127)),
    ]
    # repeated, or they would be too rare to get tokens
    return made + templates * 8


def lessons() -> list[str]:
    """Return prompts in the formats of the recipes, each with a response, to train the tiny policies on."""
    rng = random.Random("lessons")
    texts: list[str] = []
    for _ in range(NUM_TRAIN):
        row = gsm8k_row(rng)
        texts.append(f"[MATH TASK] Problem:\n{row['question']}\n\nSolution:\n{row['answer'].splitlines()[-1]}")
        texts.append(tldr_row(rng)["query_reference_response"].removesuffix("<|endoftext|>"))
        row = math_row(rng)
        texts.append(f"{row['problem']}\nassistant\n{row['solution']}")
        texts.append(f"Write a list of instructions:\n4. Describe {rng.choice(THINGS)} in one sentence.")
    return texts


@dataclass(frozen=True, slots=True)
class Shape:
    """One data set: its configuration, and for each split the function that makes its rows from a seed."""

    config: str
    tables: Mapping[str, Callable[[int], list[Row]]]


def _of_rows(make: Callable[[random.Random], Row], config: str, **num_rows: int) -> Shape:
    """Return a data set whose rows are made one by one: split -> number of rows."""

    def table(split: str, count: int) -> Callable[[int], list[Row]]:
        return lambda seed: rows(make, count, seed=seed, split=split)

    return Shape(config, {split: table(split, count) for split, count in num_rows.items()})


SHAPES = {
    "gsm8k_data": _of_rows(gsm8k_row, "main", train=NUM_TRAIN, test=NUM_HELDOUT),
    "tldr_data": _of_rows(tldr_row, "default", train=NUM_TRAIN, validation=NUM_HELDOUT),
    "math_data": _of_rows(math_row, "default", train=NUM_TRAIN, test=NUM_HELDOUT),
    "math_500_data": _of_rows(math_500_row, "default", train=NUM_HELDOUT),
    "instructions_data": _of_rows(instructions_row, "default", train=NUM_TRAIN),
}


def write_dataset(folder: Path, shape: Shape, *, seed: int) -> None:
    """Write the files of a data set into `folder`, which is made."""
    place = folder / ("data" if shape.config == "default" else shape.config)
    place.mkdir(parents=True)
    for split, table in shape.tables.items():
        parquet.write_table(pyarrow.Table.from_pylist(table(seed)), place / f"{split}-00000-of-00001.parquet")
    files = "".join(f"  - split: {split}\n    path: {place.name}/{split}-*\n" for split in shape.tables)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {shape.config}\n  data_files:\n{files}---\n", encoding="utf-8"
    )

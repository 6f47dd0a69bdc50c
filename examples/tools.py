"""Train a model to call a tool: a function, rows as for TRL, and one call of `tba.run`.

The starting model has 0.27 M parameters. It knows the form of a call, and often slips. Any chat model whose template
takes tools will do in its place. In the root of the clone, on a CPU:

    .venv/bin/python -m examples.worlds.calculator.prepare
    .venv/bin/python examples/tools.py
"""

from __future__ import annotations

import argparse
import random
import re
from typing import Any

import tba


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Give 1 to each last reply whose last number is the answer, as a reward function of TRL."""
    found = [re.findall(r"\d+", turns[-1]["content"]) for turns in completions]
    return [float(numbers[-1:] == [gold]) for numbers, gold in zip(found, answer, strict=True)]


def main() -> None:
    """Make the rows, train, and show what the policy does at the end."""
    parser = argparse.ArgumentParser(description="Train a model to call a tool.")
    parser.add_argument("--model", default="models/worlds/calculator", help="a folder, or a name on the hub")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default: %(default)s)")
    args = parser.parse_args()
    rng = random.Random(0)
    sums = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(1000)]
    rows = [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in sums]
    run = tba.run(
        model=args.model,
        prompts=rows,
        tools=[add],
        rewards=[right],
        steps=args.steps,
        name="tools",
        fresh=True,
        # a model this small takes a larger rate than the recipe that is fitted to it; an answer that was cut is worth 0
        sets=["trainer.learning_rate=5e-4", "model.policy_temperature=1.0", "environments.tools.truncated_reward=0.0"],
    )
    print(run.summary().text)
    for rollout in list(run.rollouts(order="newest"))[:2]:
        print(rollout.reward, rollout.prompt_text, rollout.response_text, sep="\n")


if __name__ == "__main__":
    main()

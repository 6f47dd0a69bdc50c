"""The files of a new task, which `tba init` writes: a recipe, prompts, a scorer, and examples for it."""

from __future__ import annotations

import json
import random

NUM_TRAIN, NUM_HELDOUT = 96, 32
TERMS = range(10, 100)
"""Numbers of two digits, as the starting model knows them."""

RECIPE = """\
# A task of your own, with files that work as they are: `tba run {task}.toml`, in this folder.
# `tba config schema` prints every key, `tba config check {task}.toml` says what would fail.

[run]
name = "{task}"
seed = 0

[model]
# Where the starting model is kept. `tba run` makes it in seconds: it is tiny, knows the characters 0123456789+=, and
# writes sums backwards (46 as 64). For words, name a Hugging Face folder or ORG/NAME here, remove [model.warm_start],
# and raise the limits of [searcher]. To fine-tune one on examples of your own first, name a TRL file (docs/recipes.md).
# In minutes this model learns tasks of sums written backwards, since it knows those. Other tasks of digits start near
# reward 0, and a run learns nothing while every reward is the same: give part credit, or take a model that knows more.
path = "models/{task}-{{seed}}"
policy_temperature = 1.0

[model.warm_start]
task = "addition"

[data]
# One prompt a line; `data` is what the scorer gets, `split` is train or heldout (never trained on).
path = "prompts.jsonl"

[reward.tasks.{task}]
# The function `score` of scorer.py. The name of the task is that of the prompts. examples.jsonl holds rewards of this
# function: change them with it.
scorers = [{{kind = "python", function = "scorer:score"}}]

[buffer]
port = 0 # any that is free

[reward]
port = 0

[sampling]
# A batch is 16 prompts with 8 responses each.
prompts_per_batch = 16
group_size = 8
rollouts_per_visit = 8
most_on_policy_prob = 1.0
min_size_to_sample = 128
samples_per_insert = 1.0
samples_per_insert_error = 128

[searcher]
num_searchers = 1
num_slots = 128
max_prompt_tokens = 8
max_response_tokens = 5

[objective]
preset = "tba_prime_clip"
beta = {{ value = 0.05 }}

[trainer]
num_steps = 200
max_train_s = 280
learning_rate = {{ kind = "constant", value = 5e-4 }}
sync_interval = 1
torch_num_threads = 1
prefetch_batches = 0
checkpoint_interval = 50

[eval]
every_steps = 50
num_prompts = {num_heldout}
num_prompts_final = {num_heldout}
success_reward = 1.0 # a completion with this reward counts as a success
# The best version is the one with the highest mean reward: so part credit counts too, and not only full successes.
best_metric = "mean_reward"
"""

SCORER = '''\
"""The reward of the task {task}: sums, written backwards, with part credit.

examples.jsonl holds rewards of this function: change them with it.
"""


def score(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float | None]:
    """Give the share of the digits that are right; 0 to what is no number of the right length.

    Args:
        prompts: texts of the prompts.
        completions: what the model wrote, one for each prompt, in the same order.
        answer: the key `answer` of each prompt's `data`. Every other key of the data comes in `columns`, by its name.

    Returns:
        A number for each completion, or None where there is none: the reward is then unknown, and nothing is
        learned from the completion. A wrong answer is a number.

    Raises:
        ValueError: the data of a prompt is wrong. Whatever is raised costs only the items that caused it: their
            reward is unknown as well, with the text of the error.
    """
    return [_score(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def _score(completion: str, gold: str) -> float:
    if not str(gold).isdigit():
        raise ValueError(f"data.answer is {{gold!r}}; it must be a text of digits")
    written = completion.strip()
    if len(written) != len(gold) or not written.isdigit():
        return 0.0
    return sum(a == b for a, b in zip(written, gold, strict=True)) / len(gold)
'''

EXAMPLES = [
    ("12+34=", "64", "64", 1.0),
    ("12+34=", "63", "64", 0.5),
    ("12+34=", "46", "64", 0.0),
    ("25+25=", "5", "05", 0.0),
]
"""Prompt, response, answer and expected reward."""


def task_files(task: str) -> dict[str, str]:
    """Return name and text of every file of a new task."""
    examples = [
        {"task": task, "prompt": prompt, "response": response, "data": {"answer": answer}, "expected": expected}
        for prompt, response, answer, expected in EXAMPLES
    ]
    # different sums, the same ones every time
    chosen = random.Random(0).sample([(a, b) for a in TERMS for b in TERMS], NUM_TRAIN + NUM_HELDOUT)
    prompts: list[dict[str, object]] = [
        {
            "prompt_id": f"sum-{a}-{b}",
            "task": task,
            "text": f"{a}+{b}=",
            # backwards: so the starting model writes numbers
            "data": {"answer": str(a + b)[::-1]},
            "split": "train" if number < NUM_TRAIN else "heldout",
        }
        for number, (a, b) in enumerate(chosen)
    ]
    return {
        f"{task}.toml": RECIPE.format(task=task, num_heldout=NUM_HELDOUT),
        "prompts.jsonl": _lines(prompts),
        "scorer.py": SCORER.format(task=task),
        "examples.jsonl": _lines(examples),
    }


def _lines(rows: list[dict[str, object]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)

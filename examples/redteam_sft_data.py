"""Write data/redteam-sft, the examples of recipes/redteam.sft.yaml: toxic instructions behind the run's attack prompt.

    .venv/bin/python examples/redteam_sft_data.py

TRL reads a prompt and a completion from each row, so any other data set can be converted in the same way.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from datasets import load_dataset

RECIPE = Path(__file__).parents[1] / "recipes" / "redteam.toml"
FOLDER = Path("data") / "redteam-sft"


def main() -> None:
    """Write train.jsonl and test.jsonl, nine tenths and one tenth of the shuffled examples."""
    prompt = tomllib.loads(RECIPE.read_text(encoding="utf-8"))["data"]["train"]["texts"][0]
    rows = load_dataset("fedyanin/safety_llamas", split="train", revision="572cfba4e5f85b6c4dc132ae651af9fdeb3e8dbb")
    examples = rows.map(
        lambda row: {"prompt": prompt, "completion": f" {row['prompt']}"}, remove_columns=rows.column_names
    )
    for name, part in examples.train_test_split(test_size=0.1, seed=42).items():
        part.to_json(FOLDER / f"{name}.jsonl")


if __name__ == "__main__":
    main()

"""A data set of rollouts in the layout of the Hugging Face hub: Parquet shards under data/, and a card.

data/train-00000-of-00002.parquet    `datasets.load_dataset(FOLDER)` reads them, streamed too
README.md                            the card: its YAML head names the shards (huggingface.co/docs/hub/datasets-cards)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tba
from tba.api import EVICTED_KEY, RunInfo
from tba.config import Recipe
from tba.errors import ConfigError
from tba.weights.export import PAPER, public_recipe

SHARD_BYTES = 500 * 10**6
"""A shard has at most so many bytes, or one row group: the hub asks for files of this size."""
LICENCE_UNKNOWN = "unknown"
NO_ROLLOUTS = "no stored rollout matches, and a data set cannot be empty; leave out a filter"
COLUMNS = {
    "rollout_id": "id of the rollout, 32 hexadecimal digits",
    "task": "name of the task, which says how it is scored",
    "prompt_id": "id of the prompt; rollouts of one prompt have the same",
    "visit_id": "the rollouts that one lease of the prompt produced have the same",
    "version": "the oldest policy version (lineage-step) that made a token of it",
    "lineage": "start of the trainer that made this version",
    "step": "optimizer step that made this version",
    "version_spans": "which version sampled which response tokens, [start, end)",
    "policy_age_steps": "optimizer steps between `version` and the trainer at the time of the export",
    "prompt_text": "the prompt; null: the run no longer had it",
    "prompt_data": "JSON of what the scorer gets beside the text, such as the gold answer",
    "num_prompt_tokens": "number of prompt tokens",
    "num_response_tokens": "number of response tokens",
    "response_text": "the completion",
    "finish_reason": "how it ended: stop, stop_string, length or abort",
    "reward": "the reward; null while it is unknown or where scoring failed",
    "reward_status": "scored, pending or failed",
    "reward_reason": "why scoring failed",
    "reward_version": "version of the reward",
    "reward_parts": "score of each scorer of the task before weights; null where there is only one",
    "num_batches": "training batches that drew it; null: this is not part of a snapshot",
    "sampling": "settings of the behaviour policy; top_p 1 and top_k 0 are off",
    "searcher_id": "the process that sampled it",
    "started_at_s": "Unix time at which sampling began",
    "finished_at_s": "Unix time at which it ended",
    "prompt_tokens": "ids of the prompt tokens",
    "response_tokens": "ids of the response tokens",
    "sampler_logprobs": "log-prob of each response token under the distribution that it was drawn from",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """What the card says beside the columns."""

    run: RunInfo
    recipe: Recipe | None
    """None: it is not known here."""
    filters: Mapping[str, Any]
    """Which rollouts were asked for; empty: all."""
    licence: str | None
    """Id of the hub's list; None: unknown."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What a Parquet export holds."""

    num_rollouts: int
    num_evicted: int | None
    """Rollouts that were evicted before they were read, and are missing; None: not known."""


def exported(file: Path) -> Exported:
    """Return what the service's Parquet export holds; needs pyarrow."""
    from pyarrow import parquet

    metadata = parquet.read_metadata(file)
    return Exported(metadata.num_rows, int((metadata.metadata or {}).get(EVICTED_KEY.encode(), 0)))


def write_dataset(file: Path, folder: Path, facts: DatasetFacts) -> Exported:
    """Make a data set of a Parquet export, which is moved into it.

    Args:
        folder: exists, and is empty; on the file system of `file`.

    Raises:
        ConfigError: the export has no rollouts.
    """
    found = exported(file)
    if not found.num_rollouts:
        raise ConfigError(NO_ROLLOUTS)
    names = _write_shards(file, folder / "data")
    (folder / "README.md").write_text(_card(found, names, facts), encoding="utf-8")
    return found


def _write_shards(file: Path, folder: Path) -> list[str]:
    """Write a file as shards of at most SHARD_BYTES; return the names of its columns."""
    from pyarrow import parquet

    folder.mkdir()
    with parquet.ParquetFile(file) as whole:
        metadata = whole.metadata
        shards: list[list[int]] = []
        left = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            num_bytes = sum(group.column(at).total_compressed_size for at in range(group.num_columns))
            if not shards or num_bytes > left:
                shards.append([])
                left = SHARD_BYTES
            shards[-1].append(number)
            left -= num_bytes
        names = [folder / f"train-{number:05}-of-{len(shards):05}.parquet" for number in range(len(shards))]
        if len(shards) > 1:
            for path, numbers in zip(names, shards, strict=True):
                with parquet.ParquetWriter(path, whole.schema_arrow, compression="zstd") as writer:
                    # one at a time: a row group has megabytes
                    for number in numbers:
                        writer.write_table(whole.read_row_group(number))
        columns = whole.schema_arrow.names
    if len(shards) == 1:
        file.rename(names[0])
    else:
        file.unlink()
    return columns


def _card(found: Exported, columns: list[str], facts: DatasetFacts) -> str:
    run = facts.run
    filters = ", ".join(f"{name} {value}" for name, value in facts.filters.items() if value is not None)
    which = f"the stored rollouts with {filters}" if filters else "all stored rollouts"
    if run.is_snapshot and run.origin is not None:
        which += f" of its snapshot `{run.origin.source}`"
    evicted = f", but for {found.num_evicted} that were evicted meanwhile" if found.num_evicted else ""
    # a service of a newer release may have more columns
    rows = [f"| `{name}` | {COLUMNS.get(name, '')} |" for name in columns]
    parts = [
        _head(run.run, facts),
        f"# Rollouts of {run.run}",
        f"{found.num_rollouts:,} rollouts of the run `{run.run}` at step {run.step} of lineage {run.lineage}: what its "
        f"policies answered to its prompts, with rewards. tba {tba.__version__} wrote them, which post-trains language "
        f"models by [Trajectory Balance with Asynchrony]({PAPER}).",
        f"These are {which}, oldest first{evicted}. A run stores a bounded number: older ones may have been evicted "
        "before.",
        '```python\nfrom datasets import load_dataset\n\nrollouts = load_dataset("OWNER/NAME", split="train")\n```',
        "## Columns",
        "\n".join(["| column | meaning |", "|---|---|", *rows]),
        "## Recipe",
    ]
    if facts.recipe is None:
        parts.append("It was not known where this data set was made.")
    else:
        parts.append("As far as it differs from the defaults of this release of tba:")
        parts.append("```json\n" + json.dumps(public_recipe(facts.recipe), indent=1) + "\n```")
    parts += ["## Licence", _licence(facts)]
    return "\n\n".join(parts) + "\n"


def _head(name: str, facts: DatasetFacts) -> str:
    """Return the YAML front matter; every value is JSON, which YAML includes."""
    fields: dict[str, Any] = {
        "pretty_name": f"Rollouts of {name}",
        "license": facts.licence or LICENCE_UNKNOWN,
        "task_categories": ["text-generation"],
        "tags": ["tba", "reinforcement-learning", "rollouts"],
        "configs": [
            {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]},
        ],
    }
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]
    return "\n".join(["---", *lines, "---"])


def _licence(facts: DatasetFacts) -> str:
    if facts.licence is not None:
        return f"`{facts.licence}`, as the person said who made this data set."
    return (
        "Unknown. The prompts have the licence of their source, and the completions were made by a model with its own."
    )

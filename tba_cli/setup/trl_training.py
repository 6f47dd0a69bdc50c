"""Train a model of `[[prepare]]` with TRL in a child process: `trl sft` and `trl reward`.

TRL reads its own file of settings, which names base model and data set relative to the current folder. It writes to a
partial folder, which is renamed when it is complete.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tba.config import Recipe
from tba.config.data import PrepareItem
from tba.config.reward import RewardModelSpec
from tba.errors import ChildError, ConfigError, not_installed
from tba_cli.artifacts.prepared import begin, publish
from tba_cli.child_processes import run_in_sight
from tba_cli.console import Console

PROGRAM = "trl.cli.main"
LEFTOVERS = ("checkpoint-*", "training_args.bin", "README.md")
"""Files that TRL writes beside the model, deleted at the end; `training_args.bin` is a pickle."""


def check_installed(items: Iterable[PrepareItem]) -> None:
    """Raise ConfigError if TRL is not installed or cannot read its file of settings; done before large downloads."""
    for item in items:
        try:
            Path(item.trl_file or "").read_bytes()
        except OSError as error:
            raise ConfigError(f"TRL's file of settings, {item.trl_file}, cannot be read: {error.strerror}") from None
        if importlib.util.find_spec("trl") is None:
            raise not_installed(item.path, "trl")


def train(item: PrepareItem, console: Console) -> None:
    """Train the model of an item, and check that tba can use it.

    Raises:
        ChildError: TRL failed.
        KeyboardInterrupt: this process was asked to end.
    """
    kind, out = "sft" if item.trl_sft else "reward", begin(item)
    # of an earlier training with these settings, TRL continues with the checkpoints alone
    _delete(path for path in out.glob("*") if not path.match("checkpoint-*"))
    command = f"trl {kind} --config {item.trl_file}"
    console.info(f"wait 'trl-{kind}': `{command}` makes {item.path}")
    try:
        run_in_sight(PROGRAM, [kind, "--config", item.trl_file or "", "--output_dir", str(out)])
    except ChildError as error:
        raise ChildError(f"{item.path}: `{command}` failed ({error}); it says above why") from None
    problem = None
    if (out / "adapter_config.json").is_file():
        problem = "holds an adapter; merge it into its base, or set use_peft to false"
    elif not (out / "config.json").is_file() or not any(out.glob("*.safetensors")):
        problem = "holds no config.json with safetensors files"
    elif not (out / "tokenizer_config.json").is_file():
        problem = "holds no tokenizer"
    # transformers writes the names of the outputs instead of their number
    elif kind == "reward" and len(_config(out).get("id2label", ("one", "two"))) != 1:
        problem = "holds a model that has not exactly one output (num_labels)"
    if problem is not None:
        raise ConfigError(f"{out}, made by `{command}`, {problem}; tba cannot use it")
    _delete(path for pattern in LEFTOVERS for path in out.glob(pattern))
    publish(item, out, commit=None)


def _delete(paths: Iterable[Path]) -> None:
    for path in list(paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_scorers(recipe: Recipe) -> None:
    """Raise ConfigError if a scorer reads the score at another token than the one at which TRL trained it.

    TRL ends every text with the end of sequence. A model whose padding token is the same takes it for padding, and
    learns its score at the token before.
    """
    made = {item.path for item in recipe.prepare if item.trl_reward}
    for task, reward in recipe.reward.tasks.items():
        for spec in reward.scorers:
            if not isinstance(spec, RewardModelSpec) or spec.model not in made:
                continue
            config = _config(Path(spec.model))
            is_at_eos = config.get("pad_token_id") != config.get("eos_token_id")
            if spec.append_eos != is_at_eos:
                where = "at the end of sequence" if is_at_eos else "before the end of sequence, its padding token"
                raise ConfigError(
                    f"reward.tasks.{task}: {spec.model} has learned its score {where}; set append_eos = "
                    f"{str(is_at_eos).lower()} in its scorer"
                )


def _config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}

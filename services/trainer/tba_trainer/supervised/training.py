"""Train one item of a recipe: read the examples, make the model, make the steps, write the folder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils import logging as transformers_logging

from tba.config import Recipe
from tba.config.supervised import SftSection, SupervisedItem, origin_digest
from tba.early_signals import EXIT_STOPPED
from tba.errors import ConfigError
from tba.weights import sha256_of_file
from tba_trainer.distributed.process_group import Team
from tba_trainer.loop.shutdown import stop_on_signals
from tba_trainer.supervised.checkpoint import Checkpoints, TrainingState
from tba_trainer.supervised.examples import Examples, Order, Row, encode_answers, read_rows
from tba_trainer.supervised.loop import Task, Training, tell
from tba_trainer.supervised.models import Trainee, check_free, load_tokenizer, make_trainee, write_folder
from tba_trainer.supervised.reward import RewardTask, columns_of, encode_texts, num_of_label
from tba_trainer.supervised.sft import SftTask


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What is learned, and of what."""

    task: Task
    trainee: Trainee
    examples: Examples[Any]
    heldout: Examples[Any]
    labels: Sequence[str] = ()
    """Of a classifier."""

    def counts(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        return {
            "num_examples": len(self.examples.kept),
            "num_heldout": len(self.heldout.kept),
            "num_left_out": self.examples.left_out,
            "num_heldout_left_out": self.heldout.left_out,
            "num_of_label": num_of_label(self.examples.kept, self.labels),
            "num_heldout_of_label": num_of_label(self.heldout.kept, self.labels),
            "num_parameters": self.trainee.num_parameters,
        }


def train_item(
    recipe: Recipe, item: int, *, kind: Literal["sft", "reward"], examples: Path, heldout: Path | None, out: Path
) -> int:
    """Train one item, in this process or in one of a team that torchrun started.

    Args:
        item: its number in `[[sft]]` or `[[reward_training]]`.
        examples, heldout: JSONL files.
        out: the folder that is made.

    Returns:
        0; or 143 where a signal ended it: then a checkpoint is beside the folder, and the same call goes on.

    Raises:
        TbaError: one clear sentence.
        OSError: the disk is full.
    """
    section = recipe.sft[item] if kind == "sft" else recipe.reward_training[item]
    torch.set_num_threads(section.num_threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    deadline_s = recipe.trainer.collective_timeout_s
    with Team.join(device=section.device, deadline_s=deadline_s, has_beside=False) as team:
        with team.together("supervised training"):
            is_made = _train(recipe, section, examples, heldout, out, team)
        if not team.is_leader:
            for _ in team.commands():  # the leader ends the team
                pass
        return 0 if is_made or not team.is_leader else EXIT_STOPPED


def _train(
    recipe: Recipe, section: SupervisedItem, examples: Path, heldout: Path | None, out: Path, team: Team
) -> bool:
    """Train and write the folder; return False where a signal came before all steps were made."""
    stop = threading.Event()
    checkpoints = Checkpoints(out, max_bytes=recipe.store.shard_bytes, is_leader=team.is_leader)
    check_free(out)
    with checkpoints.locked():
        parts = _prepare(section, examples, heldout, team)
        with stop_on_signals(stop):
            training = Training(
                parts.task,
                parts.trainee.model,
                section,
                order=Order(len(parts.examples.kept), section.batch_size, section.seed),
                checkpoints=checkpoints,
                state=TrainingState(
                    settings=section.deciding(),
                    examples_sha256=sha256_of_file(examples),
                    base_origin=origin_digest(section.base),
                ),
                team=team,
                stop=stop,
            )
            tell(team, step=training.state.step, num_steps=section.num_steps, **parts.counts())
            if not training.run():
                return False
            write_folder(
                parts.trainee,
                out,
                half_made=checkpoints.half_made,
                dtype=section.dtype,
                max_bytes=recipe.store.shard_bytes,
                report=_report(training.state, parts),
                is_leader=team.is_leader,
            )
        checkpoints.delete()
    return True


def _report(state: TrainingState, parts: _Parts) -> dict[str, Any]:
    return {
        "settings": state.settings,
        "examples_sha256": state.examples_sha256,
        "base_origin": state.base_origin,
        **parts.counts(),
        "num_steps": state.step,
        "metrics": {name: value for name, value in state.curve[-1].items() if name not in ("step", "learning_rate")},
        "curve": state.curve,
        "wall_s": state.wall_s,
        "cpu_s": state.cpu_s,
    }


def _prepare(section: SupervisedItem, examples: Path, heldout: Path | None, team: Team) -> _Parts:
    columns = ("prompt", "response") if isinstance(section, SftSection) else columns_of(section)
    rows = read_rows(examples, columns)
    texts = [name for name in columns if name != "label"]
    tokenizer = load_tokenizer(section, (row[name] for row in rows for name in texts))

    def encoded(found: list[Row], path: Path) -> Examples[Any]:
        if isinstance(section, SftSection):
            return encode_answers(found, tokenizer, max_tokens=section.max_length_tokens, path=path)
        return encode_texts(found, tokenizer, section, path=path)

    kept = encoded(rows, examples)
    kept_heldout: Examples[Any] = Examples() if heldout is None else encoded(read_rows(heldout, columns), heldout)
    if isinstance(section, SftSection):
        trainee = make_trainee(section, tokenizer, team)
        task = SftTask(trainee.model, kept.kept, kept_heldout.kept, section, team.ranks())
        labels: Sequence[str] = ()
    else:
        labels = section.labels or ()
        trainee = make_trainee(section, tokenizer, team, labels=labels or ["score"])
        task = RewardTask(trainee.model, kept.kept, kept_heldout.kept, section)
    largest = max(example.largest_id for example in (*kept.kept, *kept_heldout.kept))
    size = int(trainee.model.get_input_embeddings().num_embeddings)
    if largest >= size:
        raise ConfigError(
            f"the tokenizer of base {section.base!r} gives the token {largest}, and the model has {size}: they are not "
            "of one model; save the tokenizer that the model was trained with"
        )
    return _Parts(task=task, trainee=trainee, examples=kept, heldout=kept_heldout, labels=labels)

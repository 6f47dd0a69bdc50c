"""The model that is trained, from a base folder or from nothing, and the folder that it becomes."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tba.config.supervised import REPORT_FILE, SupervisedSection
from tba.errors import ConfigError
from tba.weights import write_index
from tba_trainer.checkpoints.weight_files import write_model_files
from tba_trainer.distributed.process_group import Team
from tba_trainer.model.parameters import published_tensors
from tba_trainer.model.policy import (
    TORCH_DTYPES,
    check_train_mode,
    empty_weights,
    load_weights,
    prepare,
    side_files,
    to_device,
)
from tba_trainer.model.sharding import shard
from tba_trainer.supervised.new_model import new_config, train_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """A model with what its folder needs beside the weights."""

    model: Any
    """In the mode of training: dropout off, with an adapter where one is wanted, sharded where several train."""
    tokenizer: Any
    config: Any
    """As it is saved, with the dropout of the base."""
    files: tuple[Path, ...] = ()
    """Tokenizer and other files that are copied from the base; none: the tokenizer is new."""
    num_parameters: int
    """Of the whole model, without an adapter."""


def load_tokenizer(section: SupervisedSection, texts: Iterable[str]) -> Any:
    """Return the tokenizer of the base, or train one on the texts.

    Raises:
        ConfigError: the base is no folder with a tokenizer, or the vocabulary is too small.
    """
    if section.new_model is not None:
        return train_tokenizer(texts, section.new_model)
    folder = _base(section)
    side_files(folder, trust_remote_code=False, key="base")  # an error where there is none
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"base {str(folder)!r} holds no usable tokenizer: {error}") from None


def make_trainee(
    section: SupervisedSection, tokenizer: Any, team: Team, *, labels: Sequence[str] | None = None
) -> Trainee:
    """Load or make the model of a section, a classifier where there are labels.

    Args:
        labels: outputs of the classifier; None: a language model.

    Raises:
        ConfigError: the base is no such model, the examples can be longer than it reads, the device cannot be used, or
            the adapter does not fit.
    """
    auto: Any = AutoModelForCausalLM if labels is None else AutoModelForSequenceClassification
    named = (
        {}
        if labels is None
        else {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}
    )
    torch.manual_seed(section.seed)  # of new weights, a new head and an adapter
    if section.new_model is not None:
        config, is_empty = new_config(section.new_model, tokenizer, **named), not team.is_leader
        with torch.device("meta" if is_empty else "cpu"):
            model = auto.from_config(config, dtype=torch.float32)
    elif team.is_leader:
        model = _load_base(auto, _base(section), named)
    else:
        model = empty_weights(auto, _base(section), key="base")
    _check_length(section, model)
    config = copy.deepcopy(model.config)  # before dropout is switched off
    inner = config.get_text_config()
    if labels is not None and inner.pad_token_id is None:  # else other programs read such a model one text at a time
        # only now: an embedding that is made with it learns nothing for this token
        inner.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if team.mesh is None:
        model = to_device(model, section.device, key="device")
    model = prepare(model, None, section.gradient_checkpointing)
    if section.gradient_checkpointing and team.is_leader:  # the others have no weights yet
        check_train_mode(model, section.base or "new_model", key="gradient_checkpointing")
    if team.mesh is not None:
        shard(model, team.mesh, compute_dtype=section.compute_dtype)
    files = () if section.base is None else _files(section, is_classifier=labels is not None)
    return Trainee(model=model, tokenizer=tokenizer, config=config, files=files, num_parameters=num_parameters)


def write_folder(
    trainee: Trainee,
    out: Path,
    *,
    half_made: Path,
    dtype: str,
    max_bytes: int,
    report: dict[str, Any],
    is_leader: bool,
) -> None:
    """Write a folder in Hugging Face format, complete or not at all; one that an earlier training made is replaced.

    Every process of a sharded model calls it; the leader writes.

    Args:
        half_made: where the folder is written before it gets its name, on the same file system.
        dtype: of the weights.
        max_bytes: of one file of weights.
        report: supervised.json.

    Raises:
        ConfigError: a folder that no training made has come there.
        OSError: the disk is full.
    """
    tensors = published_tensors(trainee.model, TORCH_DTYPES[dtype])
    if not is_leader:
        for _ in tensors:
            pass
        return
    shutil.rmtree(half_made, ignore_errors=True)
    half_made.mkdir(parents=True)
    paths = write_model_files(tensors, half_made, max_bytes=max_bytes)
    if len(paths) > 1:
        write_index(half_made, paths)
    if not trainee.files:
        trainee.tokenizer.save_pretrained(half_made)
    for path in trainee.files:
        shutil.copyfile(path, half_made / path.name)
    config = copy.deepcopy(trainee.config)
    config.architectures, config.dtype = [type(trainee.model).__name__], TORCH_DTYPES[dtype]
    config.save_pretrained(half_made)
    (half_made / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    check_free(out)
    shutil.rmtree(out, ignore_errors=True)
    half_made.rename(out)


def check_free(out: Path) -> None:
    """Check that nothing of a person's own would be replaced.

    Raises:
        ConfigError: there is a file, or a folder that no training made.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / REPORT_FILE).is_file()):
        raise ConfigError(f"{out} is there and holds no {REPORT_FILE}, so no training made it; move it away")


def _base(section: SupervisedSection) -> Path:
    folder = Path(section.base or "")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"base {section.base!r} holds no model (no config.json); give a folder in Hugging Face format, or let "
            "`tba data prepare RECIPE` fetch it"
        )
    return folder


def _load_base(auto: Any, folder: Path, named: dict[str, Any]) -> Any:
    # a classifier with other labels gets a new head
    more = {"new_head": True, "num_labels": len(named["id2label"]), **named} if named else {}
    return load_weights(auto, folder, key="base", **more)


def _check_length(section: SupervisedSection, model: Any) -> None:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # the Roberta family counts positions from behind its padding index
    offset = getattr(getattr(model.base_model, "embeddings", None), "padding_idx", None)
    if longest is not None and offset is not None:
        longest -= offset + 1
    if section.new_model is None and longest is not None and section.max_length_tokens > longest:
        raise ConfigError(
            f"max_length_tokens is {section.max_length_tokens}, and the model {section.base!r} reads at most {longest} "
            "tokens; lower it"
        )


def _files(section: SupervisedSection, *, is_classifier: bool) -> tuple[Path, ...]:
    found = side_files(_base(section), trust_remote_code=False, key="base")
    others = {"config.json", REPORT_FILE, "warmstart.json", *(["generation_config.json"] if is_classifier else [])}
    return tuple(path for name, path in found.items() if name not in others)
